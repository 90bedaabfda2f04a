"""Adapted linear layers, and attention whose layers can be adapted or trained."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .layers import LaneDropout, LaneLinear, linear, recast


class AdaptedLinear(LaneLinear):
    """A linear layer with an `adapter` behind it: `adapter(x, y)` of the layer's input and output."""

    adapter: nn.Module

    @classmethod
    def of(cls, layer: nn.Linear, adapter: nn.Module) -> Self:
        new = recast(layer, cls)
        new.adapter = adapter
        return new

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x, super().forward(x))  # type: ignore[no-any-return]


class Fixed(nn.Module):
    """A weight that is not trained, of the same name as a linear layer's."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)


class LowRank(nn.Module):
    """LoRA: `y + alpha/rank · B A Dropout(x)`. A is `[rank, in]` and B `[out, rank]`, each perhaps with lanes."""

    def __init__(self, a: Tensor, b: Tensor, alpha: float, dropout: float, name: str, freeze_a: bool) -> None:
        super().__init__()
        self.scale = alpha / len(a)
        self.dropout = LaneDropout(dropout, f"{name}.dropout")
        self.lora_A: nn.Module = Fixed(a) if freeze_a else matrix(a)
        self.lora_B: nn.Module = matrix(b)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.dropout(x)
        a, b = self.lora_A.weight, self.lora_B.weight
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        low = linear(x, a, None)
        if b.dim() == 2:
            return y + self.scale * F.linear(low, b)
        lanes, out, rank = b.shape  # the product, its factor and the sum as one operation
        wide = torch.baddbmm(
            y.reshape(lanes, -1, out), low.reshape(lanes, -1, rank), b.transpose(1, 2), alpha=self.scale
        )
        return wide.view(y.shape)

    @property
    def product(self) -> Tensor:
        """Returns what is added to the layer's weight, without lanes."""
        return self.scale * self.lora_B.weight @ self.lora_A.weight  # type: ignore[operator]


class Bottleneck(nn.Module):
    """`y + Up(Dropout(GELU(Down(y))))`."""

    def __init__(self, down: Tensor, up: Tensor, dropout: float, name: str) -> None:
        super().__init__()
        self.down, self.up = matrix(down, bias=True), matrix(up, bias=True)
        self.dropout = LaneDropout(dropout, f"{name}.dropout")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        added: Tensor = self.up(self.dropout(F.gelu(self.down(y))))
        return y + added


def matrix(weight: Tensor, bias: bool = False) -> LaneLinear:
    """Returns a linear layer with this weight, and a bias of zeros if asked for."""
    outputs, inputs = weight.shape
    layer = LaneLinear(inputs, outputs, bias=bias, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias:
        layer.bias = nn.Parameter(weight.new_zeros(outputs))
    return layer


class LaneAttention(nn.MultiheadAttention):
    """Self-attention as `nn.MultiheadAttention` computes it in eval mode, from layers that may have lanes or adapters.

    Torch's own forward reads the weight of `out_proj` and never calls it. An `adapter`, if any, follows the product
    for queries, keys and values.
    """

    adapter: nn.Module | None

    @classmethod
    def of(cls, layer: nn.MultiheadAttention) -> Self:
        if not layer._qkv_same_embed_dim or not layer.batch_first or layer.bias_k is not None or layer.add_zero_attn:
            raise ValueError(
                "attention has a lane-aware form only with batch_first=True, one width for queries, keys and values, "
                "and no added keys"
            )
        new = recast(layer, cls)
        new._modules = dict(layer._modules)
        new.adapter = None
        return new

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        masks = [*args[:1], *args[2:3], *(kwargs.get(n) for n in ("key_padding_mask", "attn_mask"))]
        if query is not key or query is not value or any(m is not None for m in masks):
            raise InputError("trained or adapted attention must be self-attention without masks")
        n, tokens, width = query.shape
        x = linear(query, self.in_proj_weight, self.in_proj_bias)
        if self.adapter is not None:
            x = self.adapter(query, x)
        q, k, v = x.view(n, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        return self.out_proj(y), None


def plain_attention(layer: LaneAttention) -> nn.MultiheadAttention:
    """Returns torch's own layer with the same parameters, without the adapter."""
    new = recast(layer, nn.MultiheadAttention)
    new._modules = {n: m for n, m in layer._modules.items() if n != "adapter"}
    return new
