"""Lane-aware layers: the few that are trained or that mix samples.

Activations are `[K·B, ...]`, lane-major. A layer learns K from its own tensors: a tensor with one more
dimension than the layer's template carries lanes, one without is frozen and shared. With no lanes at all
every layer is its ordinary torch counterpart, so a module with one lane loaded is a plain module.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conv import frozen_conv2d, lane_conv2d
from .fast import fast_kernels
from .random import fold, keep_mask, key_of
from .stem import Stem

Norm = Literal["train", "batch", "running"]
"""How batch norm normalises: with the batch's statistics and keep running ones (train), with the batch's
and keep nothing (batch), with the running ones (running)."""


def by_lane(x: Tensor, lanes: int) -> Tensor:
    """`[K·B, ...]` -> `[K, B, ...]`."""
    return x.reshape(lanes, -1, *x.shape[1:])


def along(tensor: Tensor, y: Tensor, lanes: int, axis: int) -> Tensor:
    """A per-feature tensor, shaped to combine with y `[K·B, ...]`, its own axes at `axis` and after.

    lanes=1: tensor is `[K, ...]` and each lane's samples get their lane's; lanes=0: it is frozen and shared.
    """
    if lanes:
        tensor = tensor.repeat_interleave(y.shape[0] // tensor.shape[0], 0)
    own = tensor.shape[lanes:]
    after = 0 if axis < 0 else y.dim() - axis - len(own)
    before = y.dim() - lanes - len(own) - after
    return tensor.reshape(*tensor.shape[:lanes], *([1] * before), *own, *([1] * after))


class LaneLinear(nn.Linear):
    """weight `[K, out, in]` and bias `[K, out]`, or frozen ones without K."""

    @classmethod
    def of(cls, layer: nn.Linear) -> LaneLinear:
        new = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            y = F.linear(x, self.weight)
        else:
            rows = x.reshape(self.weight.shape[0], -1, x.shape[-1])
            y = torch.bmm(rows, self.weight.transpose(1, 2)).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + along(self.bias, y, self.bias.dim() - 1, -1)


class LaneConv2d(nn.Conv2d):
    """weight `[K, O, I/groups, h, w]` or frozen; an `adapter`, if there is one, is applied to the output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: nn.Module | None = None

    @classmethod
    def of(cls, layer: nn.Conv2d) -> LaneConv2d:
        new = cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            bias=layer.bias is not None,
            padding_mode=layer.padding_mode,
            device="meta",
        )
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        if self.groups > 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            y = self.uncommon(x)
        elif self.weight.dim() == 4:
            y = frozen_conv2d(x, self)
        else:
            y = lane_conv2d(x, self.weight, self.stride, self.padding, self.dilation)  # type: ignore[arg-type]
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

    Running statistics `[K, C]` are a lane's own even where weight and bias `[C]` are frozen.
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
        self.mode: Norm = "train"

    @classmethod
    def of(cls, layer: nn.modules.batchnorm._BatchNorm) -> LaneBatchNorm:
        if layer.momentum is None or layer.running_mean is None or not layer.affine:
            raise ValueError("a batch norm without affine, running statistics or momentum has no lane-aware form")
        new = cls(layer.num_features, layer.eps, layer.momentum)
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var  # type: ignore[assignment]
        return new

    def train(self, mode: bool = True) -> LaneBatchNorm:
        self.mode = "train" if mode else "running"
        return super().train(mode)

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        """ReLU(norm(x) + add), as far as that is asked for."""
        kernels = self.kernels(x.shape, x.device)
        if kernels is not None:
            affine = self.weight, self.bias
            return kernels.lane_norm(x, affine, self.statistics(kernels), add=add, relu=relu)  # type: ignore[no-any-return]
        y = self._by_lane(x)
        y = y if add is None else y + add
        return F.relu(y) if relu else y

    def kernels(self, shape: torch.Size, device: torch.device) -> ModuleType | None:
        """The GPU kernels, where there are lanes to work on and, with running statistics, no gradient to take."""
        if self.running_mean.dim() != 2 or len(shape) != 4 or (self.mode == "running" and torch.is_grad_enabled()):
            return None
        return fast_kernels(device)

    def statistics(self, kernels: ModuleType) -> Any:
        return kernels.Statistics(self.running_mean, self.running_var, self.mode, self.momentum, self.eps)

    def _by_lane(self, x: Tensor) -> Tensor:
        if self.running_mean.dim() == 1:
            return self._normalise(x, self.running_mean, self.running_var, self.weight, self.bias)
        lanes, channels = self.running_mean.shape
        if x.is_cuda and self.mode == "running":  # a transpose would cost more than the formula
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            shift = self.bias - self.running_mean * scale
            form = (lanes, 1, channels, *([1] * (x.dim() - 2)))
            y = by_lane(x, lanes) * scale.to(x.dtype).view(form) + shift.to(x.dtype).view(form)
            return y.flatten(0, 1)
        # F.batch_norm keeps statistics per channel: K lanes of C channels are K·C channels.
        wide = by_lane(x, lanes).transpose(0, 1).flatten(1, 2)  # [B, K·C, ...]
        mean, var = self.running_mean.reshape(-1), self.running_var.reshape(-1)
        weight, bias = (t.expand(lanes, channels).reshape(-1) for t in (self.weight, self.bias))
        y = self._normalise(wide, mean, var, weight, bias)
        if self.mode == "train" and not self.running_mean.is_contiguous():  # then those were copies
            self.running_mean.copy_(mean.view(lanes, channels))
            self.running_var.copy_(var.view(lanes, channels))
        return y.view(-1, lanes, channels, *y.shape[2:]).transpose(0, 1).flatten(0, 1)

    def _normalise(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = weight.to(mean.dtype), bias.to(mean.dtype)  # statistics may be kept in more than x has
        if self.mode == "running":
            return F.batch_norm(x, mean, var, weight, bias, False, self.momentum, self.eps)
        if self.mode == "batch":
            return F.batch_norm(x, None, None, weight, bias, True, self.momentum, self.eps)
        return F.batch_norm(x, mean, var, weight, bias, True, self.momentum, self.eps)

    def and_pool(self, x: Tensor | Stem, pool: nn.Module) -> Tensor:
        """pool(ReLU(norm(x))); of a `Stem`, which is pooled."""
        affine = self.weight, self.bias
        if isinstance(x, Stem):
            kernels = self.kernels(x.shape, x.device)
            if kernels is not None:
                return kernels.stem_norm(x, affine, self.statistics(kernels))  # type: ignore[no-any-return]
            return x.normed(affine, (self.running_mean, self.running_var), self.mode, self.momentum, self.eps)
        usual = isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
        kernels = self.kernels(x.shape, x.device) if usual and not x.requires_grad else None
        if kernels is None:
            return pool(self(x, relu=True))  # type: ignore[no-any-return]
        return kernels.norm_and_pool(x, affine, self.statistics(kernels))  # type: ignore[no-any-return]


class LaneLayerNorm(nn.LayerNorm):
    """weight and bias `[K, *shape]`, or frozen ones."""

    @classmethod
    def of(cls, layer: nn.LayerNorm) -> LaneLayerNorm:
        new = cls(layer.normalized_shape, layer.eps, bias=layer.bias is not None)
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        own = len(self.normalized_shape)
        y = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        y = y * along(self.weight, y, self.weight.dim() - own, -own)
        return y if self.bias is None else y + along(self.bias, y, self.bias.dim() - own, -own)


class LaneGroupNorm(nn.GroupNorm):
    """weight and bias `[K, C]`, or frozen ones."""

    @classmethod
    def of(cls, layer: nn.GroupNorm) -> LaneGroupNorm:
        new = cls(layer.num_groups, layer.num_channels, layer.eps)
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, None, None, self.eps)
        return y * along(self.weight, y, self.weight.dim() - 1, 1) + along(self.bias, y, self.bias.dim() - 1, 1)


