"""Backbones by name, their weights and their parameter groups."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters import fitting, inserted
from ..errors import InputError
from ..lanes import Group, default_groups, key_of
from ..plugins import called, check, find
from .backbone import PACKAGES, Backbone
from .efficientnet import ADAPT_FROM, SCALES, efficientnet_lite
from .efficientnet import MEAN as LITE_MEAN
from .efficientnet import STD as LITE_STD
from .resnet import SHAPES, resnet
from .vit import MEAN, STD, is_vit, vit
from .vit import SHAPES as VITS
from .vit import SIZE as VIT_SIZE
from .weights import WEIGHTS, WeightReport, load_into, read_weights

__all__ = [
    "BACKBONES",
    "WEIGHTS",
    "Backbone",
    "WeightReport",
    "backbone",
    "count_groups",
    "group_sizes",
    "known",
    "load_into",
    "names_code",
    "network_of",
    "own_normalisation",
    "read_weights",
    "same_weights",
    "with_weights",
]

OURS: dict[str, Any] = {**SHAPES, **SCALES, **VITS}
BACKBONES = tuple(OURS)
GROUP = "perada.backbones"  # of entry points


def known(name: str) -> None:
    """Raises InputError if a name cannot be a backbone. Builds and imports nothing.

    A name is one of `BACKBONES`, one of the vision transformers with a patch size (`vit_small_patch8`),
    `torchvision:NAME`, `timm:NAME`, `transformers:NAME`, `package.module:callable`, or an entry point.
    """
    package, _, model = name.partition(":")
    if not (package in PACKAGES and model) and not is_vit(name):
        check("backbone", GROUP, name, OURS)


def names_code(name: str) -> bool:
    """Returns whether a name chooses the module whose code builds the backbone."""
    package, colon, _ = name.partition(":")
    return bool(colon) and package not in PACKAGES


def backbone(name: str, classes: int, seed: int = 0, head: str = "", size: int | None = None) -> Backbone:
    """Returns the network of this name for so many classes, with first weights that depend on the seed.

    size: pixels per side of the run's images, for networks that are made for one size; None takes the network's own.
    A callable gets `classes` and returns a module or a `Backbone`. A string attribute `head` of the callable or of the
    module names the prediction layer. The argument `head` overrides it.
    """
    known(name)
    if name in SHAPES:
        return Backbone(resnet(name, classes, seed), head or "fc", name=name)
    if name in SCALES:
        net = efficientnet_lite(name, classes, seed)
        return Backbone(net, head or "fc", SCALES[name].size, (LITE_MEAN,) * 3, (LITE_STD,) * 3, name, ADAPT_FROM)
    if is_vit(name):
        return Backbone(vit(name, classes, seed, size), head or "head", VIT_SIZE, MEAN, STD, name)
    package, _, model = name.partition(":")
    make: Callable[..., Any] = (
        partial(PACKAGES[package], model, size=size) if package in PACKAGES else find("backbone", GROUP, name, {})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_of(seed, "backbone") & (2**63 - 1))
        made = called("backbone", name, make, classes)
    try:
        if not isinstance(made, Backbone):
            own = [h for h in (getattr(made, "head", None), getattr(make, "head", None)) if isinstance(h, str)]
            made = Backbone(made, head or (own[0] if own else ""))
        made = replace(made, head=head or made.head, name=name)
    except InputError as error:
        raise InputError(f"backbone {name!r}: {error}") from error
    layer = made.head_layer
    if isinstance(layer, nn.Linear) and layer.out_features != classes:
        raise InputError(f"backbone {name!r} has {layer.out_features} outputs for {classes} classes")
    return made


@lru_cache
def network_of(name: str, classes: int, size: int | None = None) -> Backbone:
    """Returns a backbone with random weights; the same object for the same arguments."""
    return backbone(name, classes, size=size)


def own_normalisation(name: str, classes: int, how: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns the mean and standard deviation per channel of the images that a backbone expects.

    how: `DataOptions.normalise`. None if it asks for another normalisation, or with "auto" where the backbone has none.
    """
    if how not in ("auto", "backbone"):
        return None
    made = network_of(name, classes)
    if made.mean is None or made.std is None:
        if how == "auto":
            return None
        raise InputError(f"backbone {made.name!r} has no normalisation of its own: set DataOptions.normalise to data")
    return made.mean, made.std


@lru_cache
def count_groups(name: str, classes: int) -> dict[str, dict[str, int]]:
    """Returns `group_sizes` of a backbone, with the adapters that it has places for, with their default settings."""
    made = network_of(name, classes)
    net, kind = copy.deepcopy(made.net), fitting(made.net, made.head)
    if kind:
        inserted(net, kind, 0, made.head)
    return group_sizes(net, default_groups(net, made.head))


def group_sizes(net: nn.Module, groups: Mapping[str, Group]) -> dict[str, dict[str, int]]:
    """Returns the numbers of parameters and buffers (running statistics) in every group of a network."""
    size = {n: t.numel() for n, t in (*net.named_parameters(), *net.named_buffers())}
    return {
        name: {"parameters": sum(size[n] for n in g.params), "buffers": sum(size[n] for n in g.buffers)}
        for name, g in groups.items()
    }


def with_weights(net: nn.Module, file: Path) -> nn.Module:
    """Returns a copy of a network with the weights of a run folder's file."""
    net = copy.deepcopy(net)
    load_into(net, read_weights(str(file), ""), str(file))
    return net


def same_weights(net: nn.Module, file: Path) -> bool:
    """Returns whether a network has the weights of a run folder's file."""
    saved, own = read_weights(str(file), ""), net.state_dict()
    return all(k in own and torch.equal(own[k].cpu().float(), t.float()) for k, t in saved.items())
