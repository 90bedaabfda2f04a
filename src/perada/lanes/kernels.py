"""Batch norm over lanes, with what stands around it, as a few GPU kernels.

A layer of a small network is over in microseconds, so on a GPU it is the number of kernels that costs: here
statistics, normalisation, dropout, residual sum and ReLU of all lanes are three kernels forward and three backward.
`layers.py` has the same in plain torch, which is what runs everywhere else and what the tests compare with.

Activations are `[K·B, C, H, W]` in channels_last, so lane k's values are the rows k·R .. (k+1)·R of `[K·R, C]`, where
R = B·H·W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .random import dropout_threshold, folding


@triton.jit
def _partial_sums(
    x_ptr, g_ptr, y_ptr, mean_ptr, rstd_ptr, key_ptr, out_ptr,
    rows, channels, pixels, chunk, salt, threshold, mean_stride,
    SCALE: tl.constexpr, BACKWARD: tl.constexpr, RELU: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    LOOPS: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Forward: Σ(x − shift) and Σ(x − shift)², the shift being the running mean (it keeps the squares small).
    Backward: Σg and Σ g·x̂, g behind ReLU and dropout. `out` is `[K, PARTS, 2, C]`."""
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    mean = tl.load(mean_ptr + k * mean_stride + c, mask=inside, other=0.0).to(ACC)
    rstd = tl.load(rstd_ptr + k * channels + c, mask=inside, other=0.0).to(ACC) if BACKWARD else mean
    first, second = tl.zeros([BC], ACC), tl.zeros([BC], ACC)
    for i in range(LOOPS):
        r = part * chunk + i * BR + tl.arange(0, BR)
        mask = ((r < rows) & (r < part * chunk + chunk))[:, None] & inside[None, :]
        at = (k * rows + r[:, None]) * channels + c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC) - mean[None, :]
        if BACKWARD:
            g = _gradient(
                g_ptr, y_ptr, key_ptr, at, mask, k, r, c, channels, pixels, salt, threshold, SCALE, RELU, DROP, ACC
            )
            first += tl.sum(tl.where(mask, g, 0.0), 0)
            second += tl.sum(tl.where(mask, g * x * rstd[None, :], 0.0), 0)
        else:
            x = tl.where(mask, x, 0.0)
            first += tl.sum(x, 0)
            second += tl.sum(x * x, 0)
    at = out_ptr + (k * PARTS + part) * 2 * channels + c
    tl.store(at, first, mask=inside)
    tl.store(at + channels, second, mask=inside)


