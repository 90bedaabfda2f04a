"""K different k×k convolutions over one folded batch, four ways, and the table that says which.

The table was measured with `python benchmarks/conv_kernels.py`; what it printed is kept beside it as
`conv_kernels_cpu.json` (2 cores) and `conv_kernels_cuda.json` (one H200, eager). Nothing is tuned at run time, so a
run's kernels depend on its shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fast import fast_kernels

COLUMNS = 256, 3 << 30  # pixels of the largest map that is cut into columns on a GPU, and bytes of columns
Kernel = Literal["loop", "grouped", "unfold", "columns"]


def choose(device: str, inputs: int, outputs: int, out_pixels: int) -> Kernel:
    """The fastest kernel by device, channels and output size (pixels of one map).

    CPU: wide layers on maps of at most 2×2 are one batched product (most taps of a kernel would multiply
    padding); large maps and other wide layers are K ordinary convolutions; everything between is one grouped
    convolution (2.4% behind the fastest kernel on average). CUDA: products of columns, 2.4 times as fast as grouped in
    a step of 16 ResNet-18s on images of 32 pixels; not on large maps, where columns would take much memory.
    """
    if device == "cuda":
        return "columns" if out_pixels <= COLUMNS[0] else "grouped"
    if out_pixels <= 4 and inputs * outputs >= 128 * 256:
        return "unfold"
    return "loop" if out_pixels >= 256 or outputs >= 256 else "grouped"


def columns_fit(x: Tensor, out_pixels: int, taps: int) -> bool:
    """Whether the columns of these images take little enough memory: for every pixel of the output, what the kernel's
    taps see."""
    size = x.shape[0] * out_pixels * taps * x.shape[1] * x.element_size()
    return out_pixels <= COLUMNS[0] and size <= COLUMNS[1]


def lane_conv2d(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    kernel: Kernel | None = None,
    groups: int = 1,
) -> Tensor:
    """Lane k's images with lane k's weights.

    x `[K·B, I, H, W]`, weight `[K, O, I/groups, h, w]` -> `[K·B, O, H', W']`.
    """
    lanes = weight.shape[0]
    if lanes == 1:
        return F.conv2d(x, weight[0], None, stride, padding, dilation, groups)
    if groups > 1:
        kernel = "grouped"
    elif weight.shape[3:] == (1, 1) and padding == (0, 0):
        return lane_conv1x1(x[:, :, :: stride[0], :: stride[1]], weight.flatten(2))
    out = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[3 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    kernel = kernel or choose(x.device.type, weight.shape[2], weight.shape[1], out[0] * out[1])
    usual = stride[0] == stride[1] and dilation == (1, 1)
    few = kernel == "columns" and columns_fit(x, out[0] * out[1], weight.shape[3] * weight.shape[4])
    kernels = fast_kernels(x.device) if usual and few else None
    if kernels is not None:
        return kernels.lane_conv(x, weight, stride[0], padding)  # type: ignore[no-any-return]
    if kernel == "loop":
        parts = zip(x.chunk(lanes), weight.unbind(), strict=True)
        return torch.cat([F.conv2d(a, w, None, stride, padding, dilation) for a, w in parts])
    batch = x.shape[0] // lanes
    if kernel in ("grouped", "columns"):
        folded = x.reshape(lanes, batch, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        y = F.conv2d(folded, weight.flatten(0, 1), None, stride, padding, dilation, lanes * groups)
        return y.view(batch, lanes, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)
    columns = F.unfold(x, (weight.shape[3], weight.shape[4]), dilation, padding, stride)
    columns = columns.view(lanes, batch, *columns.shape[1:])  # [K, B, I·h·w, H'·W']
    y = torch.einsum("koi,kbip->kbop", weight.flatten(2), columns)
    return y.reshape(x.shape[0], -1, out[0], out[1])


def frozen_conv2d(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """The layer's convolution with its one, frozen, kernel.

    On a GPU some shapes have a better form, with weights rearranged once. On maps of at most 2×2, with matrix units
    4×4, a kernel that mostly multiplies padding is a dense product. A 1×1 is a product, too. The stem's 7×7 of three
    channels, stride 2, is a 4×4 of twelve (blocks of 2×2 pixels), stride 1, which matrix units take to. Without matrix
    units (float32) a product of columns beats what cuDNN has for channels_last.
    """
    if x.is_cuda and not layer.weight.requires_grad and layer.dilation == (1, 1):
        units = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)
        if x.shape[2] * x.shape[3] <= (16 if units else 4):
            return dense_conv2d(x, layer)
        shape = layer.kernel_size, layer.padding, layer.stride
        if shape[:2] == ((1, 1), (0, 0)):
            return strided_conv1x1(x, layer)
        if shape == ((7, 7), (3, 3), (2, 2)) and x.shape[1] == 3 and not (x.shape[2] | x.shape[3]) & 1:
            return stem_conv2d(x, layer)
        few = columns_fit(x, x.shape[2] * x.shape[3], shape[0][0] * shape[0][1])  # the output is no larger
        kernels = fast_kernels(x.device) if few and not units else None
        if kernels is not None and layer.stride[0] == layer.stride[1]:
            return kernels.lane_conv(x, layer.weight.unsqueeze(0), layer.stride[0], layer.padding)  # type: ignore[no-any-return]
    return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation)


def dense_conv2d(x: Tensor, layer: nn.Conv2d) -> Tensor:
    def rearranged(weight: Tensor) -> Tensor:
        """A matrix `[H·W·I, H'·W'·O]`."""
        inputs = x.shape[1] * x.shape[2] * x.shape[3]
        each = torch.eye(inputs, dtype=weight.dtype, device=weight.device).view(inputs, *x.shape[2:], -1)
        made = F.conv2d(each.permute(0, 3, 1, 2), weight, None, layer.stride, layer.padding)
        return made.permute(0, 2, 3, 1).flatten(1)

    matrix = _once(layer, ("dense", *x.shape[2:]), rearranged)
    kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
    out = [(x.shape[2 + i] + 2 * int(padding[i]) - kernel[i]) // stride[i] + 1 for i in (0, 1)]
    y = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1) @ matrix
    return y.view(x.shape[0], *out, -1).permute(0, 3, 1, 2)


class _EverySo(torch.autograd.Function):
    """Every so many rows and columns of channels_last maps `[n, H, W, C]`; autograd's own slices would fill twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: int, right: int) -> Tensor:
        ctx.shape, ctx.steps = x.shape, (down, right)
        return x[:, ::down, ::right].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        dx = g.new_zeros(ctx.shape)
        dx[:, :: ctx.steps[0], :: ctx.steps[1]] = g
        return dx, None, None


