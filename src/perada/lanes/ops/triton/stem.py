"""The stem after its frozen convolution: batch norm, ReLU and max pooling (3×3, stride 2), without the maps in between.

Nothing before the norm is trained, so the backward pass needs only the gradients of its affine. Images that are not
augmented come as a `Stem`, already pooled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...front import Stem
from ..plain import Ops, Statistics
from .launch import launch
from .norm import Saved, Settings, affine_sums, fits, grads_of, stride_of, unslotted
from .tiles import lane_values, take_statistics, tiles, wide

if TYPE_CHECKING:
    from ...layers import LaneBatchNorm

_BR = 64  # pooled pixels in a block


@triton.jit
def _pooled(
    x_ptr, y_ptr, chosen_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, rows,
    out_rows, channels, height, width, out_height, out_width, stride, running_stride,
    EPS: tl.constexpr, RUNNING: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes y = max of ReLU(norm(x)) over a window, and the x that gives it."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < out_rows)[:, None] & inside[None, :]
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    if RUNNING:
        mean, var = lane_values(running_mean_ptr, running_var_ptr, k, c, inside, running_stride, ACC)
        rstd = 1.0 / tl.sqrt(var + EPS)
    else:
        mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, inside, channels, ACC)
    scale = (rstd * weight)[None, :]
    offset = bias[None, :] - mean[None, :] * scale
    image, row, column = r // (out_height * out_width), r // out_width % out_height, r % out_width
    best, chosen = tl.zeros([BR, BC], ACC) - 1.0, tl.zeros([BR, BC], ACC)
    for tap in tl.static_range(9):
        i, j = 2 * row - 1 + tap // 3, 2 * column - 1 + tap % 3
        there = ((i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & mask
        at = ((image * height + i) * width + j)[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + k * rows * channels + at, mask=there, other=0.0).to(ACC)
        value = tl.maximum(x * scale + offset, 0.0)
        better = there & (value > best)
        best, chosen = tl.where(better, value, best), tl.where(better, x, chosen)
    lane, at = k * out_rows * channels, r[:, None] * channels + c[None, :]
    tl.store(y_ptr + lane + at, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(chosen_ptr + lane + at, chosen.to(y_ptr.dtype.element_ty), mask=mask)


class _NormAndPool(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Statistics, slots: tuple[Tensor | None, ...]
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        cut = tiles(x, running.mean.shape[0], sums=False)
        n, channels, height, width = x.shape
        out = (height + 1) // 2, (width + 1) // 2
        y = torch.empty(n, channels, *out, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        chosen = torch.empty_like(y)
        acc, dtype = wide(x)
        mean = torch.empty(cut.lanes, channels, dtype=dtype, device=x.device)
        rstd = torch.empty_like(mean)
        if running.mode != "running":
            take_statistics(x, mean, rstd, running, cut)
        out_rows, across = n // cut.lanes * out[0] * out[1], min(32, triton.next_power_of_2(channels))
        launch(
            _pooled, (cut.lanes, triton.cdiv(out_rows, _BR), triton.cdiv(channels, across)),
            x, y, chosen, weight, bias, mean, rstd, running.mean, running.var, cut.rows, out_rows, channels,
            height, width, *out, stride_of(weight), running.mean.stride(0), EPS=running.eps,
            RUNNING=running.mode == "running", ACC=acc, BR=_BR, BC=across, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(chosen, weight, bias, mean, rstd)
        ctx.slots, ctx.running = slots, running
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *_affine_gradients(ctx, g, ctx.needs_input_grad[1:3]), None, None


def _affine_gradients(ctx: Any, g: Tensor, wanted: tuple[bool, ...]) -> list[Any]:
    """Returns the gradients of weight and bias; the context has the values that passed the pooling."""
    x, weight, bias, mean, rstd = ctx.saved_tensors
    g = g.contiguous(memory_format=torch.channels_last)
    into, cut = grads_of(mean, weight.dtype, ctx.slots), tiles(x, mean.shape[0], sums=False)
    affine_sums(g, Saved(x, x, weight, bias, mean, rstd), Settings(ctx.running, relu=True), into, cut)
    return unslotted(into, ctx.slots, wanted)


def norm_and_pool(ops: Ops, x: Tensor, layer: LaneBatchNorm, pool: nn.Module) -> Tensor:
    """Computes `Ops.norm_and_pool` for windows of 3×3, stride 2 and padding 1, of x that needs no gradient."""
    usual = isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    if not usual or x.requires_grad or not fits(layer, x.shape):
        return Ops.norm_and_pool(ops, x, layer, pool)
    affine = layer.weight, layer.bias
    y: Tensor = _NormAndPool.apply(x, *affine, layer.statistics, tuple(map(layer.context.slots.take, affine)))  # type: ignore[no-untyped-call]
    return y


@triton.jit
def _stem(
    ends_ptr, moments_ptr, number_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr,
    running_var_ptr, rows, channels, pixels, stride, running_stride, MOMENTUM: tl.constexpr, EPS: tl.constexpr,
    KEEP: tl.constexpr, RUNNING: tl.constexpr, SIDES: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes `Stem.normed`. SAVE: stores the maxima or minima that were taken, for the backward pass."""
    k, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = tile * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < rows)[:, None] & inside[None, :]
    number = tl.load(number_ptr + k)
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    if RUNNING:
        mean, var = lane_values(running_mean_ptr, running_var_ptr, k, c, inside, running_stride, ACC)
    else:
        mean, var = lane_values(moments_ptr, moments_ptr + channels, number, c, inside, 2 * channels, ACC)
    rstd = 1.0 / tl.sqrt(var + EPS)
    scale = rstd * weight
    ends_ptr += number * SIDES * rows * channels
    at = r[:, None] * channels + c[None, :]
    x = tl.load(ends_ptr + at, mask=mask, other=0.0)
    if SIDES == 2:  # both are read, as an address per channel would cost more
        x = tl.where((scale >= 0)[None, :], x, tl.load(ends_ptr + rows * channels + at, mask=mask, other=0.0))
    y = tl.maximum((x.to(ACC) - mean[None, :]) * scale[None, :] + bias[None, :], 0.0)
    tl.store(y_ptr + k * rows * channels + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if SAVE:
        tl.store(x_ptr + k * rows * channels + at, x, mask=mask)
        one = c < tl.where(tile == 0, channels, 0)  # one program per lane and channel
        tl.store(mean_ptr + k * channels + c, mean, mask=one)
        tl.store(rstd_ptr + k * channels + c, rstd, mask=one)
        if KEEP:
            middle, spread = lane_values(running_mean_ptr, running_var_ptr, k, c, one, running_stride, ACC)
            count = tl.zeros([BC], ACC) + pixels
            at = k * running_stride + c
            tl.store(running_mean_ptr + at, middle + MOMENTUM * (mean - middle), mask=one)
            tl.store(running_var_ptr + at, spread + MOMENTUM * (var * (count / (count - 1)) - spread), mask=one)


class _StemNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor, bias: Tensor, stem: Stem, running: Statistics, slots: tuple[Tensor | None, ...]
    ) -> Tensor:
        ends, save = stem.ends, running.mode != "running"
        y = torch.empty(stem.shape, dtype=ends.dtype, device=ends.device, memory_format=torch.channels_last)
        cut = tiles(y, running.mean.shape[0], sums=False)
        acc, dtype = wide(y)
        x = torch.empty_like(y) if save else y
        mean = torch.empty(cut.lanes, cut.channels, dtype=dtype, device=y.device)
        rstd, block = torch.empty_like(mean), cut.spread(64)
        launch(
            _stem, block.grid,
            ends, stem.moments, stem.number, x, y, weight, bias, mean, rstd, running.mean, running.var,
            cut.rows, cut.channels, stem.pixels, stride_of(weight), running.mean.stride(0), MOMENTUM=running.momentum,
            EPS=running.eps, KEEP=running.mode == "train", RUNNING=not save, SIDES=ends.shape[1], SAVE=save, ACC=acc,
            BR=block.block[0], BC=block.block[1], num_warps=block.warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.slots, ctx.running = slots, running
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_affine_gradients(ctx, g, ctx.needs_input_grad[:2]), None, None, None


def stem_norm(ops: Ops, stem: Stem, layer: LaneBatchNorm) -> Tensor:
    """Computes `Ops.stem_norm` in one kernel."""
    if not fits(layer, stem.shape):
        return Ops.stem_norm(ops, stem, layer)
    affine = layer.weight, layer.bias
    y: Tensor = _StemNorm.apply(*affine, stem, layer.statistics, tuple(map(layer.context.slots.take, affine)))  # type: ignore[no-untyped-call]
    return y
