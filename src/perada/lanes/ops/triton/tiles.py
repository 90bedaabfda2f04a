"""What the kernels of batch norms share: sums over a lane's rows, statistics, dropout's draws, sizes of blocks.

Activations are `[K·B, C, H, W]` in channels_last, so lane k's values are the rows k·R .. (k+1)·R of `[K·R, C]`, where
R = B·H·W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plain import Statistics
from .launch import is_side_stream, launch


@triton.jit
def last(ticket_ptr, parts):
    """Returns whether this is the last of `parts` programs to get here, which then sees what the others stored. The
    ticket starts at zero and ends at zero."""
    tl.debug_barrier()  # all threads of this program store before it takes a ticket
    is_last = tl.atomic_add(ticket_ptr, 1) == parts - 1
    if is_last:
        tl.store(ticket_ptr, 0)
    return is_last


@triton.jit
def reduced(part_ptr, k, c, inside, channels, parts, MOST: tl.constexpr):
    """Returns the sums of lane k's channels over all parts: `[K, parts, 2, C]`."""
    part = tl.arange(0, MOST)
    at = (k * parts + part)[:, None] * 2 * channels + c[None, :]
    mask = (part < parts)[:, None] & inside[None, :]
    first = tl.sum(tl.load(part_ptr + at, mask=mask, other=0.0), 0)
    return first, tl.sum(tl.load(part_ptr + at + channels, mask=mask, other=0.0), 0)