def strided_conv1x1(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """The pixels that count, and one product: what cuDNN does instead turns channels_last around and back."""
    matrix = _once(layer, ("1x1",), lambda weight: weight.flatten(1).t().contiguous())
    taken: Tensor = _EverySo.apply(x.permute(0, 2, 3, 1), *layer.stride)  # type: ignore[no-untyped-call]
    return (taken.flatten(0, 2) @ matrix).view(*taken.shape[:3], -1).permute(0, 3, 1, 2)


def stem_conv2d(x: Tensor, layer: nn.Conv2d) -> Tensor:
    def rearranged(weight: Tensor) -> Tensor:
        """`[O, 16, 4, 4]`: the kernel with a row and a column of zeros before it, in blocks of 2×2; zeros for the last
        four channels, as 16 is a number that matrix units like."""
        blocks = F.pad(F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2), (0, 0, 0, 0, 0, 4))
        return blocks.contiguous(memory_format=torch.channels_last)

    weight = _once(layer, ("stem",), rearranged)
    kernels = None if x.requires_grad else fast_kernels(x.device)
    if kernels is not None:
        return F.conv2d(kernels.blocks(x), weight)
    blocks = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1, 0, 4)).contiguous(memory_format=torch.channels_last)
    return F.conv2d(blocks, weight)


@torch.no_grad()
def _once(layer: nn.Conv2d, form: tuple[Any, ...], rearranged: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer's frozen weight in another form, kept with the layer."""
    weight = layer.weight
    stamp = (weight.data_ptr(), weight._version, weight.dtype)
    kept: dict[Any, tuple[Any, Tensor]] = layer.__dict__.setdefault("rearranged", {})
    if form not in kept or kept[form][0] != stamp:
        made = rearranged(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        kept[form] = (stamp, made.to(weight.dtype))
    return kept[form][1]


def lane_conv1x1(x: Tensor, weight: Tensor) -> Tensor:
    """x `[K·B, I, H, W]`, weight `[K, O, I]`: one batched product over `[K, B·H·W, I]`."""
    lanes, (height, width) = weight.shape[0], x.shape[2:]
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        rows = x.permute(0, 2, 3, 1).reshape(lanes, -1, x.shape[1])
        y = torch.bmm(rows, weight.transpose(1, 2))
        return y.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2)
    y = torch.einsum("koi,kbip->kbop", weight, x.reshape(lanes, -1, x.shape[1], height * width))
    return y.reshape(x.shape[0], -1, height, width)
