"""K convolutions over K groups of images as one batched product of the weights with columns of pixels.

Maps are channels_last, and so are weights in a flat state (`State.flat`), so neither they nor their gradients are
transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...conv import Kernel, best_form, uses_columns
from ..plain import Ops
from .launch import launch
from .tiles import wide

if TYPE_CHECKING:
    from ...layers import LaneConv2d

_BLOCK = 64  # pixels per program


@triton.jit
def _columns(
    x_ptr, out_ptr, rows, channels, length, height, width, out_height, out_width, stride, top, left,
    WIDE: tl.constexpr, TAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copies pixels into columns. Row r is an output pixel; its columns are taps × channels, then zeros up to `length`.
    `top` and `left` say how far the first tap is outside of the map."""
    r, c = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (r < rows)[:, None] & (c < channels)[None, :]
    image, row, column = r // (out_height * out_width), r // out_width % out_height, r % out_width
    for tap in range(TAPS):
        i, j = row * stride - top + tap // WIDE, column * stride - left + tap % WIDE
        there = ((i >= 0) & (i < height) & (j >= 0) & (j < width))[:, None] & mask
        at = ((image * height + i) * width + j)[:, None] * channels + c[None, :]
        value = tl.load(x_ptr + at, mask=there, other=0.0)
        tl.store(out_ptr + r[:, None] * length + tap * channels + c[None, :], value, mask=mask)
    if length > TAPS * channels:
        q = TAPS * channels + tl.arange(0, 8)
        rest = (r < rows)[:, None] & (q < tl.where(tl.program_id(1) == 0, length, 0))[None, :]
        tl.store(out_ptr + r[:, None] * length + q[None, :], tl.zeros([BR, 8], out_ptr.dtype.element_ty), mask=rest)


