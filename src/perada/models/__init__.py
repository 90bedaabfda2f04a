"""Backbones, their weights and their parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from ..adapters import adapt
from ..errors import unknown
from ..lanes import Group, LaneModel
from .resnet import SHAPES, ResNet, resnet
from .weights import WeightReport, load_into, read_weights

__all__ = [
    "BACKBONES",
    "WEIGHTS",
    "WeightReport",
    "build_backbone",
    "count_groups",
    "group_sizes",
    "lane_model",
    "load_into",
    "read_weights",
]

BACKBONES = tuple(SHAPES)
WEIGHTS = ("embedded", "torchvision", "fedavg", "random")  # what model.weights may be beside a file


def build_backbone(name: str, classes: int, weights: str, seed: int) -> tuple[ResNet, WeightReport | None]:
    """A network with its weights in place; `weights` as in `read_weights`, or "random"."""
    if name not in SHAPES:
        raise unknown("backbone", name, SHAPES)
    net = resnet(name, classes, seed)
    if weights == "random":
        return net, None
    return net, load_into(net, read_weights(weights, name), weights)


def lane_model(
    net: ResNet, trained: str, adapter: str | None, dropout: float, seed: int, std: float = 1e-4
) -> LaneModel:
    """`net` with its lanes: with adapters (PerAda), or as it is (None: full-model methods)."""
    return adapt(net, adapter=None, trained=trained, seed=seed)


@dataclass(frozen=True)
class GroupSizes:
    """The groups of a backbone with adapters, and the size of every tensor they name."""

    groups: Mapping[str, Group]
    size: Mapping[str, int]
    model: LaneModel

    def parameters(self, group: Group) -> int:
        return sum(self.size[n] for n in group.params)

    def buffers(self, group: Group) -> int:
        return sum(self.size[n] for n in group.buffers)


@lru_cache
def network_of(name: str, classes: int) -> nn.Module:
    """Returns a backbone with random weights; the same object for the same arguments."""
    return build_backbone(name, classes, "random", 0)[0]


def group_sizes(name: str, classes: int) -> GroupSizes:
    return module_sizes(network_of(name, classes), adapters=True)


def module_sizes(net: nn.Module, adapters: bool, head: str | None = None) -> GroupSizes:
    """Returns the parameter groups of a network, with adapters if asked for, and their sizes."""
    model = adapt(net, adapter="residual" if adapters else None, trained="everything", head=head)
    tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    return GroupSizes(model.groups, {n: t.numel() for n, t in tensors.items()}, model)


def count_groups(name: str, classes: int) -> dict[str, dict[str, int]]:
    """Parameters and buffers (running statistics) of every group, counted on the adapter-augmented network."""
    sizes = group_sizes(name, classes)
    return {n: {"parameters": sizes.parameters(g), "buffers": sizes.buffers(g)} for n, g in sizes.groups.items()}


def with_weights(net: nn.Module, file: Path) -> nn.Module:
    """Returns a copy of a network with the weights of a run folder's file."""
    net = copy.deepcopy(net)
    load_into(net, read_weights(str(file), ""), str(file))
    return net


def same_weights(net: nn.Module, file: Path) -> bool:
    """Whether a network has the weights of a run folder's file."""
    found, own = read_weights(str(file), ""), net.state_dict()
    return all(k in own and torch.equal(own[k].cpu().float(), t.float()) for k, t in found.items())
