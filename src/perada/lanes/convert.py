"""Any torch module -> a `LaneModel`, by replacing only what is trained or mixes samples."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .layers import LaneBatchNorm, LaneConv2d, LaneDropout, LaneLayerNorm, LaneLinear, ResidualAdapter
from .model import Group, LaneModel
from .random import key_of

Groups = Callable[[nn.Module], Mapping[str, Group]]


def adapt(
    module: nn.Module,
    *,
    adapter: str | None = "residual",
    trained: str | Iterable[str] = "adapter",
    dropout: float = 0.3,
    std: float = 1e-4,
    where: str | None = None,
    groups: Groups | None = None,
    head: str | None = None,
    seed: int = 0,
) -> LaneModel:
    """Freeze `module`, insert adapters, and make what is trained lane-aware. `module` itself is not changed.

    adapter: "residual" puts `x + Conv1x1(Dropout(BN(x)))` behind every 3×3 convolution inside a block;
        None inserts nothing.
    trained: a parameter group ("adapter", "full", "output", ...) or parameter names.
    std: standard deviation of the adapters' first weights.
    where: a regular expression for the convolutions that get an adapter, instead of that rule.
    groups: computes the parameter groups; the default knows adapter, adapter_modules, batch_norm, output,
        feature_extractor, full and everything, and of a ResNet in torchvision's layout also input.
    head: the name of the prediction layer; default, the last linear layer.
    """
    module = copy.deepcopy(module)
    head = head or _last_linear(module)
    inert: frozenset[str] = frozenset()
    if adapter == "residual":
        inert = _insert(module, dropout, std, where, seed)
    elif adapter is not None:
        raise ValueError(f"unknown adapter {adapter!r}: known are 'residual' and None")
    declared = groups(module) if groups else default_groups(module, head)
    if isinstance(trained, str):
        if trained not in declared:
            raise ValueError(f"unknown parameter group {trained!r}; this model has {', '.join(declared)}")
        names = declared[trained].params
    else:
        names = frozenset(trained)
        missing = names - {n for n, _ in module.named_parameters()}
        if missing:
            raise ValueError(f"no such parameters: {', '.join(sorted(missing))}")
    _replace(module, names)
    return LaneModel(module, names, inert, declared)


def _last_linear(module: nn.Module) -> str:
    names: list[str] = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise ValueError("this module has no linear layer to serve as the head; name one with head=")
    return names[-1]


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _insert(module: nn.Module, dropout: float, std: float, where: str | None, seed: int) -> frozenset[str]:
    """Adapters behind the chosen convolutions; returns the names of the adapters' inert parameters."""
    convs = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d)
        and (re.search(where, name) if where else layer.kernel_size == (3, 3) and "." in name)
    ]
    if not convs:
        raise ValueError("no convolution takes an adapter here; name some with where=, or use adapter=None")
    inert = set()
    for name, layer in convs:
        new = LaneConv2d.of(layer)
        added = ResidualAdapter(layer.out_channels, dropout, f"{name}.adapter").to(layer.weight)
        draw = torch.Generator().manual_seed(key_of(seed, name, "adapter") & (2**63 - 1))
        with torch.no_grad():
            added.conv.weight.copy_(torch.randn(added.conv.weight.shape, generator=draw) * std)
        parent, last = _parent(module, name)
        after = _norm_after(parent, layer)
        if after is not None:  # the adapter sees what this norm saw in pretraining: start from its statistics
            added.norm.running_mean.copy_(after.running_mean)  # type: ignore[arg-type]
            added.norm.running_var.copy_(after.running_var)  # type: ignore[arg-type]
            # The adapter norm's bias adds a constant to each channel, which the following norm subtracts: its
            # gradient is exactly zero without dropout, and with dropout only the noise of the mask.
            inert.add(f"{name}.adapter.norm.bias")
        new.adapter = added
        setattr(parent, last, new)
    return frozenset(inert)


