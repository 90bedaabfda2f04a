"""Steps on all parameters of all lanes at once, which lie side by side (`State.flat`), and a step's last word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 1024


@triton.jit
def _length(
    g_ptr, centre_ptr, rate_ptr, pull_ptr, pulled_ptr, total_ptr, size, centre_stride, rate_stride, pull_stride,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    g = tl.abs(tl.load(g_ptr + k * size + i, mask=mask, other=0.0).to(total_ptr.dtype.element_ty))
    if PULL:
        pull = tl.load(pull_ptr + k * pull_stride)
        if pull != 0:
            centre = tl.load(centre_ptr + k * centre_stride + i, mask=mask, other=0.0)
            g += tl.abs(pull * centre) * tl.load(pulled_ptr + i, mask=mask, other=0.0)
    tl.atomic_add(total_ptr + k, tl.sum(g * tl.abs(tl.load(rate_ptr + k * rate_stride)), 0))


Pulled = tuple[Tensor, Tensor, Tensor]
"""A pull's centre `[K, n]` or `[1, n]`, its strengths `[K, 1]`, and ones `[n]` where it pulls, zeros where not."""


def _pulled(p: Tensor, rates: Tensor, pull: Pulled | None) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """Tensors for the kernels, and strides from lane to lane."""
    centre, strength, where = (p, rates, p) if pull is None else pull
    strides = 0 if centre.shape[0] == 1 else centre.stride(0), rates.stride(0), strength.stride(0)
    return (centre, rates, strength, where), strides


def length(g: Tensor, rates: Tensor, pull: Pulled | None) -> Tensor:
    """Σ rate (|g| + pull |centre|) of each lane, `[K]`, taken in any order: good for telling whether a step on g
    `[K, n]` is finite, from parameters that are."""
    total = torch.zeros(g.shape[0], dtype=rates.dtype, device=g.device)
    tensors, strides = _pulled(g, rates, pull)
    launch(
        _length, (g.shape[0], triton.cdiv(g.shape[1], 4 * _BLOCK)),
        g, *tensors, total, g.shape[1], *strides, PULL=pull is not None, BLOCK=4 * _BLOCK,
    )  # fmt: skip
    return total


