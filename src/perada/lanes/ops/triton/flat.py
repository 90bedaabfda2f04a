"""Training steps on all parameters of all lanes at once (`State.flat`), and the end of a step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plain import AdamPlan, Change, Ops, Pulled, Tensors
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


def sgd(
    ops: Ops, params: Tensors, grads: Tensors, rates: Tensor, pull: Pulled | None, momentum: float, velocities: Tensors
) -> list[Change]:
    """Computes `Ops.sgd` on flat parameters, in place; without momentum.

    The total is Σ rate (|g| + pull |centre|): it tells whether the step of finite parameters is finite. A single value
    that would not be finite stays as it is.
    """
    if momentum or not _are_flat(params, grads) or (pull and pull.where is None):
        return Ops.sgd(ops, params, grads, rates, pull, momentum, velocities)
    (p,), (g,) = params, grads
    centre, strength, where = (p, rates, p) if pull is None else (pull.centres[0], pull.strength, pull.where)
    pulled, (lanes, size) = (centre, rates, strength, where), p.shape
    strides = 0 if centre.shape[0] == 1 else centre.stride(0), rates.stride(0), strength.stride(0)
    total = torch.zeros(lanes, dtype=rates.dtype, device=g.device)
    launch(
        _length, (lanes, triton.cdiv(size, 4 * _BLOCK)),
        g, *pulled, total, size, *strides, PULL=pull is not None, BLOCK=4 * _BLOCK,
    )  # fmt: skip

    def write(moves: Tensor) -> None:
        launch(
            _sgd, (lanes, triton.cdiv(size, _BLOCK)),
            p, g, *pulled, moves.view(torch.int8), size, *strides, PULL=pull is not None, BLOCK=_BLOCK,
        )  # fmt: skip

    return [Change(total, write)]


def _are_flat(*several: Tensors) -> bool:
    """Returns whether each of these is a single contiguous tensor `[K, n]`."""
    return all(len(some) == 1 and some[0].dim() == 2 and some[0].is_contiguous() for some in several)


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


def adam(
    ops: Ops, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, done: Tensor, plan: AdamPlan
) -> list[Change]:
    """Computes `Ops.adam` on flat parameters, in one kernel; the total is the sum of the new values."""
    if not _are_flat(params, grads, firsts, seconds):
        return Ops.adam(ops, params, grads, firsts, seconds, done, plan)
    (p,), (g,), (m,), (v,) = params, grads, firsts, seconds
    new = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p), done.new_empty(done.shape)
    total = torch.zeros(p.shape[0], dtype=p.dtype, device=p.device)
    launch(
        _adam, (p.shape[0], triton.cdiv(p.shape[1], _BLOCK)),
        p, g, m, v, done, plan.table, *new, total, p.shape[1], len(plan.table), done.stride(0),
        ONE=plan.betas[0], TWO=plan.betas[1], EPS=plan.eps, BLOCK=_BLOCK,
    )  # fmt: skip

    def write_all(moves: Tensor) -> None:
        for old, made in zip((p, m, v, done), new, strict=True):
            ops.write(old, made, moves)

    return [Change(total, write_all)]


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


def settle(
    ops: Ops, counts: Tensor, at: Tensor, finite: Tensor, losses: Tensor, total: Tensor, trace: Tensor
) -> Tensor:
    """Computes `Ops.settle` in one kernel."""
    moves = torch.empty_like(finite)
    launch(
        _settle, (1,), counts, at, finite.view(torch.int8), losses, total, trace, moves.view(torch.int8), len(counts),
        trace.stride(0), BLOCK=triton.next_power_of_2(len(counts)),
    )  # fmt: skip
    return moves


@triton.jit
def _write(old_ptr, new_ptr, moves_ptr, size, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.where(tl.load(moves_ptr + k) != 0, size, 0)
    tl.store(old_ptr + k * size + i, tl.load(new_ptr + k * size + i, mask=mask, other=0.0), mask=mask)


def write(ops: Ops, old: Tensor, new: Tensor, moves: Tensor) -> None:
    """Computes `Ops.write` in one kernel, for contiguous tensors `[K, n]`."""
    if old.dim() == 2 and old.is_contiguous() and new.is_contiguous():
        grid = (old.shape[0], triton.cdiv(old.shape[1], _BLOCK))
        launch(_write, grid, old, new, moves.view(torch.int8), old.shape[1], BLOCK=_BLOCK)
    else:
        Ops.write(ops, old, new, moves)
