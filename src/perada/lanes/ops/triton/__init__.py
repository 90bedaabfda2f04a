"""The operations as GPU kernels in Triton. A small network on a GPU spends its time on starting kernels and on reading
and writing activations, so each kernel here does the work of several.

Each method takes the kernel where it fits, and plain torch otherwise. The tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...conv import Kernel, uses_columns
from ..forms import best_form
from ..plain import Change, Ops, Pulled
from . import compile_pool, flat, images, loss
from .adapter import lane_adapter
from .conv import lane_conv
from .launch import compiling
from .norm import Drop, lane_norm
from .side_stream import beside, join
from .stem import norm_and_pool, stem_norm

if TYPE_CHECKING:
    from ...context import Slots
    from ...layers import LaneBatchNorm, ResidualAdapter
    from ...stem import Stem


class Triton(Ops):
    """The operations of a GPU."""

    fast = True

    def norm(self, x: Tensor, layer: LaneBatchNorm, add: Tensor | None = None, relu: bool = False) -> Tensor:
        if not _fits(layer, x.shape):
            return super().norm(x, layer, add, relu)
        return lane_norm(x, (layer.weight, layer.bias), layer.statistics, layer.context.slots, add=add, relu=relu)

    def norm_and_pool(self, x: Tensor, layer: LaneBatchNorm, pool: nn.Module) -> Tensor:
        usual = isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
        if not usual or x.requires_grad or not _fits(layer, x.shape):
            return super().norm_and_pool(x, layer, pool)
        return norm_and_pool(x, (layer.weight, layer.bias), layer.statistics, layer.context.slots)

    def stem_norm(self, stem: Stem, layer: LaneBatchNorm) -> Tensor:
        if not _fits(layer, stem.shape):
            return super().stem_norm(stem, layer)
        return stem_norm(stem, (layer.weight, layer.bias), layer.statistics, layer.context.slots)

    def adapter(self, x: Tensor, adapter: ResidualAdapter) -> Tensor:
        norm, drop, matrix = adapter.norm, adapter.dropout, adapter.conv.weight
        if matrix.dim() != 5 or not _fits(norm, x.shape):
            return super().adapter(x, adapter)
        active = Drop(drop.key, drop.salt, drop.p) if drop.key.dim() and drop.p else None
        return lane_adapter(x, (norm.weight, norm.bias), norm.statistics, matrix, active, norm.context.slots)

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int] = (1, 1),
        kernel: Kernel | None = None,
        slots: Slots | None = None,
    ) -> Tensor:
        if not uses_columns(x, weight, stride, padding, dilation, kernel):
            return super().conv(x, weight, stride, padding, dilation, kernel, slots)
        return lane_conv(x, weight, stride[0], padding, slots)

    def frozen_conv(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        if best_form(x, layer) != "columns":
            return super().frozen_conv(x, layer)
        return lane_conv(x, layer.weight.unsqueeze(0), layer.stride[0], layer.padding)  # type: ignore[arg-type]

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x) if x.requires_grad else images.blocks(x)

    def side_by_side(
        self, less: Callable[[Tensor], Tensor], more: Callable[[Tensor], Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        with beside(x):
            first = less(x)
        second = more(x)
        join(x.device, first)
        return first, second

    def join(self, device: torch.device) -> None:
        join(device)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss.cross_entropy(logits, targets)

    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        return loss.divergence(student, teacher, temperature)

    def views(
        self,
        pool: Tensor,
        samples: Tensor,
        keys: Tensor,
        augment: Callable[[Tensor, Tensor], Tensor] | None,
        draws: tuple[int, int, int] | None,
        mean: Tensor,
        std: Tensor,
    ) -> Tensor:
        if draws is None:
            return super().views(pool, samples, keys, augment, draws, mean, std)
        salt, number, shift = draws
        mean, std = mean.expand(3, 1, 1), std.expand(3, 1, 1)
        return images.views(pool, samples, keys, salt, number, shift, mean, std, mean.dtype)

    def client_batch(
        self, index: Tensor, row: Tensor, keys: Tensor, targets: Tensor, lanes: Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(step, Tensor) or targets.dim() != 1:
            return super().client_batch(index, row, keys, targets, lanes, step)
        return images.picked(index, row, keys, targets, lanes, step)

    def chunk(self, step: int | Tensor, first: Tensor, key: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(step, Tensor):
            return super().chunk(step, first, key, targets)
        return images.chunk(step, first, key, targets)

    def sgd(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rates: Tensor,
        pull: Pulled | None = None,
        momentum: float = 0.0,
        velocities: Sequence[Tensor] = (),
    ) -> list[Change]:
        if momentum or not _are_flat(params, grads) or (pull and pull.where is None):
            return super().sgd(params, grads, rates, pull, momentum, velocities)
        p, g = params[0], grads[0]
        pulled = (pull.centres[0], pull.strength, pull.where) if pull and pull.where is not None else None
        total = flat.length(g, rates, pulled)
        return [Change(total, lambda moves: flat.sgd_step(p, g, rates, pulled, moves))]

    def adam(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        done: Tensor,
        table: Tensor,
        betas: tuple[float, float],
        eps: float,
    ) -> list[Change]:
        if not _are_flat(params, grads, firsts, seconds):
            return super().adam(params, grads, firsts, seconds, done, table, betas, eps)
        old = params[0], firsts[0], seconds[0], done
        *new, total = flat.adam_step(params[0], grads[0], firsts[0], seconds[0], done, table, betas, eps)

        def write(moves: Tensor) -> None:
            for a, b in zip(old, new, strict=True):
                self.write(a, b, moves)

        return [Change(total, write)]

    def write(self, old: Tensor, new: Tensor, moves: Tensor) -> None:
        if old.dim() == 2 and old.is_contiguous() and new.is_contiguous():
            flat.keep(old, new, moves)
        else:
            super().write(old, new, moves)

    def settle(
        self, counts: Tensor, at: Tensor, finite: Tensor, losses: Tensor, total: Tensor, trace: Tensor
    ) -> Tensor:
        return flat.settle(counts, at, finite, losses, total, trace)

    def get_ready(self, device: torch.device) -> None:
        if device.type == "cuda":
            compile_pool.start(torch.cuda.get_device_capability(device))

    def compile(self, work: Callable[[], Any]) -> None:
        with compiling():
            work()


def _fits(layer: LaneBatchNorm, shape: torch.Size) -> bool:
    """Returns whether the kernels take this norm: it has lanes and maps, and running statistics need no gradient."""
    s = layer.statistics
    return s.mean.dim() == 2 and len(shape) == 4 and not (s.mode == "running" and torch.is_grad_enabled())


def _are_flat(*several: Sequence[Tensor]) -> bool:
    """Returns whether each of these is a single contiguous tensor `[K, n]`."""
    return all(len(some) == 1 and some[0].dim() == 2 and some[0].is_contiguous() for some in several)
