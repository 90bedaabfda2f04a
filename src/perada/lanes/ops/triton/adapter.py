"""The adapter `x + dropout(norm(x)) Wᵀ` over lanes.

With few channels the product is cheap, and reading and writing maps takes the time: then one kernel applies the norm
and computes the product. With many channels a library computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plain import Ops
from .launch import launch, on_side_stream
from .norm import Drop, Saved, Settings, dropout, fits, gradients, normed, stride_of, unslotted
from .tiles import WHOLE, kept, lane_values, mixed, take_statistics, tiles, wide

if TYPE_CHECKING:
    from ...layers import ResidualAdapter


@triton.jit
def _adapted(
    x_ptr, y_ptr, z_ptr, matrix_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr,
    key_ptr, rows, pixels, stride, matrix_stride, running_stride, salt, threshold,
    SCALE: tl.constexpr, DROP: tl.constexpr, POWER: tl.constexpr, EPS: tl.constexpr, RUNNING: tl.constexpr,
    SAVE: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes y = x + z Wᵀ for a block of rows. z = dropout(norm(x)) is stored for a backward pass (SAVE)."""
    k = tl.program_id(0).to(tl.int64)
    r, c = tl.program_id(1) * BR + tl.arange(0, BR), tl.arange(0, C)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    lane, at = k * rows * C, r[:, None] * C + c[None, :]
    x = tl.load(x_ptr + lane + at, mask=mask, other=0.0)
    matrix = tl.load(matrix_ptr + k * matrix_stride + c[:, None] * C + c[None, :])
    weight, bias = lane_values(weight_ptr, bias_ptr, k, c, c < C, stride, ACC)
    if RUNNING:
        mean, var = lane_values(running_mean_ptr, running_var_ptr, k, c, c < C, running_stride, ACC)
        rstd = 1.0 / tl.sqrt(var + EPS)
    else:
        mean, rstd = lane_values(mean_ptr, rstd_ptr, k, c, c < C, C, ACC)
    z = (x.to(ACC) - mean[None, :]) * (rstd * weight)[None, :] + bias[None, :]
    if DROP:
        z = tl.where(kept(mixed(tl.load(key_ptr + k) + salt), r, c, C, pixels, threshold, POWER), z * SCALE, 0.0)
    z = z.to(x.dtype)
    if SAVE:
        tl.store(z_ptr + lane + at, z, mask=mask)
    y = tl.dot(z, tl.trans(matrix)) + x.to(ACC)
    tl.store(y_ptr + lane + at, y.to(x.dtype), mask=mask)


FEW = (16, 32, 64, 128)  # channels
TYPES = {torch.bfloat16}  # those that tensor cores take directly


def _at_once(
    x: Tensor, weight: Tensor, bias: Tensor, matrix: Tensor, settings: Settings, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns y, z (only if `save`), mean and 1/σ."""
    running, cut = settings.running, tiles(x, matrix.shape[0], sums=False)
    acc, dtype = wide(x)
    mean = torch.empty(cut.lanes, cut.channels, dtype=dtype, device=x.device)
    rstd, y = torch.empty_like(mean), torch.empty_like(x)
    if running.mode != "running":
        take_statistics(x, mean, rstd, running, cut)
    keys, salt, threshold, scale = dropout(settings.drop, x)
    z = torch.empty_like(x) if save else y
    launch(
        _adapted, (cut.lanes, triton.cdiv(cut.rows, 64)),
        x, y, z, matrix, weight, bias, mean, rstd, running.mean, running.var, keys,
        cut.rows, cut.pixels, stride_of(weight), matrix.stride(0), running.mean.stride(0), salt, threshold,
        SCALE=scale, DROP=settings.drop is not None, POWER=cut.power, EPS=running.eps,
        RUNNING=running.mode == "running", SAVE=save, ACC=acc, BR=64, C=cut.channels, num_warps=4,
    )  # fmt: skip
    return y, z, mean, rstd


class _Adapter(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, matrix: Tensor, settings: Settings
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        rows, save = x.numel() // x.shape[1] // matrix.shape[0], any(ctx.needs_input_grad)
        if x.shape[1] in FEW and x.dtype in TYPES and (rows > WHOLE or not save):
            y, z, mean, rstd = _at_once(x, weight, bias, matrix, settings, save)
        else:
            y = torch.empty_like(x)  # gets a copy of x, to which the product is added; baddbmm would make its own
            z, mean, rstd = normed(x, weight, bias, settings, copy=y)
            _rows(y, matrix).baddbmm_(_rows(z, matrix), matrix.transpose(1, 2))
        ctx.save_for_backward(x, z, weight, bias, mean, rstd, matrix)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Computes all gradients. The matrix's is needed late: with a slot, it is computed on the side stream."""
        x, z, weight, bias, mean, rstd, matrix = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        rows, slot = _rows(g, matrix), ctx.settings.slots[2]
        if slot is None:
            dmatrix = torch.bmm(rows.transpose(1, 2), _rows(z, matrix))
        else:
            dmatrix = slot
            with on_side_stream(g, z):
                torch.bmm(rows.transpose(1, 2), _rows(z, matrix), out=slot)
        dz = _image(torch.bmm(rows, matrix), x)
        dx, _, affine = gradients(dz, Saved(x, x, weight, bias, mean, rstd), ctx.settings, extra=g)
        return dx, *unslotted((*affine, dmatrix), ctx.settings.slots, ctx.needs_input_grad[1:4]), None


def _rows(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns channels_last `[K·B, C, H, W]` as `[K, R, C]`, a view."""
    return x.permute(0, 2, 3, 1).reshape(matrix.shape[0], -1, x.shape[1])


def _image(rows: Tensor, like: Tensor) -> Tensor:
    n, _, height, width = like.shape
    return rows.view(n, height, width, -1).permute(0, 3, 1, 2)


def adapter(ops: Ops, x: Tensor, adapter: ResidualAdapter) -> Tensor:
    """Computes `Ops.adapter` with norm, dropout and sum in one kernel, or together with the product."""
    norm, drop, matrix = adapter.norm, adapter.dropout, adapter.conv.weight  # [K, C, C, 1, 1]
    if matrix.dim() != 5 or not fits(norm, x.shape):
        return Ops.adapter(ops, x, adapter)
    take = norm.context.slots.take
    slot, affine = take(matrix), (norm.weight, norm.bias)
    active = Drop(drop.key, drop.salt, drop.p) if drop.key.dim() and drop.p else None
    slots = (*map(take, affine), None if slot is None else slot.flatten(2))
    y: Tensor = _Adapter.apply(x, *affine, matrix.flatten(2), Settings(norm.statistics, drop=active, slots=slots))  # type: ignore[no-untyped-call]
    return y