@triton.jit
def _gradient(
    g_ptr, y_ptr, key_ptr, at, mask, k, r, c, channels, pixels, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient that reaches the norm, behind ReLU (where the output is positive) and dropout."""
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(ACC)
    if RELU:
        g = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0) > 0, g, 0.0)
    if DROP:
        g = tl.where(_kept(key_ptr, k, r, c, channels, pixels, salt, threshold), g * SCALE, 0.0)
    return g


@triton.jit
def _kept(key_ptr, k, r, c, channels, pixels, salt, threshold):
    """`random.keep_mask` of the element's place in its lane, counted in the order [B, C, H, W]."""
    key = tl.load(key_ptr + k) + salt
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -49064778989728563
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    key = key ^ ((key >> 33) & 0x7FFFFFFF)
    low = key.to(tl.int32).to(tl.uint32, bitcast=True)
    high = (key >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
    place = ((r // pixels)[:, None] * channels + c[None, :]) * pixels + (r % pixels)[:, None]
    x = place.to(tl.uint32) * 0x9E3779B1
    x = ((x ^ (x >> 16)) + low) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + high) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return x.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _finish(
    part_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, rows, channels, stride,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    PARTS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums -> mean and 1/σ of the batch `[K, C]`; brings the running statistics up to date."""
    k = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    parts = (k * PARTS + tl.arange(0, PARTS))[:, None] * 2 * channels + c[None, :]
    first = tl.sum(tl.load(part_ptr + parts, mask=inside[None, :], other=0.0), 0)
    second = tl.sum(tl.load(part_ptr + parts + channels, mask=inside[None, :], other=0.0), 0)
    old = tl.load(running_mean_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    count = tl.zeros([BC], ACC) + rows
    shift = first / count
    var = tl.maximum(second / count - shift * shift, 0.0)
    tl.store(mean_ptr + k * channels + c, old + shift, mask=inside)
    tl.store(rstd_ptr + k * channels + c, 1.0 / tl.sqrt(var + EPS), mask=inside)
    if KEEP:
        spread = tl.load(running_var_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
        spread += MOMENTUM * (var * (count / (count - 1)) - spread)
        tl.store(running_mean_ptr + k * stride + c, old + MOMENTUM * shift, mask=inside)
        tl.store(running_var_ptr + k * stride + c, spread, mask=inside)


@triton.jit
def _apply(
    x_ptr, add_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, key_ptr,
    rows, channels, pixels, stride, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = norm(x), then dropout, or plus a residual, or ReLU."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < rows)[:, None] & inside[None, :]
    mean = tl.load(mean_ptr + k * channels + c, mask=inside, other=0.0).to(ACC)
    rstd = tl.load(rstd_ptr + k * channels + c, mask=inside, other=0.0).to(ACC)
    weight = tl.load(weight_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    bias = tl.load(bias_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    at = (k * rows + r[:, None]) * channels + c[None, :]
    y = (tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC) - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :]
    if DROP:
        y = tl.where(_kept(key_ptr, k, r, c, channels, pixels, salt, threshold), y * SCALE, 0.0)
    if ADD:
        y += tl.load(add_ptr + at, mask=mask, other=0.0).to(ACC)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _apply_backward(
    x_ptr, g_ptr, y_ptr, extra_ptr, dx_ptr, add_grad_ptr, weight_ptr, mean_ptr, rstd_ptr, part_ptr, key_ptr,
    dweight_ptr, dbias_ptr, rows, channels, pixels, stride, salt, threshold,
    SCALE: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, EXTRA: tl.constexpr,
    ACC: tl.constexpr,
    PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = w/σ (g − mean(g) − x̂ mean(g·x̂)) (+ extra); the residual's gradient; those of the affine `[K, C]`."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(2) * BC + tl.arange(0, BC)
    inside = c < channels
    mask = (r < rows)[:, None] & inside[None, :]
    parts = (k * PARTS + tl.arange(0, PARTS))[:, None] * 2 * channels + c[None, :]
    first = tl.sum(tl.load(part_ptr + parts, mask=inside[None, :], other=0.0), 0)
    second = tl.sum(tl.load(part_ptr + parts + channels, mask=inside[None, :], other=0.0), 0)
    if tl.program_id(1) == 0:
        tl.store(dbias_ptr + k * channels + c, first.to(dbias_ptr.dtype.element_ty), mask=inside)
        tl.store(dweight_ptr + k * channels + c, second.to(dweight_ptr.dtype.element_ty), mask=inside)
    mean = tl.load(mean_ptr + k * channels + c, mask=inside, other=0.0).to(ACC)
    rstd = tl.load(rstd_ptr + k * channels + c, mask=inside, other=0.0).to(ACC)
    weight = tl.load(weight_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    at = (k * rows + r[:, None]) * channels + c[None, :]
    if ADD:  # before dropout, which never stands with a residual
        g = _gradient(
            g_ptr, y_ptr, key_ptr, at, mask, k, r, c, channels, pixels, salt, threshold, SCALE, RELU, False, ACC
        )
        tl.store(add_grad_ptr + at, g.to(add_grad_ptr.dtype.element_ty), mask=mask)
    else:
        g = _gradient(
            g_ptr, y_ptr, key_ptr, at, mask, k, r, c, channels, pixels, salt, threshold, SCALE, RELU, DROP, ACC
        )
    centred = (tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC) - mean[None, :]) * rstd[None, :]
    dx = (weight * rstd)[None, :] * (g - (first / rows)[None, :] - centred * (second / rows)[None, :])
    if EXTRA:
        dx += tl.load(extra_ptr + at, mask=mask, other=0.0).to(ACC)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Drop(NamedTuple):
    """Dropout behind a norm: the lanes' keys int64 `[K]`, the layer's salt, the probability."""

    keys: Tensor
    salt: int
    p: float


class _Shape(NamedTuple):
    """How the work of one norm is cut into blocks."""

    lanes: int
    rows: int
    channels: int
    pixels: int
    parts: int
    block: tuple[int, int]  # rows, channels

    @property
    def columns(self) -> int:
        return int(triton.cdiv(self.channels, self.block[1]))

    @property
    def tiles(self) -> tuple[int, int, int]:
        return self.lanes, int(triton.cdiv(self.rows, self.block[0])), self.columns

    @property
    def chunk(self) -> int:
        return int(triton.cdiv(self.rows, self.parts))


def _shape(x: Tensor, lanes: int) -> _Shape:
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = x.shape[0] * pixels // lanes
    across = min(64, triton.next_power_of_2(channels))
    down = max(1, min(8192 // across, triton.next_power_of_2(rows)))  # measured on an H200: larger tiles, fewer parts
    wanted = max(1, 2048 // (lanes * triton.cdiv(channels, across)))  # enough programs to fill a GPU
    parts = min(64, triton.next_power_of_2(wanted), triton.next_power_of_2(triton.cdiv(rows, down)))
    return _Shape(lanes, rows, channels, pixels, parts, (down, across))


def _wide(tensor: Tensor) -> tuple[Any, torch.dtype]:
    """The type that sums are taken in: float32, or float64 where the activations are."""
    return (tl.float64, torch.float64) if tensor.dtype == torch.float64 else (tl.float32, torch.float32)


def _dropout(drop: Drop | None, other: Tensor) -> tuple[Tensor, int, int, float]:
    if drop is None:
        return other, 0, 0, 1.0
    return drop.keys, folding(drop.salt), dropout_threshold(drop.p), 1.0 / (1.0 - drop.p)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor], how: _How, add: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and 1/σ. x is channels_last."""
    shape = _shape(x, running[0].shape[0])
    acc, dtype = _wide(x)
    part = torch.empty(shape.lanes, shape.parts, 2, shape.channels, dtype=dtype, device=x.device)
    mean = torch.empty(shape.lanes, shape.channels, dtype=dtype, device=x.device)
    rstd, y = torch.empty_like(mean), torch.empty_like(x)
    keys, salt, threshold, scale = _dropout(how.drop, x)
    down, across = shape.block
    _partial_sums[(shape.lanes, shape.columns, shape.parts)](
        x, x, x, running[0], mean, keys, part,
        shape.rows, shape.channels, shape.pixels, shape.chunk, salt, threshold, running[0].stride(0),
        SCALE=scale, BACKWARD=False, RELU=False, DROP=False, ACC=acc,
        LOOPS=triton.cdiv(shape.chunk, down), PARTS=shape.parts, BR=down, BC=across,
    )  # fmt: skip
    _finish[(shape.lanes, shape.columns)](
        part, mean, rstd, *running, shape.rows, shape.channels, running[0].stride(0),
        MOMENTUM=how.momentum, EPS=how.eps, KEEP=how.keep, ACC=acc, PARTS=shape.parts, BC=across,
    )  # fmt: skip
    _apply[shape.tiles](
        x, x if add is None else add, y, weight, bias, mean, rstd, keys,
        shape.rows, shape.channels, shape.pixels, _stride(weight), salt, threshold,
        SCALE=scale, RELU=how.relu, ADD=add is not None, DROP=how.drop is not None, ACC=acc, BR=down, BC=across,
    )  # fmt: skip
    return y, mean, rstd


def _backward(
    g: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    how: _How,
    add: bool,
    extra: Tensor | None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """dx, the residual's gradient and the gradients of weight and bias, `[K, C]` each."""
    shape = _shape(x, mean.shape[0])
    acc, dtype = _wide(x)
    part = torch.empty(shape.lanes, shape.parts, 2, shape.channels, dtype=dtype, device=x.device)
    affine = torch.empty(2, shape.lanes, shape.channels, dtype=weight.dtype, device=x.device)
    dx, residual = torch.empty_like(x), torch.empty_like(x) if add else None
    keys, salt, threshold, scale = _dropout(how.drop, x)
    down, across = shape.block
    drops = how.drop is not None
    _partial_sums[(shape.lanes, shape.columns, shape.parts)](
        x, g, y, mean, rstd, keys, part,
        shape.rows, shape.channels, shape.pixels, shape.chunk, salt, threshold, mean.stride(0),
        SCALE=scale, BACKWARD=True, RELU=how.relu, DROP=drops, ACC=acc,
        LOOPS=triton.cdiv(shape.chunk, down), PARTS=shape.parts, BR=down, BC=across,
    )  # fmt: skip
    _apply_backward[shape.tiles](
        x, g, y, g if extra is None else extra, dx, dx if residual is None else residual,
        weight, mean, rstd, part, keys,
        affine[0], affine[1], shape.rows, shape.channels, shape.pixels, _stride(weight), salt, threshold,
        SCALE=scale, RELU=how.relu, ADD=add, DROP=drops, EXTRA=extra is not None, ACC=acc,
        PARTS=shape.parts, BR=down, BC=across,
    )  # fmt: skip
    return dx, residual, (affine[0], affine[1])


def _stride(weight: Tensor) -> int:
    """From a lane's affine to the next lane's; 0 where all share a frozen one."""
    return weight.stride(0) if weight.dim() == 2 else 0


class _How(NamedTuple):
    momentum: float
    eps: float
    keep: bool
    relu: bool
    drop: Drop | None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, add: Tensor | None, how: _How
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        add = None if add is None else add.contiguous(memory_format=torch.channels_last)
        y, batch_mean, rstd = _forward(x, weight, bias, (mean, var), how, add)
        ctx.save_for_backward(x, y if how.relu else x, weight, batch_mean, rstd)
        ctx.how, ctx.add = how, add is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, y, weight, mean, rstd = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        dx, residual, affine = _backward(g, x, y, weight, mean, rstd, ctx.how, ctx.add, None)
        return dx, *(affine if ctx.needs_input_grad[1] else (None, None)), None, None, residual, None


class _Adapter(torch.autograd.Function):
    """`x + z Wᵀ` with `z = dropout(norm(x))`: a product that adds to x as it goes, and one gradient for x."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, matrix: Tensor, how: _How
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        z, batch_mean, rstd = _forward(x, weight, bias, (mean, var), how, None)
        y = torch.baddbmm(_rows(x, matrix), _rows(z, matrix), matrix.transpose(1, 2))
        ctx.save_for_backward(x, z, weight, batch_mean, rstd, matrix)
        ctx.how = how
        return _image(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, z, weight, mean, rstd, matrix = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        rows = _rows(g, matrix)
        dz = _image(torch.bmm(rows, matrix), x)
        dmatrix = torch.bmm(rows.transpose(1, 2), _rows(z, matrix))
        dx, _, affine = _backward(dz, x, x, weight, mean, rstd, ctx.how, False, g)
        return dx, *(affine if ctx.needs_input_grad[1] else (None, None)), None, None, dmatrix, None


def _rows(x: Tensor, matrix: Tensor) -> Tensor:
    """channels_last `[K·B, C, H, W]` -> `[K, R, C]`, a view."""
    return x.permute(0, 2, 3, 1).reshape(matrix.shape[0], -1, x.shape[1])


def _image(rows: Tensor, like: Tensor) -> Tensor:
    n, _, height, width = like.shape
    return rows.view(n, height, width, -1).permute(0, 3, 1, 2)


@triton.jit
def _sgd(
    p_ptr, g_ptr, centre_ptr, rate_ptr, pull_ptr, out_ptr, size, centre_stride, rate_stride, pull_stride,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p − rate (g + pull (p − centre)), lane by lane."""
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    p = tl.load(p_ptr + k * size + i, mask=mask, other=0.0)
    g = tl.load(g_ptr + k * size + i, mask=mask, other=0.0).to(p_ptr.dtype.element_ty)
    if PULL:
        g += tl.load(pull_ptr + k * pull_stride) * (
            p - tl.load(centre_ptr + k * centre_stride + i, mask=mask, other=0.0)
        )
    tl.store(out_ptr + k * size + i, p - tl.load(rate_ptr + k * rate_stride) * g, mask=mask)


def sgd_step(p: Tensor, g: Tensor, rates: Tensor, centre: Tensor | None, pull: Tensor | None) -> Tensor:
    """p and g `[K, n]`, centre `[K, n]` or `[1, n]`, rates and pull `[K, 1]`."""
    out, block = torch.empty_like(p), 1024
    towards, strength = (p, rates) if centre is None or pull is None else (centre, pull)
    strides = 0 if towards.shape[0] == 1 else towards.stride(0), rates.stride(0), strength.stride(0)
    grid = (p.shape[0], triton.cdiv(p.shape[1], block))
    _sgd[grid](p, g, towards, rates, strength, out, p.shape[1], *strides, PULL=centre is not None, BLOCK=block)
    return out


def lane_norm(
    x: Tensor,
    affine: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor],
    momentum: float,
    eps: float,
    *,
    keep: bool,
    add: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """ReLU(norm(x) + add) with each lane's batch statistics; `keep` brings the running ones `[K, C]` up to date."""
    made: Tensor = _Norm.apply(x, *affine, *running, add, _How(momentum, eps, keep, relu, None))  # type: ignore[no-untyped-call]
    return made


def lane_adapter(
    x: Tensor,
    affine: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor],
    matrix: Tensor,
    momentum: float,
    eps: float,
    *,
    keep: bool,
    drop: Drop | None,
) -> Tensor:
    """`x + dropout(norm(x)) Wᵀ`, matrix `[K, C, C]`."""
    how = _How(momentum, eps, keep, False, drop)
    made: Tensor = _Adapter.apply(x, *affine, *running, matrix, how)  # type: ignore[no-untyped-call]
    return made
