"""Convolutions over one folded batch: K trained kernels in four ways, one frozen kernel in the form a GPU prefers.

Which way is fastest for trained kernels was measured with `python benchmarks/conv_kernels.py`. Its output is in
`benchmarks/`: `conv_kernels_cpu.json` (2 cores) and `conv_kernels_cuda.json` (one H200, eager). Nothing is tuned at run
time, so the choice depends on shapes only.

Frozen weights are rearranged once. On maps of at most 2×2, with tensor cores 4×4, a k×k kernel mostly multiplies
padding, so a dense product is faster. A 1×1 kernel is a product too. The stem's 7×7 of three channels with stride 2
becomes a 4×4 of twelve (blocks of 2×2 pixels) with stride 1, which suits tensor cores. Without tensor cores (float32)
a product of columns is faster than cuDNN on channels_last.
"""

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS = 256, 3 << 30  # limits of a product of columns on a GPU: pixels of the output map, bytes of columns
Kernel = Literal["loop", "grouped", "unfold", "columns"]  # of trained weights
Form = Literal["direct", "dense", "1x1", "stem", "columns"]  # of frozen weights


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


class Forms:
    """Frozen weights in other forms, made on first use and again if the weight changes."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Tensor]]] = WeakKeyDictionary()

    @torch.no_grad()
    def get(self, layer: nn.Conv2d, form: tuple[Any, ...], make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns `make(weight)` of the layer's weight."""
        weight, made = layer.weight, self._made.setdefault(layer, {})
        version = (weight.data_ptr(), weight._version, weight.dtype)
        if form not in made or made[form][0] != version:
            wide = make(weight.to(torch.promote_types(weight.dtype, torch.float32)))
            made[form] = (version, wide.to(weight.dtype))
        return made[form][1]


def best_form(x: Tensor, layer: nn.Conv2d) -> Form:
    """Returns the fastest form for these images. It depends on shapes, type and device only."""
    if not x.is_cuda or layer.weight.requires_grad or layer.dilation != (1, 1) or layer.groups != 1:
        return "direct"
    cores = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32)
    pixels, shape = x.shape[2] * x.shape[3], (layer.kernel_size, layer.padding, layer.stride)
    if pixels <= (16 if cores else 4):
        return "dense"
    if shape[:2] == ((1, 1), (0, 0)):
        return "1x1"
    if shape == ((7, 7), (3, 3), (2, 2)) and x.shape[1] == 3 and not (x.shape[2] | x.shape[3]) & 1:
        return "stem"
    fit = columns_fit(x, pixels, layer.kernel_size[0] * layer.kernel_size[1])  # the output is no larger
    return "columns" if fit and not cores and layer.stride[0] == layer.stride[1] else "direct"


def dense_conv2d(x: Tensor, layer: nn.Conv2d, forms: Forms) -> Tensor:
    """Returns the convolution as a product of whole maps with one matrix."""

    def make(weight: Tensor) -> Tensor:
        """Returns a matrix `[H·W·I, H'·W'·O]`."""
        inputs = x.shape[1] * x.shape[2] * x.shape[3]
        each = torch.eye(inputs, dtype=weight.dtype, device=weight.device).view(inputs, *x.shape[2:], -1)
        made = F.conv2d(each.permute(0, 3, 1, 2), weight, None, layer.stride, layer.padding)
        return made.permute(0, 2, 3, 1).flatten(1)

    matrix = forms.get(layer, ("dense", *x.shape[2:]), make)
    out = out_size(x, layer.weight, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
    y = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1) @ matrix
    return y.view(x.shape[0], *out, -1).permute(0, 3, 1, 2)


class _Strided(torch.autograd.Function):
    """Every n-th row and column of channels_last maps `[n, H, W, C]`; autograd's own slices would fill zeros twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: int, right: int) -> Tensor:
        ctx.shape, ctx.steps = x.shape, (down, right)
        return x[:, ::down, ::right].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        dx = g.new_zeros(ctx.shape)
        dx[:, :: ctx.steps[0], :: ctx.steps[1]] = g
        return dx, None, None


def strided_conv1x1(x: Tensor, layer: nn.Conv2d, forms: Forms) -> Tensor:
    """Returns a 1×1 convolution as a product of the pixels it reads; cuDNN would transpose channels_last twice."""
    matrix = forms.get(layer, ("1x1",), lambda weight: weight.flatten(1).t().contiguous())
    pixels: Tensor = _Strided.apply(x.permute(0, 2, 3, 1), *layer.stride)  # type: ignore[no-untyped-call]
    return (pixels.flatten(0, 2) @ matrix).view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)


def stem_weight(layer: nn.Conv2d, forms: Forms) -> Tensor:
    """Returns the stem's weight for images in `blocks`."""

    def make(weight: Tensor) -> Tensor:
        """Returns `[O, 16, 4, 4]`: the kernel behind a row and a column of zeros, in blocks of 2×2. The last four
        channels are zeros, as tensor cores prefer 16 channels."""
        made = F.pad(F.pixel_unshuffle(F.pad(weight, (1, 0, 1, 0)), 2), (0, 0, 0, 0, 0, 4))
        return made.contiguous(memory_format=torch.channels_last)

    return forms.get(layer, ("stem",), make)


def blocks(x: Tensor) -> Tensor:
    """Returns `[n, 3, H, W]` in blocks of 2×2 pixels, `pixel_unshuffle` as channels: `[n, 16, H/2 + 3, W/2 + 3]`, with
    zeros for two blocks above and left, one below and right, and the last four channels."""
    made = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1, 0, 4))
    return made.contiguous(memory_format=torch.channels_last)
