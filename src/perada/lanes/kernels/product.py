"""The adapter's two products with what stands before and behind them, for maps of many rows, on matrix units.

Forward: `x + dropout(norm(x)) Wᵀ`, and the sums that the next norm asks for first. Backward: the gradient behind the
product, and the sums that the adapter's norm asks for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .tiles import Tiles, kept, mixed, reduced, statistics, take_sums, wide

_BR, _BK = 128, 64  # rows and channels of a block


def fits(x: Tensor, cut: Tiles) -> bool:
    """Whether these kernels can take it: many rows, whole blocks of channels, and matrix units for the type."""
    units = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)
    return cut.parts > 1 and cut.channels % _BK == 0 and (units or not x.is_cuda)


@triton.jit
def _finish(
    part_ptr, old_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, rows, channels, stride,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    first, second = reduced(part_ptr, k, c, inside, channels, PARTS)
    shift = tl.load(old_ptr + k * channels + c, mask=inside, other=0.0)
    statistics(
        first, second, shift, True, k, c, inside, rows, channels, stride, mean_ptr, rstd_ptr, running_mean_ptr,
        running_var_ptr, MOMENTUM, EPS, KEEP, ACC, BC,
    )  # fmt: skip


@triton.jit
def _forward(
    x_ptr, y_ptr, z_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, matrix_ptr, key_ptr, part_ptr,
    rows, channels, pixels, stride, matrix_stride, chunk, salt, threshold,
    SCALE: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, LOOPS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    k, column, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n = column * BK + tl.arange(0, BK)
    shift = tl.load(mean_ptr + k * channels + n)
    key = mixed(tl.load(key_ptr + k) + salt) if DROP else salt
    first, second = tl.zeros([BK], ACC), tl.zeros([BK], ACC)
    for i in range(LOOPS):
        r = part * chunk + i * BR + tl.arange(0, BR)
        there = ((r < rows) & (r < part * chunk + chunk))[:, None]
        row = (k * rows + r[:, None]) * channels
        added = tl.zeros([BR, BK], ACC)
        for block in range(BLOCKS):
            c = block * BK + tl.arange(0, BK)
            scale = tl.load(rstd_ptr + k * channels + c) * tl.load(weight_ptr + k * stride + c).to(ACC)
            offset = tl.load(bias_ptr + k * stride + c).to(ACC) - tl.load(mean_ptr + k * channels + c) * scale
            z = tl.load(x_ptr + row + c[None, :], mask=there, other=0.0).to(ACC) * scale[None, :] + offset[None, :]
            if DROP:
                z = tl.where(kept(key, r, c, channels, pixels, threshold), z * SCALE, 0.0)
            z = z.to(z_ptr.dtype.element_ty)
            tl.store(z_ptr + row + c[None, :], z, mask=there & (column == 0))
            w = tl.load(matrix_ptr + k * matrix_stride + n[None, :] * channels + c[:, None])
            added = tl.dot(z, w, added, input_precision=PRECISION, out_dtype=ACC)
        y = tl.load(x_ptr + row + n[None, :], mask=there, other=0.0).to(ACC) + added
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row + n[None, :], y, mask=there)
        moved = tl.where(there, y.to(ACC) - shift[None, :], 0.0)
        first += tl.sum(moved, 0)
        second += tl.sum(moved * moved, 0)
    at = part_ptr + (k * PARTS + part) * 2 * channels + n
    tl.store(at, first)
    tl.store(at + channels, second)


@triton.jit
def _backward(
    g_ptr, x_ptr, dz_ptr, mean_ptr, rstd_ptr, matrix_ptr, key_ptr, part_ptr,
    rows, channels, pixels, matrix_stride, chunk, salt, threshold,
    SCALE: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, LOOPS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    n = tl.program_id(1) * BK + tl.arange(0, BK)
    mean, rstd = tl.load(mean_ptr + k * channels + n), tl.load(rstd_ptr + k * channels + n)
    key = mixed(tl.load(key_ptr + k) + salt) if DROP else salt
    first, second = tl.zeros([BK], ACC), tl.zeros([BK], ACC)
    for i in range(LOOPS):
        r = part * chunk + i * BR + tl.arange(0, BR)
        there = ((r < rows) & (r < part * chunk + chunk))[:, None]
        row = (k * rows + r[:, None]) * channels
        dz = tl.zeros([BR, BK], ACC)
        for block in range(BLOCKS):
            o = block * BK + tl.arange(0, BK)
            g = tl.load(g_ptr + row + o[None, :], mask=there, other=0.0)
            w = tl.load(matrix_ptr + k * matrix_stride + o[:, None] * channels + n[None, :])
            dz = tl.dot(g, w, dz, input_precision=PRECISION, out_dtype=ACC)
        dz = dz.to(dz_ptr.dtype.element_ty)
        tl.store(dz_ptr + row + n[None, :], dz, mask=there)
        dz = dz.to(ACC)
        if DROP:
            dz = tl.where(kept(key, r, n, channels, pixels, threshold), dz * SCALE, 0.0)
        x = (tl.load(x_ptr + row + n[None, :], mask=there, other=0.0).to(ACC) - mean[None, :]) * rstd[None, :]
        first += tl.sum(tl.where(there, dz, 0.0), 0)
        second += tl.sum(tl.where(there, dz * x, 0.0), 0)
    at = part_ptr + (k * PARTS + part) * 2 * channels + n
    tl.store(at, first)
    tl.store(at + channels, second)


def _cut(cut: Tiles) -> dict[str, int]:
    """The blocks of both kernels."""
    parts = max(2, min(128, int(triton.next_power_of_2(triton.cdiv(cut.rows, _BR)))))
    loops = triton.cdiv(triton.cdiv(cut.rows, parts), _BR)
    return {"LOOPS": loops, "PARTS": parts, "BLOCKS": cut.channels // _BK, "BR": _BR, "BK": _BK}


def adapter_forward(
    x: Tensor,
    affine: tuple[Tensor, Tensor],
    stride: int,
    running: tuple[Tensor, Tensor, bool, float, float],
    matrix: Tensor,
    drop: tuple[Tensor, int, int, float],
    cut: Tiles,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, z, mean, 1/σ, and the sums of y `[K, parts, 2, C]`, shifted by that mean.

    running: mean, variance, whether they are kept up, momentum, ε. drop: keys, salt, threshold, scale (1: none).
    """
    acc, dtype = wide(x)
    mean = torch.empty(cut.lanes, cut.channels, dtype=dtype, device=x.device)
    rstd, y, z = torch.empty_like(mean), torch.empty_like(x), torch.empty_like(x)
    part, old = take_sums(x, running[0], cut)
    launch(
        _finish, (cut.lanes, cut.columns), part, old, mean, rstd, running[0], running[1], cut.rows, cut.channels,
        running[0].stride(0), MOMENTUM=running[3], EPS=running[4], KEEP=running[2], ACC=acc, PARTS=cut.parts,
        BC=cut.block[1],
    )  # fmt: skip
    how = _cut(cut)
    sums = torch.empty(cut.lanes, how["PARTS"], 2, cut.channels, dtype=dtype, device=x.device)
    keys, salt, threshold, scale = drop
    launch(
        _forward, (cut.lanes, how["BLOCKS"], how["PARTS"]),
        x, y, z, *affine, mean, rstd, matrix, keys, sums, cut.rows, cut.channels, cut.pixels, stride, matrix.stride(0),
        triton.cdiv(cut.rows, how["PARTS"]), salt, threshold,
        SCALE=scale, DROP=scale != 1.0, ACC=acc, PRECISION="tf32", num_warps=8, **how,
    )  # fmt: skip
    return y, z, mean, rstd, sums


def adapter_backward(
    g: Tensor,
    x: Tensor,
    moments: tuple[Tensor, Tensor],
    matrix: Tensor,
    drop: tuple[Tensor, int, int, float],
    cut: Tiles,
) -> tuple[Tensor, Tensor]:
    """The gradient behind the product (before dropout), and its sums `[K, parts, 2, C]` (behind dropout)."""
    acc, dtype = wide(x)
    how, dz = _cut(cut), torch.empty_like(x)
    sums = torch.empty(cut.lanes, how["PARTS"], 2, cut.channels, dtype=dtype, device=x.device)
    keys, salt, threshold, scale = drop
    launch(
        _backward, (cut.lanes, how["BLOCKS"], how["PARTS"]),
        g, x, dz, *moments, matrix, keys, sums, cut.rows, cut.channels, cut.pixels, matrix.stride(0),
        triton.cdiv(cut.rows, how["PARTS"]), salt, threshold,
        SCALE=scale, DROP=scale != 1.0, ACC=acc, PRECISION="tf32", num_warps=8, **how,
    )  # fmt: skip
    return dz, sums
