"""A lane as a network of torch's own layers, so that other libraries can train it: Opacus hooks into these alone.

Opacus finds the gradient of a parameter through the layer that owns it and is called. Adapters here read some of their
layers' weights without a call, which Opacus would not notice: it would train them wrongly, and say nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from opacus.grad_sample import register_grad_sampler
from torch import Tensor, nn

from perada.lanes import LaneBatchNorm, LaneConv2d, LaneModel, LowRank, State, parent_of
from perada.lanes.layers import Context, LaneDropout, LaneGroupNorm, LaneLayerNorm, LaneLinear, recast


class Affine(nn.Module):
    """A batch norm with fixed statistics."""

    def __init__(self, norm: LaneBatchNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.mean, self.factor = norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)

    def _apply(self, fn: Any, recurse: bool = True) -> Affine:
        self.mean, self.factor = fn(self.mean), fn(self.factor)
        return super()._apply(fn, recurse)

    def normed(self, x: Tensor) -> Tensor:
        return (x - self.mean.view(-1, 1, 1)) * self.factor.view(-1, 1, 1)

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        y = self.normed(x) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        y = y if add is None else y + add
        return y.relu() if relu else y


@register_grad_sampler(Affine)
def affine_gradients(layer: Affine, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    found = {}
    if layer.weight.requires_grad:
        found[layer.weight] = (layer.normed(activations[0]) * backprops).sum((2, 3))
    if layer.bias.requires_grad:
        found[layer.bias] = backprops.sum((2, 3))
    return found


class PlainLora(nn.Module):
    def __init__(self, layer: LowRank) -> None:
        super().__init__()
        self.scale = layer.scale
        for name in ("lora_A", "lora_B"):
            weight = getattr(layer, name).weight
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            made.weight = nn.Parameter(weight.detach())
            setattr(self, name, made)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.scale * self.lora_B(self.lora_A(x))


class PlainResidual(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.conv = layer.norm, layer.conv

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x))


FORMS = {LaneLinear: nn.Linear, LaneLayerNorm: nn.LayerNorm, LaneGroupNorm: nn.GroupNorm}


def twin(model: LaneModel, state: State) -> nn.Module:
    """Returns a plain network behind the model's frozen front that holds this one lane, without dropout.

    Its parameters have the lane's names; those that the lane trains require gradients.
    """
    net = copy.deepcopy(model.module, {id(model.context): Context()})  # plain torch
    net.to(next(iter(state.tensors())).dtype)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        for source in (state.params, state.buffers):
            for name, tensor in source.items():
                tensors[name].copy_(tensor[0])
    for name, layer in reversed(list(net.named_modules())):  # the inner ones first
        made = plain_form(layer)
        if made is not None and name:
            parent, last = parent_of(net, name)
            setattr(parent, last, made)
    for name, p in net.named_parameters():
        p.requires_grad_(name in state.params and name not in model.inert)
    return net.train()  # Opacus hooks into nothing else


def plain_form(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, LowRank):
        return PlainLora(layer)
    if isinstance(layer, LaneBatchNorm):
        return Affine(layer)
    if isinstance(layer, LaneDropout):
        return nn.Identity()
    if type(layer).__name__ == "ResidualAdapter":
        return PlainResidual(layer)
    if isinstance(layer, LaneConv2d) and layer.adapter is None:
        return without_context(recast(layer, nn.Conv2d))
    return recast(layer, FORMS[type(layer)]) if type(layer) in FORMS else None


def without_context(layer: nn.Conv2d) -> nn.Conv2d:
    layer._modules.pop("adapter", None)
    layer.__dict__.pop("adapter", None)
    return layer
