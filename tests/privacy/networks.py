"""Small networks as lanes, with values that tell lanes apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perada.adapters import Bottleneck, Lora, Residual, adapt
from perada.lanes import LaneModel, Samples, State, records, ways
from perada.models import backbone
from perada.models.vit import Shape, ViT

CLASSES, SIZE = 4, 8


def vit() -> ViT:
    torch.manual_seed(0)
    net = ViT(Shape(12, 2, 2), SIZE, 4, CLASSES)
    for p in net.parameters():  # as random as trained ones
        p.data.normal_(std=0.3)
    return net


def efficientnet(start: str = "stage7") -> LaneModel:
    net = backbone("efficientnet_lite0", CLASSES).net
    return adapt(net, adapter=Residual(dropout=0.0), head="fc", start=start)


MODELS: dict[str, Callable[[], LaneModel]] = {
    "ViT with LoRA": lambda: adapt(vit(), adapter=Lora(rank=2), head="head"),
    "ViT with bottlenecks": lambda: adapt(vit(), adapter=Bottleneck(reduction=4), head="head"),
    "efficientnet_lite0": efficientnet,
    "resnet8 with adapters": lambda: adapt(backbone("resnet8", CLASSES).net, adapter=Residual(dropout=0.0), head="fc"),
}
FULL: dict[str, Callable[[], LaneModel]] = {
    "full ViT": lambda: adapt(vit(), adapter=None, trained="full", head="head"),
    "full resnet8": lambda: adapt(backbone("resnet8", CLASSES).net, adapter=None, trained="full", head="fc"),
}


def size_of(name: str) -> int:
    return 32 if name == "efficientnet_lite0" else SIZE


def lanes_of(model: LaneModel, lanes: int, dtype: torch.dtype = torch.float64) -> State:
    """Lanes that differ, in this precision."""
    model.to("cpu", dtype)
    draw = torch.Generator().manual_seed(1)
    one = model.initial(lanes)
    params = {n: p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in one.params.items()}
    buffers = {n: b * (1 + 0.1 * torch.rand(b.shape, generator=draw, dtype=b.dtype)) for n, b in one.buffers.items()}
    return State(params, buffers)


def samples_of(size: int, counts: tuple[int, ...], dtype: torch.dtype = torch.float64, step: int = 0) -> Samples:
    draw, many = torch.Generator().manual_seed(2 + step), sum(counts)
    images = torch.randn(many, 3, size, size, generator=draw, dtype=dtype)
    targets = torch.randint(CLASSES, (many, 1), generator=draw)
    keys = torch.arange(many, dtype=torch.int64)
    return Samples(images, targets, None, keys, counts, tuple(range(len(counts))), step)


def flat(grads: dict[str, Tensor]) -> Tensor:
    """Gradients `[m, ...]` side by side, `[m, n]`."""
    return torch.cat([g.flatten(1) for _, g in sorted(grads.items())], 1)


def record_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small matrices worth recording."""
    monkeypatch.setattr(records, "LARGE", 1)
    monkeypatch.setattr(ways, "LEAST", 0.0)
    monkeypatch.setattr(ways, "worth", lambda seen: frozenset(n for n, each in seen.items() if len(each) == 1))
