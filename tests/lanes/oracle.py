"""The oracle: one lane at a time, in ordinary torch.

Nothing here knows of lanes. An adapter is written out again, batch norm is `nn.BatchNorm2d`, the
optimiser is a hand-written loop. `tests/lanes` compares the folded engine with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainAdapter(nn.Module):
    """`x + Conv1x1(BN(x))`: SPEC section 4 without dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x))


class AdaptedConv(nn.Conv2d):
    """A convolution and its adapter, with the parameter names the lane model uses."""

    def __init__(self, conv: nn.Conv2d) -> None:
        shape = conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation
        super().__init__(*shape, conv.groups, conv.bias is not None, conv.padding_mode)
        self.weight, self.bias = conv.weight, conv.bias
        self.adapter = PlainAdapter(conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x))


def with_adapters(net: nn.Module, names: Sequence[str] = ()) -> nn.Module:
    """A copy of `net` with an adapter behind these convolutions; by default conv1 and conv2 of every block."""
    net = copy.deepcopy(net)
    blocks = [n for n, _ in net.named_modules() if n.count(".") == 1 and n.startswith("layer")]
    for name in names or [f"{b}.{conv}" for b in blocks for conv in ("conv1", "conv2")]:
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, AdaptedConv(net.get_submodule(name)))
    return net


@dataclass(frozen=True)
class Sgd:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    lam: float = 0.0


def train(
    module: nn.Module,
    lane: Mapping[str, Tensor],
    trained: Iterable[str],
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    how: Sgd,
    centre: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Start from one lane's values, train, return all of the module's tensors and the losses."""
    module = copy.deepcopy(module).double()
    unknown = module.load_state_dict(dict(lane), strict=False).unexpected_keys
    assert not unknown, unknown
    module.train()
    params = {n: p for n, p in module.named_parameters() if n in set(trained)}
    for name, p in module.named_parameters():
        p.requires_grad_(name in params)
    velocity = {n: torch.zeros_like(p) for n, p in params.items()}
    losses = []
    for images, targets, weights in batches:
        loss = (F.cross_entropy(module(images), targets, reduction="none") * weights).mean()
        losses.append(loss.item())
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        shrink = 1.0 if how.clip is None else min(1.0, how.clip / norm.item())
        with torch.no_grad():
            for name, p in params.items():
                g = shrink * grads[name] + how.weight_decay * p
                if centre is not None:
                    g = g + how.lam * (p - centre[name])
                velocity[name] = how.momentum * velocity[name] + g
                p -= how.lr * velocity[name]
    return {n: t.detach() for n, t in module.state_dict().items()}, losses
