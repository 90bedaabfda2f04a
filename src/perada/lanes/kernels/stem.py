"""The stem behind its frozen convolution: batch norm, ReLU and max pooling (3×3, stride 2) without the maps between.

Nothing trained stands before the norm, so the backward pass only needs the gradients of its affine.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import launch
from .norm import Statistics, slot_of, stride_of, unslotted
from .tiles import Tiles, lane_values, reduced, statistics, take_sums, tiles, wide

_BR = 64  # pooled pixels in a block


@triton.jit
def _pooled(
    x_ptr, y_ptr, at_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, part_ptr,
    old_ptr, rows, out_rows, channels, height, width, out_height, out_width, stride, running_stride,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, RUNNING: tl.constexpr, ACC: tl.constexpr,
    PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = max over a window of ReLU(norm(x)), and which of the nine it was."""
    k, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c = tile * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < out_rows)[:, None] & inside[None, :]
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, inside, stride, ACC)
    if RUNNING:
        mean, var = lane_values(running_mean_ptr, running_var_ptr, k, c, inside, running_stride, ACC)
        rstd = 1.0 / tl.sqrt(var + EPS)
    else:
        shift = tl.load(old_ptr + k * channels + c, mask=inside, other=0.0)
        first, second = reduced(part_ptr, k, c, inside, channels, PARTS)
        mean, rstd = statistics(
            first, second, shift, k, c, c < tl.where(tile == 0, channels, 0), rows, channels, running_stride,
            mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, MOMENTUM, EPS, KEEP, ACC, BC,
        )  # fmt: skip
    scale = (rstd * weight)[None, :]
    offset = bias[None, :] - mean[None, :] * scale
    image, row, column = r // (out_height * out_width), r // out_width % out_height, r % out_width
    best, which = tl.zeros([BR, BC], ACC) - 1.0, tl.zeros([BR, BC], tl.int32)
    for tap in tl.static_range(9):
        i, j = 2 * row - 1 + tap // 3, 2 * column - 1 + tap % 3
        there = ((i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & mask
        at = ((image * height + i) * width + j)[:, None] * channels + c[None, :]
        value = tl.maximum(
            tl.load(x_ptr + k * rows * channels + at, mask=there, other=0.0).to(ACC) * scale + offset, 0.0
        )
        better = there & (value > best)
        best, which = tl.where(better, value, best), tl.where(better, tap, which)
    lane, at = k * out_rows * channels, r[:, None] * channels + c[None, :]
    tl.store(y_ptr + lane + at, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(at_ptr + lane + at, which.to(tl.uint8), mask=mask)


@triton.jit
def _pooled_sums(
    x_ptr, g_ptr, y_ptr, at_ptr, mean_ptr, rstd_ptr, part_ptr, rows, out_rows, channels, height, width, out_height,
    out_width, chunk, ACC: tl.constexpr, LOOPS: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σg and Σ g·x̂, where g is what came through pooling and ReLU."""
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, inside, channels, ACC)
    first, second = tl.zeros([BC], ACC), tl.zeros([BC], ACC)
    for step in range(LOOPS):
        r = part * chunk + step * BR + tl.arange(0, BR)
        mask = ((r < out_rows) & (r < part * chunk + chunk))[:, None] & inside[None, :]
        lane, at = k * out_rows * channels, r[:, None] * channels + c[None, :]
        passed = mask & (tl.load(y_ptr + lane + at, mask=mask, other=0.0) > 0)
        g = tl.load(g_ptr + lane + at, mask=passed, other=0.0).to(ACC)
        tap = tl.load(at_ptr + lane + at, mask=mask, other=0).to(tl.int32)
        image, row, column = r // (out_height * out_width), r // out_width % out_height, r % out_width
        i, j = 2 * row[:, None] - 1 + tap // 3, 2 * column[:, None] - 1 + tap % 3
        source = ((image[:, None] * height + i) * width + j) * channels + c[None, :]
        x = (tl.load(x_ptr + k * rows * channels + source, mask=passed, other=0.0).to(ACC) - mean[None, :]) * rstd[
            None, :
        ]
        first += tl.sum(g, 0)
        second += tl.sum(tl.where(passed, g * x, 0.0), 0)
    at = part_ptr + (k * PARTS + part) * 2 * channels + c
    tl.store(at, first, mask=inside)
    tl.store(at + channels, second, mask=inside)


def _cut(x: Tensor, running: Statistics) -> Tiles:
    """As for any norm, in at least two parts where sums are taken."""
    cut = tiles(x, running.mean.shape[0], sums=running.how != "running")
    return cut if cut.parts > 1 else cut._replace(parts=2)


class _NormAndPool(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Statistics, slots: tuple[Tensor | None, ...]
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        cut = _cut(x, running)
        n, channels, height, width = x.shape
        out = (height + 1) // 2, (width + 1) // 2
        y = torch.empty(n, channels, *out, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        at = torch.empty_like(y, dtype=torch.uint8)
        acc, dtype = wide(x)
        mean = torch.empty(cut.lanes, channels, dtype=dtype, device=x.device)
        rstd = torch.empty_like(mean)
        part, old = (mean, mean) if running.how == "running" else take_sums(x, running.mean, cut)
        out_rows = n // cut.lanes * out[0] * out[1]
        launch(
            _pooled, (cut.lanes, triton.cdiv(out_rows, _BR), cut.columns),
            x, y, at, weight, bias, mean, rstd, running.mean, running.var, part, old, cut.rows, out_rows, channels,
            height, width, *out, stride_of(weight), running.mean.stride(0), MOMENTUM=running.momentum,
            EPS=running.eps, KEEP=running.how == "train", RUNNING=running.how == "running", ACC=acc,
            PARTS=cut.parts, BR=_BR, BC=cut.block[1], num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x, y, at, mean, rstd)
        ctx.slots, ctx.dtype = slots, weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, y, at, mean, rstd = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        lanes, channels = mean.shape
        acc, dtype = wide(x)
        out_rows = y.shape[0] // lanes * y.shape[2] * y.shape[3]
        across = min(64, triton.next_power_of_2(channels))
        parts = min(triton.next_power_of_2(triton.cdiv(out_rows, _BR)), max(16, 1024 // lanes))
        chunk = triton.cdiv(out_rows, parts)
        part = torch.empty(lanes, parts, 2, channels, dtype=dtype, device=x.device)
        launch(
            _pooled_sums, (lanes, triton.cdiv(channels, across), parts),
            x, g, y, at, mean, rstd, part, x.numel() // channels // lanes, out_rows, channels, *x.shape[2:],
            *y.shape[2:], chunk, ACC=acc, LOOPS=triton.cdiv(chunk, _BR), PARTS=parts, BR=_BR, BC=across, num_warps=8,
        )  # fmt: skip
        dbias, dweight = part.sum(1).to(ctx.dtype).unbind(1)
        for slot, grad in zip(ctx.slots, (dweight, dbias), strict=True):
            if slot is not None:
                slot.copy_(grad)
        return None, *unslotted((dweight, dbias), ctx.slots, ctx.needs_input_grad[1:3]), None, None


def norm_and_pool(x: Tensor, affine: tuple[Tensor, Tensor], running: Statistics) -> Tensor:
    """MaxPool(ReLU(norm(x))) with windows of 3×3, stride 2 and padding 1, of x that needs no gradient."""
    made: Tensor = _NormAndPool.apply(x, *affine, running, tuple(map(slot_of, affine)))  # type: ignore[no-untyped-call]
    return made
