"""Batch norm over lanes, with the dropout, the residual sum and the ReLU around it.

A norm is one kernel forward and one backward where a program can hold all rows of some channels, otherwise two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...random import dropout_threshold, folding
from ..plain import Ops, Statistics
from .launch import launch
from .tiles import (
    MOST,
    UNROLL,
    Tiles,
    kept,
    lane_values,
    last,
    mixed,
    reduced,
    statistics,
    take_statistics,
    tickets,
    tiles,
    wide,
)  # fmt: skip

if TYPE_CHECKING:
    from ...layers import LaneBatchNorm


@triton.jit
def _forward(
    x_ptr, add_ptr, y_ptr, copy_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr,
    key_ptr, rows, channels, pixels, stride, running_stride, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr,
    MOMENTUM: tl.constexpr,
    EPS: tl.constexpr, KEEP: tl.constexpr, RUNNING: tl.constexpr, COPY: tl.constexpr, ACC: tl.constexpr,
    WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes y = norm(x), then dropout, or plus a residual, or ReLU. The statistics are the running ones, or those of
    the rows, which are all in this program (WHOLE) or were summed by `_sums`. COPY: also stores a copy of x."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < rows)[:, None] & inside[None, :]
    lane, at = k * rows * channels, r[:, None] * channels + c[None, :]  # 32 bits are enough within a lane, and cheaper
    x = tl.load(x_ptr + lane + at, mask=mask, other=0.0).to(ACC)
    if COPY:
        tl.store(copy_ptr + lane + at, x.to(copy_ptr.dtype.element_ty), mask=mask)
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    if RUNNING:
        mean, var = lane_values(running_mean_ptr, running_var_ptr, k, c, inside, running_stride, ACC)
        rstd = 1.0 / tl.sqrt(var + EPS)
    elif WHOLE:
        shift = tl.load(running_mean_ptr + k * running_stride + c, mask=inside, other=0.0).to(ACC)
        centred = tl.where(mask, x - shift[None, :], 0.0)
        mean, rstd = statistics(
            tl.sum(centred, 0), tl.sum(centred * centred, 0), shift, k, c, inside, rows, channels, running_stride,
            mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, MOMENTUM, EPS, KEEP, ACC, BC,
        )  # fmt: skip
    else:
        mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, inside, channels, ACC)
    y = (x - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :]
    if DROP:
        y = tl.where(kept(mixed(tl.load(key_ptr + k) + salt), r, c, channels, pixels, threshold, POWER), y * SCALE, 0.0)
    if ADD:
        y += tl.load(add_ptr + lane + at, mask=mask, other=0.0).to(ACC)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + lane + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(
    centred, g_ptr, y_ptr, scale, bias, key_ptr, at, mask, k, r, c, channels, pixels, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Computes the gradient that reaches the norm, behind ReLU (where the output is positive) and dropout."""
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(ACC)
    if RELU:
        if ADD:
            g = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0) > 0, g, 0.0)
        else:  # computing the output again is cheaper than reading it
            g = tl.where(centred * scale[None, :] + bias[None, :] > 0, g, 0.0)
    if DROP:
        g = tl.where(kept(mixed(tl.load(key_ptr + k) + salt), r, c, channels, pixels, threshold, POWER), g * SCALE, 0.0)
    return g


@triton.jit(do_not_specialize=["parts", "chunk", "loops"])
def _backward_sums(
    x_ptr, g_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, key_ptr, part_ptr, sums_ptr, dweight_ptr, dbias_ptr,
    ticket_ptr, rows, channels, pixels, stride, dweight_stride, dbias_stride, parts, chunk, loops,
    salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr,
    ACC: tl.constexpr,
    EVEN: tl.constexpr, UNROLL: tl.constexpr, MOST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums g and g·x̂ over a part of the rows. The last part to finish adds up all: the affine's gradients."""
    k, column, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c = column * BC + tl.arange(0, BC)
    inside = c < channels
    mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, inside, channels, ACC)
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    end = tl.minimum(part * chunk + chunk, rows)
    first, second = tl.zeros([BR, BC], ACC), tl.zeros([BR, BC], ACC)
    lane = k * rows * channels
    for i in tl.range(0, loops, loop_unroll_factor=UNROLL):
        r = part * chunk + i * BR + tl.arange(0, BR)
        mask = tl.full([BR, BC], 1, tl.int1) if EVEN else (r < end)[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + lane + at, mask=mask, other=0.0).to(ACC) - mean[None, :]
        g = _gradient(
            x, g_ptr + lane, y_ptr + lane, weight * rstd, bias, key_ptr, at, mask, k, r, c, channels, pixels, salt,
            threshold, SCALE, RELU, ADD, DROP, POWER, ACC,
        )  # fmt: skip
        first += g  # zero outside
        second += g * x
    first, second = tl.sum(first, 0), tl.sum(second, 0) * rstd
    at = part_ptr + (k * parts + part) * 2 * channels + c
    tl.store(at, first, mask=inside)
    tl.store(at + channels, second, mask=inside)
    if last(ticket_ptr + k * tl.num_programs(1) + column, parts):
        first, second = reduced(part_ptr, k, c, inside, channels, parts, MOST)
        tl.store(sums_ptr + 2 * k * channels + c, first, mask=inside)
        tl.store(sums_ptr + (2 * k + 1) * channels + c, second, mask=inside)
        intos(first, second, k, c, inside, dweight_ptr, dbias_ptr, dweight_stride, dbias_stride)