@triton.jit
def _sgd(
    p_ptr, g_ptr, centre_ptr, rate_ptr, pull_ptr, pulled_ptr, moves_ptr, size, centre_stride, rate_stride, pull_stride,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(tl.load(moves_ptr + k) != 0, size, 0)
    p = tl.load(p_ptr + k * size + i, mask=mask, other=0.0)
    g = tl.load(g_ptr + k * size + i, mask=mask, other=0.0).to(p_ptr.dtype.element_ty)
    if PULL:
        pull = tl.load(pull_ptr + k * pull_stride)
        if pull != 0:
            towards = p - tl.load(centre_ptr + k * centre_stride + i, mask=mask, other=0.0)
            g += pull * towards * tl.load(pulled_ptr + i, mask=mask, other=0.0)
    new = p - tl.load(rate_ptr + k * rate_stride) * g
    tl.store(p_ptr + k * size + i, new, mask=mask & (tl.abs(new) < float("inf")))


def sgd_step(p: Tensor, g: Tensor, rates: Tensor, pull: Pulled | None, moves: Tensor) -> None:
    """p − rate (g + pull (p − centre)) over p, in the lanes that move (bool `[K]`). p and g `[K, n]`, rates `[K, 1]`.
    What would not be finite stays as it is."""
    tensors, strides = _pulled(p, rates, pull)
    launch(
        _sgd, (p.shape[0], triton.cdiv(p.shape[1], _BLOCK)),
        p, g, *tensors, moves.view(torch.int8), p.shape[1], *strides, PULL=pull is not None, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _adam(
    p_ptr, g_ptr, m_ptr, v_ptr, done_ptr, table_ptr, p_out, m_out, v_out, done_out, total_ptr, size, steps,
    done_stride, ONE: tl.constexpr, TWO: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, at = i < size, k * size + i
    done = tl.load(done_ptr + k * done_stride)
    row = table_ptr + 2 * tl.minimum(done.to(tl.int32), steps - 1)
    p = tl.load(p_ptr + at, mask=mask, other=0.0)
    m, v = tl.load(m_ptr + at, mask=mask, other=0.0), tl.load(v_ptr + at, mask=mask, other=0.0)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(p_ptr.dtype.element_ty)
    m += (1 - ONE) * (g - m)
    v += (1 - TWO) * (g * g - v)
    p -= tl.load(row) * m / (tl.sqrt(v) / tl.load(row + 1) + EPS)
    tl.store(p_out + at, p, mask=mask)
    tl.store(m_out + at, m, mask=mask)
    tl.store(v_out + at, v, mask=mask)
    tl.atomic_add(total_ptr + k, tl.sum(tl.where(mask, p + m + v, 0.0), 0))
    if tl.program_id(1) == 0:
        tl.store(done_out + k, done + 1)


def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, done: Tensor, table: Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, ...]:
    """Returns the new p, m and v `[K, n]`, where p is p − rate · m / (√v / root + ε); the steps done `[K, 1]`; and the
    sums of p, m and v `[K]`. table `[steps, 2]` holds each step's rate and root (`Ops.adam`)."""
    out = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p), done.new_empty(done.shape)
    total = torch.zeros(p.shape[0], dtype=p.dtype, device=p.device)
    launch(
        _adam, (p.shape[0], triton.cdiv(p.shape[1], _BLOCK)),
        p, g, m, v, done, table, *out, total, p.shape[1], len(table), done.stride(0),
        ONE=betas[0], TWO=betas[1], EPS=eps, BLOCK=_BLOCK,
    )  # fmt: skip
    return *out, total


@triton.jit
def _settle(
    counts_ptr, at_ptr, finite_ptr, loss_ptr, total_ptr, trace_ptr, moves_ptr, width, stride, BLOCK: tl.constexpr
):
    k = tl.arange(0, BLOCK)
    mask = k < width
    at = tl.load(at_ptr + k, mask=mask, other=0)
    going = tl.load(counts_ptr + k, mask=mask, other=0) > at
    finite = tl.load(finite_ptr + k, mask=mask, other=0) != 0
    loss, total = tl.load(loss_ptr + k, mask=mask, other=0.0), tl.load(total_ptr + k, mask=mask, other=0.0)
    moves = going & finite & (tl.abs(loss) < float("inf")) & (tl.abs(total) < float("inf"))
    tl.store(moves_ptr + k, moves.to(tl.int8), mask=mask)
    tl.store(finite_ptr + k, (finite & (moves | (going == 0))).to(tl.int8), mask=mask)
    tl.store(trace_ptr + at * stride + k, loss, mask=mask & going)
    tl.store(at_ptr + k, at + going.to(tl.int64), mask=mask)


def settle(counts: Tensor, at: Tensor, finite: Tensor, losses: Tensor, total: Tensor, trace: Tensor) -> Tensor:
    """Which lanes move (bool `[k]`): they have steps left and are finite. Keeps their losses, counts the step."""
    moves = torch.empty_like(finite)
    launch(
        _settle, (1,), counts, at, finite.view(torch.int8), losses, total, trace, moves.view(torch.int8), len(counts),
        trace.stride(0), BLOCK=triton.next_power_of_2(len(counts)),
    )  # fmt: skip
    return moves


@triton.jit
def _keep(old_ptr, new_ptr, moves_ptr, size, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(tl.load(moves_ptr + k) != 0, size, 0)
    tl.store(old_ptr + k * size + i, tl.load(new_ptr + k * size + i, mask=mask, other=0.0), mask=mask)


def keep(old: Tensor, new: Tensor, moves: Tensor) -> None:
    """Writes the lanes of `new` `[K, n]` that move (bool `[K]`) over those of `old`."""
    grid = (old.shape[0], triton.cdiv(old.shape[1], _BLOCK))
    launch(_keep, grid, old, new, moves.view(torch.int8), old.shape[1], BLOCK=_BLOCK)