def _norm_after(parent: nn.Module, conv: nn.Conv2d) -> _BatchNorm | None:
    children = list(parent.children())
    following = children[children.index(conv) + 1] if conv is not children[-1] else None
    if isinstance(following, _BatchNorm) and following.num_features == conv.out_channels:
        return following if following.running_mean is not None else None
    return None


def _replace(module: nn.Module, trained: frozenset[str]) -> None:
    lane_aware = (LaneLinear, LaneConv2d, LaneBatchNorm, LaneLayerNorm, LaneDropout)
    for name, layer in list(module.named_modules()):
        owned = {f"{name}.{p}" if name else p for p, _ in layer.named_parameters(recurse=False)} & trained
        if isinstance(layer, lane_aware):
            continue
        try:
            new = _lane_aware(layer, name, bool(owned))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if new is not None:
            parent, last = _parent(module, name)
            setattr(parent, last, new)


def _lane_aware(layer: nn.Module, name: str, trained: bool) -> nn.Module | None:
    """The lane-aware form of a layer that needs one; None for a frozen layer that treats samples one by one."""
    if isinstance(layer, _BatchNorm):
        return LaneBatchNorm.of(layer)
    if isinstance(layer, nn.Dropout):
        return LaneDropout(layer.p, name)
    if isinstance(layer, _DropoutNd) and layer.p > 0:
        raise ValueError(f"{type(layer).__name__} has no lane-aware form; use nn.Dropout or p=0")
    if not trained:  # a convolution has better forms on a GPU (`conv.frozen_conv2d`)
        usual = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"
        return LaneConv2d.of(layer) if usual and layer.bias is None and not isinstance(layer.padding, str) else None
    kinds: dict[type, Callable[[Any], nn.Module]] = {
        nn.Linear: LaneLinear.of,
        nn.Conv2d: LaneConv2d.of,
        nn.LayerNorm: LaneLayerNorm.of,
    }
    if type(layer) not in kinds:
        raise ValueError(f"a trained {type(layer).__name__} has no lane-aware form; keep it frozen")
    return kinds[type(layer)](layer)


SHORTCUT = re.compile(r"\.(downsample|shortcut)\.")  # what stands beside a block of a ResNet
RESNET = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.bn1.weight"}


def default_groups(module: nn.Module, head: str) -> dict[str, Group]:
    """The groups any module has. Of a ResNet the affines of the shortcuts' norms belong to neither batch_norm nor
    adapter, and its input group is the stem and the FIRST convolution of every block, with their norms.
    """
    params = [n for n, _ in module.named_parameters()]
    buffers = [n for n, _ in module.named_buffers() if n.endswith(("running_mean", "running_var"))]
    kinds = {n: m for n, m in module.named_modules() if isinstance(m, (_BatchNorm, LaneBatchNorm, nn.LayerNorm))}

    def owner(name: str) -> str:
        return name.rpartition(".")[0]

    def first(name: str) -> bool:
        path = name.split(".")
        return len(path) > 1 and path[-2] in ("conv1", "bn1") and "adapter" not in path

    is_resnet = set(params) >= RESNET
    added = frozenset(n for n in params if ".adapter." in n)
    everything = Group(frozenset(params), frozenset(buffers))
    modules = Group(added, frozenset(n for n in buffers if ".adapter." in n))
    full = everything - modules
    output = Group(frozenset(n for n in params if owner(n) == head), frozenset())
    norms = frozenset(n for n in full.params if owner(n) in kinds and not (is_resnet and SHORTCUT.search(n)))
    # Where batch norms are personal every norm's statistics are, those of norms left out here too.
    layer_norms = frozenset(n for n in norms if isinstance(kinds[owner(n)], nn.LayerNorm))
    found = {
        "full": full,
        "adapter": Group(added | norms | output.params, everything.buffers),
        "adapter_modules": modules,
        "output": output,
        "batch_norm": Group(norms - layer_norms, full.buffers),
        "feature_extractor": full - output,
        "everything": everything,
    }
    if is_resnet:
        found["input"] = Group(frozenset(filter(first, full.params)), frozenset(filter(first, full.buffers)))
    return found
