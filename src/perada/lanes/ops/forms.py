"""A frozen convolution in forms that a GPU prefers, with weights that are rearranged once.

On maps of at most 2×2, with tensor cores 4×4, a k×k kernel mostly multiplies padding: a dense product is faster. A 1×1
is a product too. The stem's 7×7 of three channels, stride 2, becomes a 4×4 of twelve (blocks of 2×2 pixels), stride 1,
which suits tensor cores. Without tensor cores (float32) a product of columns is faster than cuDNN on channels_last.
"""

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conv import columns_fit, out_size

Form = Literal["direct", "dense", "1x1", "stem", "columns"]


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
