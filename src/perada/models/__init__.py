"""Backbones, their weights and their parameter groups."""

from __future__ import annotations

from ..errors import unknown
from ..lanes import LaneModel, adapt
from .resnet import SHAPES, ResNet, resnet, resnet_groups
from .weights import WeightReport, load_into, read_weights

__all__ = ["BACKBONES", "WeightReport", "build_backbone", "count_groups", "lane_model", "load_into", "read_weights"]

BACKBONES = tuple(SHAPES)


def build_backbone(name: str, classes: int, weights: str, seed: int) -> tuple[ResNet, WeightReport | None]:
    """A network with its weights in place; `weights` as in `read_weights`, or "random"."""
    if name not in SHAPES:
        raise unknown("backbone", name, SHAPES)
    net = resnet(name, classes, seed)
    if weights == "random":
        return net, None
    return net, load_into(net, read_weights(weights, name), weights)


def lane_model(net: ResNet, trained: str, adapters: bool, dropout: float, seed: int) -> LaneModel:
    """`net` with its lanes: with adapters (PerAda), or as it is (full-model methods)."""
    kind = "residual" if adapters else None
    return adapt(net, adapter=kind, trained=trained, dropout=dropout, groups=resnet_groups, seed=seed)


def count_groups(name: str, classes: int) -> dict[str, dict[str, int]]:
    """Parameters and buffers (running statistics) of every group, counted on the adapter-augmented network."""
    if name not in SHAPES:
        raise unknown("backbone", name, SHAPES)
    model = lane_model(resnet(name, classes), "everything", True, 0.0, 0)
    size = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    return {
        group: {
            "parameters": sum(size[n].numel() for n in held.params),
            "buffers": sum(size[n].numel() for n in held.buffers),
        }
        for group, held in model.groups.items()
    }