@triton.jit
def intos(first, second, k, c, inside, dweight_ptr, dbias_ptr, dweight_stride, dbias_stride):
    """Stores Σg as the bias's gradient and Σ g·x̂ as the weight's."""
    tl.store(dbias_ptr + k * dbias_stride + c, first.to(dbias_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + k * dweight_stride + c, second.to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, g_ptr, y_ptr, extra_ptr, dx_ptr, add_grad_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, sums_ptr, key_ptr,
    dweight_ptr, dbias_ptr, rows, channels, pixels, stride, dweight_stride, dbias_stride, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr,
    EXTRA: tl.constexpr,
    ACC: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes dx = w/σ (g − mean(g) − x̂ mean(g·x̂)) (+ extra), and the gradients of the residual and the affine."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < rows)[:, None] & inside[None, :]
    mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, inside, channels, ACC)
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    lane, at = k * rows * channels, r[:, None] * channels + c[None, :]
    centred = tl.load(x_ptr + lane + at, mask=mask, other=0.0).to(ACC) - mean[None, :]
    scale = weight * rstd
    # A residual's gradient is the one before dropout; a norm never has both.
    g = _gradient(
        centred, g_ptr + lane, y_ptr + lane, scale, bias, key_ptr, at, mask, k, r, c, channels, pixels, salt,
        threshold, SCALE, RELU, ADD, DROP, POWER, ACC,
    )  # fmt: skip
    if WHOLE:
        first = tl.sum(tl.where(mask, g, 0.0), 0)
        second = tl.sum(tl.where(mask, g * centred, 0.0), 0) * rstd
        intos(first, second, k, c, inside, dweight_ptr, dbias_ptr, dweight_stride, dbias_stride)
    else:
        first, second = lane_values(sums_ptr, sums_ptr + channels, k, c, inside, 2 * channels, ACC)
    if ADD:
        tl.store(add_grad_ptr + lane + at, g.to(add_grad_ptr.dtype.element_ty), mask=mask)
    dx = scale[None, :] * (g - (first / rows)[None, :] - centred * (rstd * second / rows)[None, :])
    if EXTRA:
        dx += tl.load(extra_ptr + lane + at, mask=mask, other=0.0).to(ACC)
    tl.store(dx_ptr + lane + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Drop(NamedTuple):
    """Dropout after a norm: the lanes' keys int64 `[K]`, the layer's salt, the probability."""

    keys: Tensor
    salt: int
    p: float


class Settings(NamedTuple):
    """A norm's settings, what follows it, and where its gradients go."""

    running: Statistics
    relu: bool = False
    drop: Drop | None = None
    slots: tuple[Tensor | None, ...] = (None, None, None)  # for the gradients of weight, bias and matrix


class Saved(NamedTuple):
    """What the backward pass of a norm needs. y is the output where ReLU follows a sum, else x."""

    x: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    rstd: Tensor


def dropout(drop: Drop | None, other: Tensor) -> tuple[Tensor, int, int, float]:
    """Returns keys, salt, threshold and scale for a kernel; without dropout any tensor serves as keys."""
    if drop is None:
        return other, 0, 0, 1.0
    return drop.keys, folding(drop.salt), dropout_threshold(drop.p), 1.0 / (1.0 - drop.p)


def stride_of(weight: Tensor) -> int:
    """Returns the distance from one lane's affine to the next; 0 where all lanes share a frozen one."""
    return weight.stride(0) if weight.dim() == 2 else 0


def grads_of(moment: Tensor, dtype: torch.dtype, slots: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Returns where gradients `[K, C]` are written: the slots, and new tensors for those without."""
    return tuple(torch.empty_like(moment, dtype=dtype) if s is None else s for s in slots)


def normed(
    x: Tensor, weight: Tensor, bias: Tensor, settings: Settings, add: Tensor | None = None, copy: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, mean and 1/σ. x is channels_last, and so is `copy`, into which x is copied."""
    running = settings.running
    cut = tiles(x, running.mean.shape[0], sums=running.mode != "running")
    acc, dtype = wide(x)
    mean = torch.empty(cut.lanes, cut.channels, dtype=dtype, device=x.device)
    rstd, y = torch.empty_like(mean), torch.empty_like(x)
    keys, salt, threshold, scale = dropout(settings.drop, x)
    if cut.parts > 1 and running.mode != "running":
        take_statistics(x, mean, rstd, running, cut)
    cut = cut.spread(64)
    launch(
        _forward, cut.grid,
        x, x if add is None else add, y, x if copy is None else copy,
        weight, bias, mean, rstd, running.mean, running.var, keys,
        cut.rows, cut.channels, cut.pixels, stride_of(weight), running.mean.stride(0), salt, threshold,
        SCALE=scale, RELU=settings.relu, ADD=add is not None, DROP=settings.drop is not None, POWER=cut.power,
        MOMENTUM=running.momentum, EPS=running.eps, KEEP=running.mode == "train" and cut.parts == 1,
        RUNNING=running.mode == "running", COPY=copy is not None, ACC=acc, WHOLE=cut.parts == 1, BR=cut.block[0],
        BC=cut.block[1], num_warps=cut.warps,
    )  # fmt: skip
    return y, mean, rstd


def affine_sums(
    g: Tensor, saved: Saved, settings: Settings, grads: tuple[Tensor, ...], cut: Tiles, add: bool = False
) -> Tensor:
    """Writes the gradients of weight and bias. Returns Σg and Σ g·x̂, the same before rounding, `[K, 2, C]`."""
    x, weight = saved.x, saved.weight
    acc, dtype = wide(x)
    part = torch.empty(cut.lanes, cut.parts, 2, cut.channels, dtype=dtype, device=x.device)
    sums = torch.empty(cut.lanes, 2, cut.channels, dtype=dtype, device=x.device)
    keys, salt, threshold, scale = dropout(settings.drop, x)
    launch(
        _backward_sums, (cut.lanes, cut.columns, cut.parts),
        x, g, saved.y, *saved[2:], keys, part, sums, *grads, tickets(x.device),
        cut.rows, cut.channels, cut.pixels, stride_of(weight), grads[0].stride(0), grads[1].stride(0), cut.parts,
        cut.chunk, cut.loops, salt, threshold, SCALE=scale, RELU=settings.relu, ADD=add, DROP=settings.drop is not None,
        POWER=cut.power, ACC=acc, EVEN=cut.even, UNROLL=UNROLL, MOST=MOST, BR=cut.block[0], BC=cut.block[1],
        num_warps=cut.warps,
    )  # fmt: skip
    return sums


def gradients(
    g: Tensor, saved: Saved, settings: Settings, add: bool = False, extra: Tensor | None = None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Returns dx, the residual's gradient, and the gradients of weight and bias, `[K, C]` each."""
    x, y, weight, bias, mean, rstd = saved
    cut = tiles(x, mean.shape[0])
    into = grads_of(mean, weight.dtype, settings.slots[:2])
    sums = mean if cut.parts == 1 else affine_sums(g, saved, settings, into, cut, add)
    dx, residual = torch.empty_like(x), torch.empty_like(x) if add else None
    keys, salt, threshold, scale = dropout(settings.drop, x)
    cut = cut.spread(32)
    launch(
        _backward, cut.grid,
        x, g, y, g if extra is None else extra, dx, dx if residual is None else residual,
        weight, bias, mean, rstd, sums, keys, *into,
        cut.rows, cut.channels, cut.pixels, stride_of(weight), into[0].stride(0), into[1].stride(0), salt, threshold,
        SCALE=scale, RELU=settings.relu, ADD=add, DROP=settings.drop is not None, POWER=cut.power,
        EXTRA=extra is not None, ACC=wide(x)[0], WHOLE=cut.parts == 1, BR=cut.block[0], BC=cut.block[1],
        num_warps=cut.warps,
    )  # fmt: skip
    return dx, residual, into


def unslotted(grads: tuple[Tensor, ...], slots: tuple[Tensor | None, ...], wanted: tuple[bool, ...]) -> list[Any]:
    """Returns the gradients for autograd: those that it needs and that were not written into a slot."""
    return [g if w and s is None else None for g, s, w in zip(grads, slots, wanted, strict=True)]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, settings: Settings
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        add = None if add is None else add.contiguous(memory_format=torch.channels_last)
        y, mean, rstd = normed(x, weight, bias, settings, add)
        ctx.save_for_backward(x, y if settings.relu and add is not None else x, weight, bias, mean, rstd)
        ctx.settings, ctx.add = settings, add is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        g = g.contiguous(memory_format=torch.channels_last)
        dx, residual, affine = gradients(g, Saved(*ctx.saved_tensors), ctx.settings, ctx.add)
        return dx, *unslotted(affine, ctx.settings.slots[:2], ctx.needs_input_grad[1:3]), residual, None


def fits(layer: LaneBatchNorm, shape: torch.Size) -> bool:
    """Returns whether the kernels take this norm: it has lanes and maps, and running statistics need no gradient."""
    s = layer.statistics
    return s.mean.dim() == 2 and len(shape) == 4 and not (s.mode == "running" and torch.is_grad_enabled())


def norm(ops: Ops, x: Tensor, layer: LaneBatchNorm, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """Computes `Ops.norm` in one kernel or two."""
    if not fits(layer, x.shape):
        return Ops.norm(ops, x, layer, add, relu)
    affine = layer.weight, layer.bias
    settings = Settings(layer.statistics, relu, slots=(*map(layer.context.slots.take, affine), None))
    y: Tensor = _Norm.apply(x, *affine, add, settings)  # type: ignore[no-untyped-call]
    return y
