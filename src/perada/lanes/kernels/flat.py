"""Steps on all parameters of all lanes at once, which lie side by side (`State.flat`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _sgd(
    p_ptr, g_ptr, centre_ptr, rate_ptr, pull_ptr, pulled_ptr, out_ptr, size, centre_stride, rate_stride, pull_stride,
    PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p − rate (g + pull (p − centre)), lane by lane, the pull where `pulled` is one."""
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    p = tl.load(p_ptr + k * size + i, mask=mask, other=0.0)
    g = tl.load(g_ptr + k * size + i, mask=mask, other=0.0).to(p_ptr.dtype.element_ty)
    if PULL:
        towards = p - tl.load(centre_ptr + k * centre_stride + i, mask=mask, other=0.0)
        g += tl.load(pull_ptr + k * pull_stride) * towards * tl.load(pulled_ptr + i, mask=mask, other=0.0)
    tl.store(out_ptr + k * size + i, p - tl.load(rate_ptr + k * rate_stride) * g, mask=mask)


def sgd_step(p: Tensor, g: Tensor, rates: Tensor, pull: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """p and g `[K, n]`, rates `[K, 1]`; pull: the centre `[K, n]` or `[1, n]`, its strengths `[K, 1]`, and ones `[n]`
    where it pulls, zeros where not."""
    out = torch.empty_like(p)
    centre, strength, where = (p, rates, p) if pull is None else pull
    strides = 0 if centre.shape[0] == 1 else centre.stride(0), rates.stride(0), strength.stride(0)
    grid = (p.shape[0], triton.cdiv(p.shape[1], _BLOCK))
    _sgd[grid](
        p, g, centre, rates, strength, where, out, p.shape[1], *strides, PULL=pull is not None, BLOCK=_BLOCK
    )  # fmt: skip
    return out


@triton.jit
def _adam(
    p_ptr, g_ptr, m_ptr, v_ptr, p_out, m_out, v_out, rate_ptr, scale_ptr, size,
    ONE: tl.constexpr, TWO: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, at = i < size, k * size + i
    p, m, v = (tl.load(p_ptr + at, mask=mask), tl.load(m_ptr + at, mask=mask), tl.load(v_ptr + at, mask=mask))
    g = tl.load(g_ptr + at, mask=mask).to(p_ptr.dtype.element_ty)
    m += (1 - ONE) * (g - m)
    v += (1 - TWO) * (g * g - v)
    step = tl.load(rate_ptr + k) * m / (tl.sqrt(v) * tl.load(scale_ptr + k) + EPS)
    tl.store(p_out + at, p - step, mask=mask)
    tl.store(m_out + at, m, mask=mask)
    tl.store(v_out + at, v, mask=mask)


def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, rate: Tensor, scale: Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The new p, m and v, `[K, n]`: p − rate · m / (√v · scale + ε). rate and scale `[K]` hold the bias corrections."""
    out = torch.empty_like(p), torch.empty_like(p), torch.empty_like(p)
    grid = (p.shape[0], triton.cdiv(p.shape[1], _BLOCK))
    _adam[grid](p, g, m, v, *out, rate, scale, p.shape[1], ONE=betas[0], TWO=betas[1], EPS=eps, BLOCK=_BLOCK)
    return out


@triton.jit
def _keep(old_ptr, new_ptr, moves_ptr, size, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < size) & tl.load(moves_ptr + k)
    tl.store(old_ptr + k * size + i, tl.load(new_ptr + k * size + i, mask=mask, other=0.0), mask=mask)


def keep(old: Tensor, new: Tensor, moves: Tensor) -> None:
    """Writes the lanes of `new` `[K, n]` that move (bool `[K]`) over those of `old`."""
    grid = (old.shape[0], triton.cdiv(old.shape[1], _BLOCK))
    _keep[grid](old, new, moves, old.shape[1], BLOCK=_BLOCK)
