"""A training batch in one kernel: images by number, mirrored, shifted and normalised, in channels_last.

`data/augment.py` has the same in plain torch, and explains the draws.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...random import folding
from ..plain import Augment, Colours, Draws, Ops
from .launch import launch, only_compiling
from .tiles import drawn, mixed, wide


@triton.jit
def _unit(bits):
    """Computes `random.uniform` from `random.bits`."""
    return ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _views(
    pool_ptr, index_ptr, key_ptr, mean_ptr, std_ptr, out_ptr, batch, height, width, pad, salt, stride,
    DRAWS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes normalised views. DRAWS per sample: 0, 1 (mirrored) or 3 (also shifted down and to the right)."""
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // width, i % width
    if DRAWS > 0:
        key, place = mixed(tl.load(key_ptr + n // batch) + salt), (n % batch).to(tl.int32) * DRAWS
        if DRAWS == 3:
            row += (_unit(drawn(key, place + 1)) * (2 * pad + 1)).to(tl.int32) - pad
            column += (_unit(drawn(key, place + 2)) * (2 * pad + 1)).to(tl.int32) - pad
        mirrored = width - 1 - column
        column = tl.where(_unit(drawn(key, place)) < 0.5, mirrored, column)
    mask = i < height * width
    there = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = tl.load(index_ptr + n)
    for c in tl.static_range(3):
        plane = (source * CHANNELS + (c if CHANNELS == 3 else 0)) * height
        value = tl.load(pool_ptr + (plane + row) * width + column, mask=there, other=0).to(ACC)
        value = (value / 255 - tl.load(mean_ptr + c * stride).to(ACC)) / tl.load(std_ptr + c * stride).to(ACC)
        tl.store(out_ptr + (n * height * width + i) * 3 + c, value.to(out_ptr.dtype.element_ty), mask=mask)


def views(
    ops: Ops, pool: Tensor, samples: Tensor, keys: Tensor, augment: Augment, draws: Draws, colours: Colours
) -> Tensor:
    """Computes `Ops.views` in one kernel, for augmentations that it knows."""
    if draws is None:
        return Ops.views(ops, pool, samples, keys, augment, draws, colours)
    (salt, number, shift), (mean, std) = draws, (c.expand(3, 1, 1) for c in colours)
    (lanes, batch), (_, channels, height, width) = samples.shape, pool.shape
    like = torch.channels_last
    made = torch.empty(lanes * batch, 3, height, width, dtype=mean.dtype, device=pool.device, memory_format=like)
    block = min(1024, triton.next_power_of_2(height * width))
    launch(
        _views, (lanes * batch, triton.cdiv(height * width, block)),
        pool, samples, keys, mean, std, made, batch, height, width, shift, folding(salt), mean.stride(0),
        DRAWS=number, CHANNELS=channels, ACC=wide(made)[0], BLOCK=block,
    )  # fmt: skip
    return made


@triton.jit
def _blocks(x_ptr, out_ptr, pixels, height, width, BLOCK: tl.constexpr):
    """Writes one block of 2×2 pixels per row of the output: 16 numbers, twelve of them from three colours."""
    n, i, q = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 16)
    inside = (i < pixels)[:, None] & (q < 16)[None, :]
    across = width // 2 + 3
    row = 2 * (i // across - 2)[:, None] + (q // 2 % 2)[None, :]
    column = 2 * (i % across - 2)[:, None] + (q % 2)[None, :]
    there = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (q < 12)[None, :] & inside
    at = ((n * height + row) * width + column) * 3 + (q // 4)[None, :]
    value = tl.load(x_ptr + at, mask=there, other=0.0)
    tl.store(out_ptr + (n * pixels + i)[:, None] * 16 + q[None, :], value, mask=inside)


def blocks(ops: Ops, x: Tensor) -> Tensor:
    """Computes `Ops.blocks` in one kernel, for images that need no gradient."""
    if x.requires_grad:
        return Ops.blocks(ops, x)
    x = x.contiguous(memory_format=torch.channels_last)
    n, _, height, width = x.shape
    out = height // 2 + 3, width // 2 + 3
    made = torch.empty(n, 16, *out, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pixels = out[0] * out[1]
    launch(_blocks, (n, triton.cdiv(pixels, 64)), x, made, pixels, height, width, BLOCK=64)
    return made


@triton.jit
def _picked(
    index_ptr, row_ptr, key_ptr, lane_ptr, step_ptr, target_ptr, sample_out, target_out, key_out, capacity, batch,
    BLOCK: tl.constexpr,
):  # fmt: skip
    k, i = tl.program_id(0), tl.arange(0, BLOCK)
    lane, step, mask = tl.load(lane_ptr + k), tl.load(step_ptr + k), i < batch
    sample = tl.load(index_ptr + (tl.load(row_ptr + lane) * capacity + step) * batch + i, mask=mask, other=0)
    tl.store(sample_out + k * batch + i, sample, mask=mask)
    tl.store(target_out + k * batch + i, tl.load(target_ptr + sample, mask=mask, other=0), mask=mask)
    tl.store(key_out + k, mixed(tl.load(key_ptr + lane) + (step + 1) * -7046029254386353131))


def client_batch(
    ops: Ops, index: Tensor, row: Tensor, keys: Tensor, targets: Tensor, lanes: Tensor, step: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `Ops.client_batch` in one kernel, for a tensor of steps and one label per image."""
    if not isinstance(step, Tensor) or targets.dim() != 1:
        return Ops.client_batch(ops, index, row, keys, targets, lanes, step)
    (_, capacity, batch), number = index.shape, len(lanes)
    make = torch.zeros if only_compiling() else torch.empty  # indices must be valid even if no kernel runs
    samples, labels = (make(number, batch, dtype=torch.int64, device=index.device) for _ in range(2))
    folded = torch.empty(number, dtype=torch.int64, device=index.device)
    launch(
        _picked, (number,), index, row, keys, lanes, step, targets, samples, labels, folded, capacity, batch,
        BLOCK=triton.next_power_of_2(batch),
    )  # fmt: skip
    return samples, labels, folded


@triton.jit
def _chunk(
    step_ptr, first_ptr, key_ptr, target_ptr, number_out, key_out, target_out, chunks, size, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(step_ptr) + tl.load(first_ptr)
    number = at % chunks
    tl.store(target_out + i, tl.load(target_ptr + number * size + i, mask=i < size, other=0.0), mask=i < size)
    if tl.program_id(0) == 0:
        tl.store(number_out, number)
        tl.store(key_out, mixed(tl.load(key_ptr) + (at + 1) * -7046029254386353131))


def chunk(ops: Ops, step: int | Tensor, first: Tensor, key: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `Ops.chunk` in one kernel, for a step that is a tensor."""
    if not isinstance(step, Tensor):
        return Ops.chunk(ops, step, first, key, targets)
    make = torch.zeros_like if only_compiling() else torch.empty_like
    own, number, folded = torch.empty_like(targets[:1]), make(step), torch.empty_like(key)
    launch(
        _chunk, (triton.cdiv(own.numel(), 1024),), step, first, key, targets, number, folded, own,
        len(targets), own.numel(), BLOCK=1024,
    )  # fmt: skip
    return number, own, folded
