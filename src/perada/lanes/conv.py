"""K different k×k convolutions over one folded batch, in four ways, and the table that chooses one.

The table was measured with `python benchmarks/conv_kernels.py`. Its output is in `benchmarks/`:
`conv_kernels_cpu.json` (2 cores) and `conv_kernels_cuda.json` (one H200, eager). Nothing is tuned at run time, so the
choice depends on shapes only.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS = 256, 3 << 30  # limits of a product of columns on a GPU: pixels of the output map, bytes of columns
Kernel = Literal["loop", "grouped", "unfold", "columns"]


def choose(device: str, inputs: int, outputs: int, out_pixels: int) -> Kernel:
    """Returns the fastest way for a device, channels and output size (pixels of one map).

    CPU: wide layers on maps of at most 2×2 are one batched product (most taps of a kernel would multiply padding).
    Large maps and other wide layers are K ordinary convolutions. Everything between is one grouped convolution (on
    average 2.4% slower than the fastest). CUDA: products of columns, in a step of 16 ResNet-18s on images of 32 pixels
    2.4 times as fast as grouped; not on large maps, where columns would need too much memory.
    """
    if device == "cuda":
        return "columns" if out_pixels <= COLUMNS[0] else "grouped"
    if out_pixels <= 4 and inputs * outputs >= 128 * 256:
        return "unfold"
    return "loop" if out_pixels >= 256 or outputs >= 256 else "grouped"


def columns_fit(x: Tensor, out_pixels: int, taps: int) -> bool:
    """Returns whether the columns fit in memory. They hold, per pixel of the output, what the kernel's taps see."""
    size = x.shape[0] * out_pixels * taps * x.shape[1] * x.element_size()
    return out_pixels <= COLUMNS[0] and size <= COLUMNS[1]


def out_size(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Returns height and width of the maps that a convolution gives."""
    taps = [dilation[i] * (weight.shape[-2:][i] - 1) for i in (0, 1)]
    down, right = ((x.shape[2 + i] + 2 * padding[i] - taps[i] - 1) // stride[i] + 1 for i in (0, 1))
    return down, right


def uses_columns(x: Tensor, layer: nn.Conv2d, kernel: Kernel | None = None) -> bool:
    """Returns whether a product of columns is the fastest way for this convolution of lanes, and fits in memory."""
    weight, stride, padding = layer.weight, layer.stride, layer.padding
    one_tap = weight.shape[3:] == (1, 1) and padding == (0, 0)
    if weight.shape[0] == 1 or one_tap or stride[0] != stride[1] or layer.dilation != (1, 1) or layer.groups != 1:
        return False
    down, right = out_size(x, weight, stride, padding, layer.dilation)  # type: ignore[arg-type]
    kernel = kernel or choose(x.device.type, weight.shape[2], weight.shape[1], down * right)
    return kernel == "columns" and columns_fit(x, down * right, weight.shape[3] * weight.shape[4])


def lane_conv2d(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    kernel: Kernel | None = None,
    groups: int = 1,
) -> Tensor:
    """Returns lane k's images convolved with lane k's weight.

    x `[K·B, I, H, W]`, weight `[K, O, I/groups, h, w]` -> `[K·B, O, H', W']`. In plain torch "columns" is "grouped".
    """
    lanes = weight.shape[0]
    if lanes == 1:
        return F.conv2d(x, weight[0], None, stride, padding, dilation, groups)
    if groups > 1:
        kernel = "grouped"
    elif weight.shape[3:] == (1, 1) and padding == (0, 0):
        return lane_conv1x1(x[:, :, :: stride[0], :: stride[1]], weight.flatten(2))
    out = out_size(x, weight, stride, padding, dilation)
    kernel = kernel or choose(x.device.type, weight.shape[2], weight.shape[1], out[0] * out[1])
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


def lane_conv1x1(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x `[K·B, I, H, W]` times weight `[K, O, I]`, as one batched product over `[K, B·H·W, I]`."""
    lanes, (height, width) = weight.shape[0], x.shape[2:]
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        rows = x.permute(0, 2, 3, 1).reshape(lanes, -1, x.shape[1])
        y = torch.bmm(rows, weight.transpose(1, 2))
        return y.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2)
    y = torch.einsum("koi,kbip->kbop", weight, x.reshape(lanes, -1, x.shape[1], height * width))
    return y.reshape(x.shape[0], -1, height, width)
