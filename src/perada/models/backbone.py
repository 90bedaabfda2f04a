"""A network with what it says about its images, and the networks of torchvision and timm."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..lanes import last_linear
from .weights import WeightReport, load_into, package, read_weights


@dataclass(frozen=True)
class Backbone:
    """A network, its head, and the images it expects.

    head: the name of the prediction layer; by default the last linear layer.
    size, mean, std: pixels per side and normalisation that its pretrained weights expect; None takes the data's own.
    name: the name that it was built from, such as "resnet18".
    adapt_from: the first stage to adapt with `ModelOptions.adapt_from=auto`; empty adapts all.
    """

    net: nn.Module
    head: str = ""
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    name: str = ""
    adapt_from: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.net, nn.Module):
            what = repr(self.net) if isinstance(self.net, str) else type(self.net).__name__
            hint = ": perada.models.backbone(name, classes).net is one" if isinstance(self.net, str | Backbone) else ""
            raise InputError(f"a backbone must be a torch.nn.Module, not {what}{hint}")
        if not self.head:
            object.__setattr__(self, "head", last_linear(self.net))
        elif not self.head_layer:
            raise InputError(f"this network has no layer {self.head!r} that could be its head")

    @property
    def head_layer(self) -> nn.Module | None:
        """Returns the prediction layer, if there is a layer of that name with parameters of its own."""
        layer = dict(self.net.named_modules()).get(self.head)
        return layer if layer is not None and any(True for _ in layer.parameters(recurse=False)) else None

    def load(self, weights: str) -> WeightReport | None:
        """Loads pretrained weights (see `read_weights`) and reports what fitted. "random" loads nothing."""
        if weights == "random":
            return None
        return load_into(self.net, read_weights(weights, self.name), weights, self.head)

    @torch.no_grad()
    def check(self, image: Sequence[int], classes: int) -> None:
        """Raises InputError if the network cannot take images `[n, *image]` or does not give one logit per class."""
        shape, training = "×".join(map(str, image)), self.net.training
        weight = next(self.net.parameters())
        try:
            logits = self.net.eval()(torch.zeros(2, *image, dtype=weight.dtype, device=weight.device))
        except Exception as error:  # a network may fail in any way
            first = next(iter(str(error).splitlines()), "")
            raise InputError(f"the backbone cannot take images of {shape}: {type(error).__name__}: {first}") from error
        finally:
            self.net.train(training)
        if not isinstance(logits, Tensor) or logits.shape != (2, classes):
            shown = f"{list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise InputError(f"the backbone must give logits [2, {classes}] for two images, not {shown}")


def torchvision(name: str, classes: int) -> Backbone:
    """Returns torchvision's network of this name, with random weights."""
    models = package("torchvision", "torchvision.models")
    _check(name, models.list_models(module=models), "torchvision")
    images = models.get_model_weights(name).DEFAULT.transforms()
    net = models.get_model(name, weights=None, num_classes=classes)
    return Backbone(net, size=images.crop_size[0], mean=tuple(images.mean), std=tuple(images.std))


def timm(name: str, classes: int) -> Backbone:
    """Returns timm's network of this name, with random weights."""
    models = package("timm", "timm")
    if not models.is_model(name):
        _check(name, models.list_models(), "timm")
    net = models.create_model(name, pretrained=False, num_classes=classes)
    head = next((n for n, m in net.named_modules() if m is net.get_classifier()), "")
    images = net.pretrained_cfg
    return Backbone(net, head, images["input_size"][-1], tuple(images["mean"]), tuple(images["std"]))


PACKAGES = {"torchvision": torchvision, "timm": timm}


def _check(name: str, known: Iterable[str], library: str) -> None:
    """Raises InputError, with the nearest name, if a library does not know this network."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{library} has no model {name!r} for classification{hint}")
