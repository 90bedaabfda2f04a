"""Backbones, their weights and their parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters import Residual
from ..errors import InputError
from ..lanes import Group, default_groups, key_of
from ..plugins import called, check, find
from .backbone import Backbone
from .packages import PACKAGES
from .resnet import SHAPES, resnet
from .weights import WEIGHTS, WeightReport, load_into, read_weights

__all__ = [
    "BACKBONES",
    "WEIGHTS",
    "Backbone",
    "GroupSizes",
    "WeightReport",
    "backbone",
    "build_backbone",
    "count_groups",
    "group_sizes",
    "known",
    "load_into",
    "names_code",
    "network_of",
    "read_weights",
    "same_weights",
    "with_weights",
]

BACKBONES = tuple(SHAPES)
GROUP = "perada.backbones"  # of entry points


def known(name: str) -> None:
    """Refuses a name that cannot be a backbone. Builds and imports nothing.

    A name is one of `BACKBONES`, `torchvision:NAME`, `timm:NAME`, `package.module:callable`, or an entry point.
    """
    package, _, model = name.partition(":")
    if not (package in PACKAGES and model):
        check("backbone", GROUP, name, SHAPES)


def names_code(name: str) -> bool:
    """Returns whether what this name stands for is in a module that the name itself chooses."""
    package, colon, _ = name.partition(":")
    return bool(colon) and package not in PACKAGES


def backbone(name: str, classes: int, seed: int = 0, head: str = "") -> Backbone:
    """Returns the network of that name for so many classes, with first weights that depend on the seed.

    A callable is called with `classes`. It returns a module, or a `Backbone`; a string attribute `head` of it or of
    the module names the prediction layer. The argument `head` names another.
    """
    known(name)
    if name in SHAPES:
        return Backbone(resnet(name, classes, seed), head or "fc", name=name)
    package, _, model = name.partition(":")
    make: Callable[..., Any] = (
        partial(PACKAGES[package], model) if package in PACKAGES else find("backbone", GROUP, name, SHAPES)
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


def build_backbone(name: str, classes: int, weights: str, seed: int) -> tuple[nn.Module, WeightReport | None]:
    """Returns a network with its weights in place (see `read_weights`; "random" for none), and what they gave."""
    made = backbone(name, classes, seed)
    return made.net, made.load(weights)


@dataclass(frozen=True)
class GroupSizes:
    """The parameter groups of a network, and the size of every tensor they name."""

    groups: Mapping[str, Group]
    size: Mapping[str, int]

    @staticmethod
    def of(net: nn.Module, groups: Mapping[str, Group]) -> GroupSizes:
        return GroupSizes(groups, {n: t.numel() for n, t in (*net.named_parameters(), *net.named_buffers())})

    def parameters(self, group: Group) -> int:
        return sum(self.size[n] for n in group.params)

    def buffers(self, group: Group) -> int:
        return sum(self.size[n] for n in group.buffers)


@lru_cache
def network_of(name: str, classes: int) -> Backbone:
    """Returns a backbone with random weights; the same object for the same arguments."""
    return backbone(name, classes)


@lru_cache
def group_sizes(name: str, classes: int) -> GroupSizes:
    """Returns the group sizes of a backbone with residual adapters, where it has places for them."""
    made, kind = network_of(name, classes), Residual()
    net = copy.deepcopy(made.net)
    if kind.places(net):
        kind.insert(net, 0)
    return GroupSizes.of(net, default_groups(net, made.head))


def count_groups(name: str, classes: int) -> dict[str, dict[str, int]]:
    """Returns the parameters and buffers (running statistics) of every group of a backbone with adapters."""
    sizes = group_sizes(name, classes)
    return {n: {"parameters": sizes.parameters(g), "buffers": sizes.buffers(g)} for n, g in sizes.groups.items()}


def with_weights(net: nn.Module, file: Path) -> nn.Module:
    """Returns a copy of a network with the weights of a run folder's file."""
    net = copy.deepcopy(net)
    load_into(net, read_weights(str(file), ""), str(file))
    return net


def same_weights(net: nn.Module, file: Path) -> bool:
    """Returns whether a network has the weights of a run folder's file."""
    saved, own = read_weights(str(file), ""), net.state_dict()
    return all(k in own and torch.equal(own[k].cpu().float(), t.float()) for k, t in saved.items())
