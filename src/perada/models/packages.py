"""Networks of torchvision and timm, which are imported when one is asked for."""

import difflib
from collections.abc import Iterable

from ..errors import InputError
from .backbone import Backbone
from .weights import package


def torchvision(name: str, classes: int) -> Backbone:
    """Returns torchvision's network of that name, with random weights."""
    models = package("torchvision", "torchvision.models")
    _check(name, models.list_models(module=models), "torchvision")
    images = models.get_model_weights(name).DEFAULT.transforms()
    net = models.get_model(name, weights=None, num_classes=classes)
    return Backbone(net, size=images.crop_size[0], mean=tuple(images.mean), std=tuple(images.std))


def timm(name: str, classes: int) -> Backbone:
    """Returns timm's network of that name, with random weights."""
    models = package("timm", "timm")
    if not models.is_model(name):
        _check(name, models.list_models(), "timm")
    net = models.create_model(name, pretrained=False, num_classes=classes)
    head = next((n for n, m in net.named_modules() if m is net.get_classifier()), "")
    images = net.pretrained_cfg
    return Backbone(net, head, images["input_size"][-1], tuple(images["mean"]), tuple(images["std"]))


PACKAGES = {"torchvision": torchvision, "timm": timm}


def _check(name: str, known: Iterable[str], library: str) -> None:
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{library} has no model {name!r} for classification{hint}")
