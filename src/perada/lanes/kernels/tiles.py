"""What the kernels of a batch norm share: sums over a lane's rows, statistics from them, draws.

A mask for one program of several compares with a limit that is 0 for the others: Triton 3.9's interpreter does not
take a block of booleans and a single one together.

Activations are `[K·B, C, H, W]` in channels_last, so lane k's values are the rows k·R .. (k+1)·R of `[K·R, C]`, where
R = B·H·W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


@triton.jit
def reduced(part_ptr, k, c, inside, channels, PARTS: tl.constexpr):
    """The sums of lane k's channels, of which there are PARTS parts: `[K, PARTS, 2, C]`."""
    parts = (k * PARTS + tl.arange(0, PARTS))[:, None] * 2 * channels + c[None, :]
    first = tl.sum(tl.load(part_ptr + parts, mask=inside[None, :], other=0.0), 0)
    second = tl.sum(tl.load(part_ptr + parts + channels, mask=inside[None, :], other=0.0), 0)
    return first, second


@triton.jit
def lane_values(first_ptr, second_ptr, k, c, inside, stride, ACC: tl.constexpr):
    """Two tensors `[K, C]` at lane k's channels; a stride of 0 for frozen ones `[C]`."""
    first = tl.load(first_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    return first, tl.load(second_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)


@triton.jit
def statistics(
    first, second, shift, k, c, mask, rows, channels, stride, mean_ptr, rstd_ptr, running_mean_ptr,
    running_var_ptr, MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Σ(x − shift) and Σ(x − shift)² -> mean and 1/σ. Where `mask` says (one program of a lane and channel) they are
    handed to the backward pass, and the running statistics brought up to date."""
    count = tl.zeros([BC], ACC) + rows
    moved = first / count
    var = tl.maximum(second / count - moved * moved, 0.0)
    mean, rstd = shift + moved, 1.0 / tl.sqrt(var + EPS)
    tl.store(mean_ptr + k * channels + c, mean, mask=mask)
    tl.store(rstd_ptr + k * channels + c, rstd, mask=mask)
    if KEEP:
        middle = tl.load(running_mean_ptr + k * stride + c, mask=mask, other=0.0).to(ACC)
        spread = tl.load(running_var_ptr + k * stride + c, mask=mask, other=0.0).to(ACC)
        tl.store(running_mean_ptr + k * stride + c, middle + MOMENTUM * (mean - middle), mask=mask)
        spread += MOMENTUM * (var * (count / (count - 1)) - spread)
        tl.store(running_var_ptr + k * stride + c, spread, mask=mask)
    return mean, rstd


@triton.jit
def sums(
    x_ptr, shift_ptr, part_ptr, old_ptr, rows, channels, chunk, stride,
    ACC: tl.constexpr, LOOPS: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ(x − shift) and Σ(x − shift)² of a part of the rows, the shift being the running mean (it keeps the squares
    small); a copy of it, as whoever reads the sums may write the running mean at the same time."""
    k, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    shift = tl.load(shift_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    first, second = tl.zeros([BC], ACC), tl.zeros([BC], ACC)
    x_ptr += k * rows * channels  # within a lane 32 bits do, and they are cheaper
    for i in range(LOOPS):
        r = part * chunk + i * BR + tl.arange(0, BR)
        mask = ((r < rows) & (r < part * chunk + chunk))[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        x = tl.where(mask, tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC) - shift[None, :], 0.0)
        first += tl.sum(x, 0)
        second += tl.sum(x * x, 0)
    at = part_ptr + (k * PARTS + part) * 2 * channels + c
    tl.store(at, first, mask=inside)
    tl.store(at + channels, second, mask=inside)
    tl.store(old_ptr + k * channels + c, shift, mask=c < tl.where(part == 0, channels, 0))


@triton.jit
def mixed(key):
    """The 64-bit mix of `random.fold`."""
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -49064778989728563
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    return key ^ ((key >> 33) & 0x7FFFFFFF)


@triton.jit
def drawn(key, place):
    """Element `place` (int32, one or more) of `random.bits` for a key, as unsigned 32-bit integers."""
    low = key.to(tl.int32).to(tl.uint32, bitcast=True)
    high = (key >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
    x = place.to(tl.uint32) * 0x9E3779B1
    x = ((x ^ (x >> 16)) + low) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + high) * 0x846CA68B
    return (x ^ (x >> 16)) * 0x7FEB352D


@triton.jit
def kept(key, r, c, channels, pixels, threshold):
    """`random.keep_mask` of the elements' places in their lane, counted in the order [B, C, H, W]."""
    place = ((r // pixels)[:, None] * channels + c[None, :]) * pixels + (r % pixels)[:, None]
    return drawn(key, place).to(tl.int32, bitcast=True) >= threshold


class Tiles(NamedTuple):
    """How the work of one norm is cut into blocks; the numbers are the fastest of many on an H200."""

    lanes: int
    rows: int
    channels: int
    pixels: int
    parts: int  # 1: a program has all rows of its channels, so a norm is one kernel
    block: tuple[int, int]  # rows, channels

    @property
    def columns(self) -> int:
        return int(triton.cdiv(self.channels, self.block[1]))

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.lanes, int(triton.cdiv(self.rows, self.block[0])), self.columns

    @property
    def chunk(self) -> int:
        return int(triton.cdiv(self.rows, self.parts))

    @property
    def loops(self) -> int:
        return int(triton.cdiv(self.chunk, self.block[0]))

    @property
    def warps(self) -> int:
        return max(4, min(8, self.block[0] * self.block[1] // 1024)) if self.parts == 1 else 4

    @property
    def halved(self) -> Tiles:
        """For the kernel that holds the most."""
        return self if self.parts == 1 else self._replace(block=(self.block[0] // 2, self.block[1]))


WHOLE = 1024  # rows that one program can hold, with few enough channels


def tiles(x: Tensor, lanes: int, sums: bool = True) -> Tiles:
    """x `[K·B, C, H, W]`. Without sums over the rows any block does. What is fixed here does not depend on the lanes,
    so that there is less to compile."""
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = x.shape[0] * pixels // lanes
    if rows <= WHOLE and sums:
        across = min(32 if rows <= 128 else 16, triton.next_power_of_2(channels))
        return Tiles(lanes, rows, channels, pixels, 1, (triton.next_power_of_2(rows), across))
    block = (256, min(32, triton.next_power_of_2(channels)))
    parts = max(2, min(128, triton.next_power_of_2(triton.cdiv(rows, block[0]))))
    return Tiles(lanes, rows, channels, pixels, parts, block)


def wide(tensor: Tensor) -> tuple[Any, torch.dtype]:
    """The type that sums are taken in: float32, or float64 where the activations are."""
    return (tl.float64, torch.float64) if tensor.dtype == torch.float64 else (tl.float32, torch.float32)


def take_sums(x: Tensor, running_mean: Tensor, cut: Tiles) -> tuple[Tensor, Tensor]:
    """`[K, parts, 2, C]` and the shift `[K, C]`."""
    acc, dtype = wide(x)
    part = torch.empty(cut.lanes, cut.parts, 2, cut.channels, dtype=dtype, device=x.device)
    old = torch.empty(cut.lanes, cut.channels, dtype=dtype, device=x.device)
    launch(
        sums, (cut.lanes, cut.columns, cut.parts),
        x, running_mean, part, old, cut.rows, cut.channels, cut.chunk, running_mean.stride(0),
        ACC=acc, LOOPS=cut.loops, PARTS=cut.parts, BR=cut.block[0], BC=cut.block[1], num_warps=cut.warps,
    )  # fmt: skip
    return part, old
