"""Lane-aware layers: the few that are trained or that mix samples.

Activations are `[K·B, ...]`, lane-major. A layer sees K in its own tensors: a tensor with one more dimension than the
layer's template holds lanes, any other is frozen and shared. Without lanes every layer is its ordinary torch
counterpart, so a module that holds one lane's values is a plain module. Layers share their model's `Context`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from .conv import lane_conv2d
from .front import Stem
from .ops import PLAIN, Ops, Statistics
from .random import fold, keep_mask, key_of

Norm = Literal["train", "batch", "running"]
"""How batch norm normalises: with the batch's statistics, which also update the running ones (train); with the batch's
statistics only (batch); with the running statistics (running)."""


class Slots:
    """Where the gradients of parameters belong.

    An operation may take a parameter's slot. It then writes the gradient there in the backward pass and gives autograd
    none. Only the first use of a parameter gets the slot; autograd adds up the gradients of any later use.
    """

    def __init__(self, params: Mapping[str, Tensor] | None = None, slots: Mapping[str, Tensor] | None = None) -> None:
        self._free = {id(params[n]): slot for n, slot in slots.items()} if params and slots else {}

    def take(self, parameter: Tensor) -> Tensor | None:
        """Returns the parameter's slot, or None where it has none or an earlier operation took it."""
        return self._free.pop(id(parameter), None)

    def is_free(self, parameter: Tensor) -> bool:
        return id(parameter) in self._free


@dataclass
class Context:
    """One per model, shared by its layers. `LaneModel` sets it: `ops` on a move to a device, the rest for each pass.

    norm: None means that the layer's own `train()` and `eval()` decide, as in a module used without lanes.
    """

    ops: Ops = PLAIN
    norm: Norm | None = None
    slots: Slots = field(default_factory=Slots)


Layer = TypeVar("Layer", bound=nn.Module)


def recast(layer: nn.Module, kind: type[Layer]) -> Layer:
    """Returns a layer of another class with the same settings, parameters and buffers."""
    new = kind.__new__(kind)
    new.__dict__ = {name: copy.copy(value) for name, value in layer.__dict__.items()}
    return new