class LaneDropout(nn.Module):
    """Dropout whose draws are a hash of (the lane's key, this layer's salt, the element's place in its lane).

    `key` is handed over like a parameter, int64 `[K]`; without lanes it is ordinary dropout.
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
        keys = fold(self.key, self.salt)
        keep = keep_mask(keys, x.numel() // keys.shape[0], self.p).view(x.shape)
        return x * keep * (1.0 / (1.0 - self.p))


class ResidualAdapter(nn.Module):
    """`x + Conv1x1(Dropout(BN(x)))`, the identity up to 1e-4 when new."""

    def __init__(self, channels: int, dropout: float, name: str) -> None:
        super().__init__()
        self.norm = LaneBatchNorm(channels)
        self.dropout = LaneDropout(dropout, f"{name}.dropout")
        conv = nn.Conv2d(channels, channels, 1, bias=False, device="meta")
        conv.weight = nn.Parameter(torch.zeros(channels, channels, 1, 1))  # drawn by adapt(), from its seed
        self.conv = LaneConv2d.of(conv)

    def forward(self, x: Tensor) -> Tensor:
        norm, matrix, drop = self.norm, self.conv.weight, self.dropout
        kernels = norm.kernels(x.shape, x.device) if matrix.dim() == 5 else None
        if kernels is None:
            added: Tensor = self.conv(drop(norm(x)))
            return x + added
        active = kernels.Drop(drop.key, drop.salt, drop.p) if drop.key.dim() and drop.p else None
        affine = norm.weight, norm.bias
        return kernels.lane_adapter(x, affine, norm.statistics(kernels), matrix, active)  # type: ignore[no-any-return]