@triton.jit
def lane_values(first_ptr, second_ptr, k, c, inside, stride, ACC: tl.constexpr):
    """Loads two tensors `[K, C]` at lane k's channels; a stride of 0 for frozen ones `[C]`."""
    first = tl.load(first_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    return first, tl.load(second_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)


@triton.jit
def statistics(
    first, second, shift, k, c, inside, rows, channels, stride, mean_ptr, rstd_ptr, running_mean_ptr,
    running_var_ptr, MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Returns and stores mean and 1/σ, from Σ(x − shift) and Σ(x − shift)². KEEP: updates the running statistics."""
    count = tl.zeros([BC], ACC) + rows
    moved = first / count
    var = tl.maximum(second / count - moved * moved, 0.0)
    mean, rstd = shift + moved, 1.0 / tl.sqrt(var + EPS)
    tl.store(mean_ptr + k * channels + c, mean, mask=inside)
    tl.store(rstd_ptr + k * channels + c, rstd, mask=inside)
    if KEEP:
        middle = tl.load(running_mean_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
        spread = tl.load(running_var_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
        tl.store(running_mean_ptr + k * stride + c, middle + MOMENTUM * (mean - middle), mask=inside)
        spread += MOMENTUM * (var * (count / (count - 1)) - spread)
        tl.store(running_var_ptr + k * stride + c, spread, mask=inside)
    return mean, rstd


@triton.jit(do_not_specialize=["parts", "chunk", "loops"])  # they vary with the number of lanes; compile once for all
def _sums(
    x_ptr, part_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, ticket_ptr, rows, channels, parts,
    chunk, loops, stride, MOMENTUM: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    EVEN: tl.constexpr, UNROLL: tl.constexpr, MOST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums x − shift and (x − shift)² over a part of the rows. The shift is the running mean, to keep squares
    small. The last part to finish computes the statistics of all."""
    k, column, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c = column * BC + tl.arange(0, BC)
    inside = c < channels
    end = tl.minimum(part * chunk + chunk, rows)
    shift = tl.load(running_mean_ptr + k * stride + c, mask=inside, other=0.0).to(ACC)
    first, second = tl.zeros([BR, BC], ACC), tl.zeros([BR, BC], ACC)
    x_ptr += k * rows * channels  # 32 bits are enough within a lane, and cheaper
    for i in tl.range(0, loops, loop_unroll_factor=UNROLL):
        r = part * chunk + i * BR + tl.arange(0, BR)
        mask = tl.full([BR, BC], 1, tl.int1) if EVEN else (r < end)[:, None] & inside[None, :]
        at = r[:, None] * channels + c[None, :]
        x = tl.where(mask, tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC) - shift[None, :], 0.0)
        first += x
        second += x * x
    first, second = tl.sum(first, 0), tl.sum(second, 0)
    at = part_ptr + (k * parts + part) * 2 * channels + c
    tl.store(at, first, mask=inside)
    tl.store(at + channels, second, mask=inside)
    if last(ticket_ptr + k * tl.num_programs(1) + column, parts):
        first, second = reduced(part_ptr, k, c, inside, channels, parts, MOST)
        statistics(
            first, second, shift, k, c, inside, rows, channels, stride, mean_ptr, rstd_ptr, running_mean_ptr,
            running_var_ptr, MOMENTUM, EPS, KEEP, ACC, BC,
        )  # fmt: skip


@triton.jit
def mixed(key):
    """Computes the 64-bit mix of `random.fold`."""
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -49064778989728563
    key = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    return key ^ ((key >> 33) & 0x7FFFFFFF)


@triton.jit
def drawn(key, place):
    """Returns the elements at `place` (int32) of `random.bits` for a key, as unsigned 32-bit integers."""
    return _mixed32(key, place.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _mixed32(key, x):
    low = key.to(tl.int32).to(tl.uint32, bitcast=True)
    high = (key >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
    x = ((x ^ (x >> 16)) + low) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + high) * 0x846CA68B
    return (x ^ (x >> 16)) * 0x7FEB352D


@triton.jit
def kept(key, r, c, channels, pixels, threshold, POWER: tl.constexpr):
    """Computes `random.keep_mask` at the elements' places in their lane, in the order [B, C, H, W]. POWER: a map's
    pixels are a power of two. The products are of rows and columns, as these are fewer than elements."""
    pixel = r & (pixels - 1) if POWER else r % pixels
    row = ((r - pixel) * channels + pixel).to(tl.uint32) * 0x9E3779B1
    column = (c * pixels).to(tl.uint32) * 0x9E3779B1
    return _mixed32(key, row[:, None] + column[None, :]).to(tl.int32, bitcast=True) >= threshold


class Tiles(NamedTuple):
    """How the work of one norm is cut into blocks; the sizes were the fastest on an H200."""

    lanes: int
    rows: int
    channels: int
    pixels: int
    parts: int  # of the rows; 1: a program has all rows of its channels, and a norm is one kernel
    block: tuple[int, int]  # rows, channels
    warps: int = 4

    @property
    def columns(self) -> int:
        return int(triton.cdiv(self.channels, self.block[1]))

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.lanes, int(triton.cdiv(self.rows, self.block[0])), self.columns

    @property
    def power(self) -> bool:
        return self.pixels & (self.pixels - 1) == 0

    @property
    def chunk(self) -> int:
        return int(triton.cdiv(self.rows, self.parts))

    @property
    def even(self) -> bool:
        """Returns whether blocks cover exactly the rows and channels."""
        rows, channels = self.block
        return self.chunk * self.parts == self.rows and self.chunk % rows == 0 and self.channels % channels == 0

    @property
    def loops(self) -> int:
        return int(triton.cdiv(self.chunk, self.block[0]))

    def spread(self, rows: int) -> Tiles:
        """Returns tiles for a kernel without sums, with this many rows per block."""
        return self if self.parts == 1 else self._replace(block=(rows, min(64, triton.next_power_of_2(self.channels))))


WHOLE = 1024  # rows that one program can hold, with few enough channels
UNROLL = 8  # blocks that a program processes at once
MOST = 128  # the largest number of parts
TICKETS = 1 << 16  # lanes × blocks of channels
PROGRAMS = 512  # enough to keep a large GPU busy; with more, each has too little to do


def tiles(x: Tensor, lanes: int, sums: bool = True) -> Tiles:
    """Returns tiles for x `[K·B, C, H, W]`. Without `sums` over rows, any block will do. The sizes of blocks do not
    depend on the number of lanes, so that there is less to compile."""
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = x.shape[0] * pixels // lanes
    across = min(16, triton.next_power_of_2(channels))
    if rows <= WHOLE and sums:
        across = min(32, triton.next_power_of_2(channels)) if rows <= 128 else across
        block = triton.next_power_of_2(rows), across
        return Tiles(lanes, rows, channels, pixels, 1, block, max(4, min(8, block[0] * block[1] // 1024)))
    assert lanes * triton.cdiv(channels, across) <= TICKETS
    parts = max(2, min(MOST, PROGRAMS // (lanes * triton.cdiv(channels, across)), triton.cdiv(rows, 64)))
    parts = 1 << parts.bit_length() - 1  # so that blocks mostly fit evenly
    return Tiles(lanes, rows, channels, pixels, parts, (64, across))


def wide(tensor: Tensor) -> tuple[Any, torch.dtype]:
    """Returns the type of sums, for Triton and torch: float32, or float64 for activations in float64."""
    return (tl.float64, torch.float64) if tensor.dtype == torch.float64 else (tl.float32, torch.float32)


def tickets(device: torch.device) -> Tensor:
    """Returns zeros, which every kernel leaves zero; one tensor per stream, whose kernels run one after the other."""
    if device not in _tickets:
        _tickets[device] = torch.zeros(2, TICKETS, dtype=torch.int32, device=device)
        if is_side_stream(device):  # both streams use the tensor
            torch.cuda.current_stream(device).synchronize()
    return _tickets[device][int(is_side_stream(device))]


_tickets: dict[torch.device, Tensor] = {}


def take_statistics(x: Tensor, mean: Tensor, rstd: Tensor, running: Statistics, cut: Tiles) -> None:
    """Writes mean and 1/σ `[K, C]`, computed in parts."""
    acc, dtype = wide(x)
    part = torch.empty(cut.lanes, cut.parts, 2, cut.channels, dtype=dtype, device=x.device)
    launch(
        _sums, (cut.lanes, cut.columns, cut.parts),
        x, part, mean, rstd, running.mean, running.var, tickets(x.device), cut.rows, cut.channels, cut.parts, cut.chunk,
        cut.loops, running.mean.stride(0), MOMENTUM=running.momentum, EPS=running.eps, KEEP=running.mode == "train",
        ACC=acc, EVEN=cut.even, UNROLL=UNROLL, MOST=MOST, BR=cut.block[0], BC=cut.block[1], num_warps=cut.warps,
    )  # fmt: skip
