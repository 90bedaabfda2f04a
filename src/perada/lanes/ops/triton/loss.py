"""Losses that compute their gradients in the forward pass."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plain import Ops
from .launch import launch

_ROWS = 16


@triton.jit
def _cross_entropy(logit_ptr, target_ptr, loss_ptr, grad_ptr, rows, classes, BR: tl.constexpr, BC: tl.constexpr):
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BC)
    mask = (r < rows)[:, None] & (c < classes)[None, :]
    at = r[:, None] * classes + c[None, :]
    x = tl.load(logit_ptr + at, mask=mask, other=float("-inf"))
    x = tl.where((r < rows)[:, None], x, 0.0)
    x -= tl.max(x, 1)[:, None]
    e = tl.exp(x)
    total = tl.sum(e, 1)
    hit = c[None, :] == tl.load(target_ptr + r, mask=r < rows, other=0)[:, None]
    tl.store(loss_ptr + r, tl.log(total) - tl.sum(tl.where(hit, x, 0.0), 1), mask=r < rows)
    tl.store(grad_ptr + at, e / total[:, None] - tl.where(hit, 1.0, 0.0), mask=mask)


class _Known(torch.autograd.Function):
    """Losses whose gradient with respect to the logits is already known."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: Tensor, grad: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (grad,) = ctx.saved_tensors
        return grad * g.unsqueeze(-1), None, None


def cross_entropy(ops: Ops, logits: Tensor, targets: Tensor) -> Tensor:
    """Computes `Ops.cross_entropy` with its gradient in one kernel."""
    x, targets, classes = logits.detach().contiguous(), targets.contiguous(), logits.shape[-1]
    losses, grad = x.new_empty(targets.shape), torch.empty_like(x)
    launch(
        _cross_entropy, (triton.cdiv(losses.numel(), _ROWS),), x, targets, losses, grad, losses.numel(), classes,
        BR=_ROWS, BC=triton.next_power_of_2(classes),
    )  # fmt: skip
    return _Known.apply(logits, losses, grad)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit
def _softmax(ptr, at, mask, inside, TEMPERATURE: tl.constexpr):
    """Computes softmax and log-softmax of rows of logits; rows outside of the tensor are zeros."""
    x = tl.where(inside, tl.load(ptr + at, mask=mask, other=-1e30), 0.0) / TEMPERATURE
    x -= tl.max(x, 1)[:, None]
    e = tl.exp(x)
    total = tl.sum(e, 1)[:, None]
    return e / total, x - tl.log(total)


@triton.jit
def _divergence(
    student_ptr, teacher_ptr, loss_ptr, grad_ptr, rows, classes, TEMPERATURE: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BC)
    inside = (r < rows)[:, None]
    mask, at = inside & (c < classes)[None, :], r[:, None] * classes + c[None, :]
    p, log_p = _softmax(teacher_ptr, at, mask, inside, TEMPERATURE)
    q, log_q = _softmax(student_ptr, at, mask, inside, TEMPERATURE)
    tl.store(loss_ptr + r, tl.sum(p * (log_p - log_q), 1) * TEMPERATURE * TEMPERATURE, mask=r < rows)
    tl.store(grad_ptr + at, (q - p) * TEMPERATURE, mask=mask)


def divergence(ops: Ops, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Computes `Ops.divergence` with its gradient in one kernel."""
    x, teacher, classes = student.detach().contiguous(), teacher.contiguous().to(student.dtype), student.shape[-1]
    losses, grad = x.new_empty(x.shape[:-1]), torch.empty_like(x)
    launch(
        _divergence, (triton.cdiv(losses.numel(), _ROWS),), x, teacher, losses, grad, losses.numel(), classes,
        TEMPERATURE=temperature, BR=_ROWS, BC=triton.next_power_of_2(classes),
    )  # fmt: skip
    return _Known.apply(student, losses, grad)  # type: ignore[no-any-return, no-untyped-call]
