"""A network with what it says about its images, and the networks of torchvision, timm and transformers."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def first_adapted(self, chosen: str) -> str:
        """Returns the first stage that is adapted with this `ModelOptions.adapt_from`; empty for all."""
        return self.adapt_from if chosen == "auto" else chosen

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


def torchvision(name: str, classes: int, size: int | None = None) -> Backbone:
    """Returns torchvision's network of this name, with random weights, for images of `size` pixels per side."""
    models = package("torchvision", "torchvision.models")
    _check(name, models.list_models(module=models), "torchvision")
    images = models.get_model_weights(name).DEFAULT.transforms()
    sized = {"image_size": size} if size and name.startswith("vit_") else {}
    net = models.get_model(name, weights=None, num_classes=classes, **sized)
    return Backbone(net, size=images.crop_size[0], mean=tuple(images.mean), std=tuple(images.std))


def timm(name: str, classes: int, size: int | None = None) -> Backbone:
    """Returns timm's network of this name, with random weights, for images of `size` pixels per side."""
    models = package("timm", "timm")
    if not models.is_model(name):
        _check(name, models.list_models(), "timm")
    net = models.create_model(name, pretrained=False, num_classes=classes)
    if size and net.pretrained_cfg.get("fixed_input_size"):  # made for one size, such as a ViT
        net = models.create_model(name, pretrained=False, num_classes=classes, img_size=size)
    head = next((n for n, m in net.named_modules() if m is net.get_classifier()), "")
    images = net.pretrained_cfg
    return Backbone(net, head, images["input_size"][-1], tuple(images["mean"]), tuple(images["std"]))


def transformers(name: str, classes: int, size: int | None = None) -> Backbone:
    """Returns a network of transformers with random weights, for images of `size` pixels per side.

    name: a kind of model ("vit"), a folder that `save_pretrained` wrote, or a model of the local cache.
    """
    auto = package("transformers", "transformers")
    config = _config(auto, name)
    config.num_labels = classes
    if size and isinstance(getattr(config, "image_size", None), int):
        config.image_size = size
    net = auto.AutoModelForImageClassification.from_config(config)
    kind: Any = type(net)

    class Logits(kind):  # type: ignore[misc]
        """Gives logits instead of transformers' record of outputs; the names of its parameters stay theirs."""

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(pixel_values=images).logits  # type: ignore[no-any-return]

    net.__class__ = Logits
    about = _read_json(Path(name) / "preprocessor_config.json")
    mean, std = (tuple(about[k]) if k in about else None for k in ("image_mean", "image_std"))
    return Backbone(net, size=getattr(config, "image_size", None), mean=mean, std=std)


def _config(auto: Any, name: str) -> Any:
    """Returns the configuration of a kind of model, a folder or a model of the local cache."""
    kinds = auto.AutoConfig.for_model
    if re.fullmatch(r"[\w-]+", name) and not Path(name).exists():
        try:
            return kinds(name)
        except ValueError as error:
            raise InputError(f"transformers has no kind of model {name!r}, and there is no such folder") from error
    try:
        return auto.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"transformers cannot read {name!r} as a folder or from its local cache") from error


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf8")) if path.is_file() else {}


PACKAGES = {"torchvision": torchvision, "timm": timm, "transformers": transformers}


def _check(name: str, known: Iterable[str], library: str) -> None:
    """Raises InputError, with the nearest name, if a library does not know this network."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{library} has no model {name!r} for classification{hint}")