def along(tensor: Tensor, y: Tensor, lanes: int, axis: int) -> Tensor:
    """Returns a per-feature tensor in a shape that broadcasts to y `[K·B, ...]`, its own axes at `axis` and after.

    lanes=1: the tensor is `[K, ...]`, and each sample gets its lane's; lanes=0: it is frozen and shared.
    """
    if lanes:
        tensor = tensor.repeat_interleave(y.shape[0] // tensor.shape[0], 0)
    own = tensor.shape[lanes:]
    after = 0 if axis < 0 else y.dim() - axis - len(own)
    before = y.dim() - lanes - len(own) - after
    return tensor.reshape(*tensor.shape[:lanes], *([1] * before), *own, *([1] * after))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x `[K·B, ..., in]` times a weight `[K, out, in]` plus a bias `[K, out]`, or frozen ones without K."""
    if weight.dim() == 2:
        y = F.linear(x, weight)
    else:
        rows = x.reshape(weight.shape[0], -1, x.shape[-1])
        y = torch.bmm(rows, weight.transpose(1, 2)).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + along(bias, y, bias.dim() - 1, -1)


class LaneLinear(nn.Linear):
    """A linear layer with weight `[K, out, in]` and bias `[K, out]`, or frozen ones without K."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class LaneConv2d(nn.Conv2d):
    """A convolution with weight `[K, O, I/groups, h, w]`, or a frozen one; an `adapter`, if any, follows it."""

    adapter: nn.Module | None
    context: Context

    @classmethod
    def of(cls, layer: nn.Conv2d) -> Self:
        new = recast(layer, cls)
        new.adapter, new.context = None, Context()
        return new

    def forward(self, x: Tensor) -> Tensor:
        ops = self.context.ops
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            y = self.uncommon(x)
        else:
            y = ops.frozen_conv(x, self) if self.weight.dim() == 4 else ops.conv(x, self)
        if self.bias is not None:
            y = y + along(self.bias, y, self.bias.dim() - 1, 1)
        if self.adapter is not None:
            y = self.adapter(y)
        return y

    def uncommon(self, x: Tensor) -> Tensor:
        """Convolves with groups, or with padding other than numbers of zeros. No kernel is made for these."""
        if self.weight.dim() == 4:
            return self._conv_forward(x, self.weight, None)  # type: ignore[no-any-return]
        sides, mode = self._reversed_padding_repeated_twice, self.padding_mode
        x = F.pad(x, sides, "constant" if mode == "zeros" else mode)
        return lane_conv2d(x, self.weight, self.stride, (0, 0), self.dilation, groups=self.groups)  # type: ignore[arg-type]


class LaneBatchNorm(nn.Module):
    """Batch norm over `[K·B, C, ...]` with statistics per lane.

    Each lane has its own running statistics `[K, C]`, even where weight and bias `[C]` are frozen.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps, self.momentum = eps, momentum
        self.context = Context()

    @classmethod
    def of(cls, layer: nn.modules.batchnorm._BatchNorm) -> Self:
        if layer.momentum is None or layer.running_mean is None or not layer.affine:
            raise ValueError("a batch norm without affine, running statistics or momentum has no lane-aware form")
        new = cls(layer.num_features, layer.eps, layer.momentum)
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var  # type: ignore[assignment]
        return new

    @property
    def statistics(self) -> Statistics:
        mode = self.context.norm or ("train" if self.training else "running")
        return Statistics(self.running_mean, self.running_var, mode, self.momentum, self.eps)

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        """Returns ReLU(norm(x) + add); the sum and the ReLU only where asked for."""
        return self.context.ops.norm(x, self, add, relu)

    def and_pool(self, x: Tensor | Stem, pool: nn.Module) -> Tensor:
        """Returns pool(ReLU(norm(x))); a `Stem` is pooled already."""
        ops = self.context.ops
        return ops.stem_norm(x, self) if isinstance(x, Stem) else ops.norm_and_pool(x, self, pool)


class LaneLayerNorm(nn.LayerNorm):
    """Layer norm with weight and bias `[K, *shape]`, or frozen ones."""

    def forward(self, x: Tensor) -> Tensor:
        own = len(self.normalized_shape)
        lanes = [t.shape[0] for t in (self.weight, self.bias) if t is not None and t.dim() > own]
        if not lanes:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        y = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        y = y.reshape(lanes[0], -1, *self.normalized_shape)
        weight, bias = (t if t is None or t.dim() == own else t.unsqueeze(1) for t in (self.weight, self.bias))
        return (y * weight if bias is None else torch.addcmul(bias, y, weight)).view(x.shape)


class LaneGroupNorm(nn.GroupNorm):
    """weight and bias `[K, C]`, or frozen ones."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, None, None, self.eps)
        return y * along(self.weight, y, self.weight.dim() - 1, 1) + along(self.bias, y, self.bias.dim() - 1, 1)


class LaneDropout(nn.Module):
    """Dropout whose draws are a hash of (the lane's key, this layer's salt, the element's place in its lane).

    `key`, int64 `[K]`, is passed in like a parameter; without lanes this is ordinary dropout.
    """

    key: Tensor

    def __init__(self, p: float, name: str = "") -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {p}")
        self.p, self.salt = p, key_of(name, "layer") & 0xFFFFFFFF
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.key.dim() == 0 or self.p == 0.0:
            return F.dropout(x, self.p, self.training)
        return _dropped(x, self.p, fold(self.key, self.salt))


def _dropped(x: Tensor, p: float, keys: Tensor) -> Tensor:
    """Returns x `[K·B, ...]` after dropout with the draws of the lanes' keys, int64 `[K]`."""
    keep = keep_mask(keys, x.numel() // keys.shape[0], p).view(x.shape)
    return x * keep * (1.0 / (1.0 - p))


class LanesInDropout(TorchFunctionMode):
    """Makes `F.dropout` in a network's own code draw from the lanes' keys, the n-th call of a pass with salt n.

    Without it, `F.dropout(x, p, self.training)` would do nothing, because a network with lanes stays in eval mode.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys, self.calls = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OTHER_DROPOUTS and kwargs["p"] > 0:
            raise InputError(f"F.{func.__name__} has no lane-aware form: use F.dropout, or p=0")
        if func is not F.dropout or kwargs["p"] == 0:
            return func(*args, **kwargs)
        (x,), self.calls = args, self.calls + 1
        y = _dropped(x, kwargs["p"], fold(self.keys, key_of("F.dropout", self.calls) & 0xFFFFFFFF))
        return x.copy_(y) if kwargs["inplace"] else y


OTHER_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


class ResidualAdapter(nn.Module):
    """`x + Conv1x1(Dropout(BN(x)))`, almost the identity when new. `Ops.adapter` computes it."""

    def __init__(self, channels: int, dropout: float, name: str) -> None:
        super().__init__()
        self.norm = LaneBatchNorm(channels)
        self.dropout = LaneDropout(dropout, f"{name}.dropout")
        conv = nn.Conv2d(channels, channels, 1, bias=False, device="meta")
        conv.weight = nn.Parameter(torch.zeros(channels, channels, 1, 1))  # drawn by adapt(), from its seed
        self.conv = LaneConv2d.of(conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.context.ops.adapter(x, self)