@triton.jit
def _folded(
    columns_ptr, out_ptr, rows, channels, length, height, width, out_height, out_width, stride, top, left,
    WIDE: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of `_columns`: a row is an input pixel, which sums all columns that it is in."""
    r, c = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (r < rows)[:, None] & (c < channels)[None, :]
    image, row, column = r // (height * width), r // width % height, r % width
    total = tl.zeros([BR, BC], ACC)
    for tap in range(TAPS):
        i, j = row + top - tap // WIDE, column + left - tap % WIDE
        whole = (i >= 0) & (j >= 0) & (i % stride == 0) & (j % stride == 0)
        there = (whole & (i // stride < out_height) & (j // stride < out_width))[:, None] & mask
        source = (image * out_height + i // stride) * out_width + j // stride
        at = source[:, None] * length + tap * channels + c[None, :]
        total += tl.load(columns_ptr + at, mask=there, other=0.0).to(ACC)
    tl.store(out_ptr + r[:, None] * channels + c[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


class _Window(NamedTuple):
    """The taps of a kernel that ever meet a pixel, and where: on a map of 1×1 only the middle one does."""

    taps: tuple[slice, slice]
    size: tuple[int, int]  # of the taps
    top: int
    left: int
    out: tuple[int, int]
    stride: int

    @classmethod
    def of(cls, shape: torch.Size, kernel: torch.Size, stride: int, padding: tuple[int, int]) -> _Window:
        out = tuple((n + 2 * p - k) // stride + 1 for n, k, p in zip(shape, kernel, padding, strict=True))
        first = [max(0, p - (o - 1) * stride) for p, o in zip(padding, out, strict=True)]
        end = [min(k, n + p) for n, k, p in zip(shape, kernel, padding, strict=True)]
        sizes = [b - a for a, b in zip(first, end, strict=True)]
        if sizes != [1, 1]:  # other parts would be copies
            first, end = [0, 0], list(kernel)
        taps = slice(first[0], end[0]), slice(first[1], end[1])
        size = end[0] - first[0], end[1] - first[1]
        return cls(taps, size, padding[0] - first[0], padding[1] - first[1], (out[0], out[1]), stride)

    def length(self, channels: int) -> int:
        """Returns the length of a row of columns: tensor cores need a multiple of 8."""
        return -(-channels * self.size[0] * self.size[1] // 8) * 8

    def matrix(self, weight: Tensor) -> Tensor:
        """Returns `[K, O, I, h, w]` as `[K, O, length]`: a view if it is channels last and needs no zeros."""
        matrix = weight.permute(0, 1, 3, 4, 2)[:, :, *self.taps].flatten(2)
        rest = self.length(weight.shape[2]) - matrix.shape[2]
        return F.pad(matrix, (0, rest)) if rest else matrix

    def launch(self, kernel: Any, source: Tensor, out: Tensor, x: Tensor, rows: int, **more: Any) -> None:
        channels, height, width = x.shape[1:]
        across = min(64, triton.next_power_of_2(channels))
        launch(
            kernel, (triton.cdiv(rows, _BLOCK), triton.cdiv(channels, across)),
            source, out, rows, channels, self.length(channels), height, width, *self.out, self.stride, self.top,
            self.left, WIDE=self.size[1], TAPS=self.size[0] * self.size[1], BR=_BLOCK, BC=across, **more,
        )  # fmt: skip


class _LaneConv(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, window: _Window, slot: Tensor | None
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        lanes, images, (down, right) = weight.shape[0], x.shape[0], window.out
        rows = images * down * right
        columns = torch.empty(lanes, rows // lanes, window.length(x.shape[1]), dtype=x.dtype, device=x.device)
        window.launch(_columns, x, columns, x, rows)
        y = torch.bmm(columns, window.matrix(weight).transpose(1, 2))
        ctx.save_for_backward(columns if ctx.needs_input_grad[1] else None, weight)
        ctx.window, ctx.slot, ctx.like = window, slot, x.shape
        return y.view(images, down, right, -1).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        columns, weight = ctx.saved_tensors
        window, lanes = ctx.window, weight.shape[0]
        rows = g.permute(0, 2, 3, 1).reshape(lanes, -1, weight.shape[1])
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            written = torch.zeros_like(weight) if ctx.slot is None else ctx.slot  # a slot begins with zeros
            into, length = window.matrix(written), window.size[0] * window.size[1] * weight.shape[2]
            view = into.data_ptr() == written.data_ptr() or window.size == (1, 1)
            if view and into.shape[2] == length:
                torch.bmm(rows.transpose(1, 2), columns, out=into)
            else:
                made = torch.bmm(rows.transpose(1, 2), columns)[:, :, :length].unflatten(2, (*window.size, -1))
                written.permute(0, 1, 3, 4, 2)[:, :, *window.taps].copy_(made)
            dweight = written if ctx.slot is None else None
        if ctx.needs_input_grad[0]:
            dcolumns = torch.bmm(rows, window.matrix(weight))
            dx = torch.empty(ctx.like, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
            window.launch(_folded, dcolumns, dx, dx, dx.numel() // dx.shape[1], ACC=wide(dx)[0])
        return dx, dweight, None, None


def product(x: Tensor, weight: Tensor, layer: nn.Conv2d, slot: Tensor | None = None) -> Tensor:
    """Returns x `[K·B, I, H, W]` convolved with weight `[K, O, I, h, w]`: `[K·B, O, H', W']`."""
    window = _Window.of(x.shape[2:], weight.shape[3:], layer.stride[0], layer.padding)  # type: ignore[arg-type]
    y: Tensor = _LaneConv.apply(x, weight, window, slot)  # type: ignore[no-untyped-call]
    return y


def conv(ops: Ops, x: Tensor, layer: LaneConv2d, kernel: Kernel | None = None) -> Tensor:
    """Computes `Ops.conv`, as a product of columns where that is fastest."""
    if not uses_columns(x, layer, kernel):
        return Ops.conv(ops, x, layer, kernel)
    return product(x, layer.weight, layer, layer.context.slots.take(layer.weight))


def frozen_conv(ops: Ops, x: Tensor, layer: nn.Conv2d) -> Tensor:
    """Computes `Ops.frozen_conv`, as a product of columns where that is fastest."""
    if best_form(x, layer) != "columns":
        return Ops.frozen_conv(ops, x, layer)
    return product(x, layer.weight.unsqueeze(0), layer)
