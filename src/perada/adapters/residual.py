"""Residual adapters: `x + Conv1x1(Dropout(BN(x)))` behind convolutions (SPEC: the paper's adapter).

A new adapter is nearly the identity: its 1×1 weights are normal draws with a tiny standard deviation.
"""

import copy
import re
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InputError
from ..lanes import LaneBatchNorm, LaneConv2d, ResidualAdapter, is_resnet, key_of, parent_of

PATCHES = re.compile(r"(^|\.)(patch_embed\.proj|patch_embeddings\.projection|conv_proj)$")


@dataclass(frozen=True)
class Residual:
    """Where residual adapters go and how they start.

    In a ResNet of torchvision's layout they go behind the 3×3 convolutions of the blocks. A network may name its
    places itself: `adapters_at`, a regular expression. In any other network they go behind every k×k convolution
    (k > 1) that lies in a block (a submodule) or has a batch norm behind it; where there is none of these, behind
    every k×k convolution. `where` replaces that rule.
    """

    dropout: float = field(default=0.3, metadata={"help": "share of an adapter's inputs that training sets to zero"})
    std: float = field(default=1e-4, metadata={"help": "standard deviation of a new adapter's weights"})
    where: str | None = field(
        default=None, metadata={"help": "regular expression: convolutions with a matching name get an adapter"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InputError(f"Residual.dropout must be in [0, 1), not {self.dropout}")
        if not self.std >= 0:
            raise InputError(f"Residual.std must not be negative, not {self.std}")
        try:
            re.compile(self.where or "")
        except re.error as error:
            raise InputError(f"Residual.where is not a regular expression: {error}") from error

    def places(self, module: nn.Module) -> list[str]:
        """Returns the names of the convolutions that get an adapter."""
        kinds = nn.Conv2d, LaneConv2d  # no subclass: its own forward would be lost
        free = [(n, m) for n, m in module.named_modules() if getattr(m, "adapter", None) is None]
        convs = {n: m for n, m in free if type(m) in kinds and ".adapter." not in n}
        if where := self.where or getattr(module, "adapters_at", ""):
            return [n for n in convs if re.search(where, n)]
        if is_resnet(n for n, _ in module.named_parameters()):
            return [n for n, m in convs.items() if m.kernel_size == (3, 3) and "." in n]
        # A convolution that cuts an image into patches makes a transformer's tokens. It is not part of a block.
        wide = {n: m for n, m in convs.items() if max(m.kernel_size) > 1 and not PATCHES.search(n)}
        return [n for n, m in wide.items() if "." in n or norm_behind(module, n, m)] or list(wide)

    def insert(self, module: nn.Module, seed: int) -> frozenset[str]:
        """Inserts an adapter at every place. Returns the names of the inert parameters.

        The bias of an adapter's norm adds a constant to each channel. A batch norm behind the adapter subtracts it
        again, so its gradient is exactly zero without dropout, and only noise of the mask with dropout.
        """
        places = self.places(module)
        if not places:
            raise InputError(
                "no convolution of this network takes an adapter: set Residual.where to the names of some, choose a "
                "method without adapters, such as ditto or fedavg, or for a transformer the adapter lora or bottleneck"
            )
        inert = set()
        for name in places:
            layer: nn.Conv2d = module.get_submodule(name)  # type: ignore[assignment]
            new = LaneConv2d.of(layer)
            added = ResidualAdapter(layer.out_channels, self.dropout, f"{name}.adapter").to(layer.weight)
            draw = torch.Generator().manual_seed(key_of(seed, name, "adapter") & (2**63 - 1))
            with torch.no_grad():
                added.conv.weight.copy_(torch.randn(added.conv.weight.shape, generator=draw) * self.std)
            behind = norm_behind(module, name, layer)
            if behind is not None:  # the adapter sees what this norm saw in pretraining: start from its statistics
                added.norm.running_mean.copy_(behind.running_mean)  # type: ignore[arg-type]
                added.norm.running_var.copy_(behind.running_var)  # type: ignore[arg-type]
                inert.add(f"{name}.adapter.norm.bias")
            new.adapter = added
            parent, last = parent_of(module, name)
            setattr(parent, last, new)
        return frozenset(inert)

    @torch.no_grad()
    def merge(self, module: nn.Module) -> nn.Module:
        """Returns a copy without adapters that computes the same in eval mode.

        An adapter goes into the convolution before it. A grouped convolution becomes a dense one.
        """
        module = copy.deepcopy(module)
        for name, layer in list(module.named_modules()):
            if not isinstance(layer, LaneConv2d) or not isinstance(layer.adapter, ResidualAdapter):
                continue
            adapter = one_by_one(layer.adapter)
            mixed = adapter.weight.flatten(1)
            made = nn.Conv2d(
                layer.in_channels,
                layer.out_channels,
                layer.kernel_size,  # type: ignore[arg-type]
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                layer.dilation,  # type: ignore[arg-type]
                padding_mode=layer.padding_mode,
            ).to(mixed)
            made.weight.copy_(torch.einsum("oc,cihw->oihw", mixed, dense(layer)))
            made.bias.copy_(adapter.bias)  # type: ignore[union-attr, arg-type]
            if layer.bias is not None:
                made.bias.add_(mixed @ layer.bias)  # type: ignore[union-attr]
            parent, last = parent_of(module, name)
            setattr(parent, last, made.requires_grad_(False).eval())
        return module


@torch.no_grad()
def one_by_one(adapter: ResidualAdapter) -> nn.Conv2d:
    """Returns the 1×1 convolution that computes what an adapter does in eval mode.

    With the norm's scale s and shift t an adapter is y + A(s·y + t) = (I + A·diag(s)) y + A·t.
    """
    norm, matrix = adapter.norm, adapter.conv.weight.flatten(1)
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    made = nn.Conv2d(len(matrix), len(matrix), 1).to(matrix)
    made.weight.copy_((torch.eye(len(matrix)).to(matrix) + matrix * scale)[..., None, None])
    made.bias.copy_(matrix @ (norm.bias - norm.running_mean * scale))  # type: ignore[union-attr]
    return made.requires_grad_(False).eval()


def dense(conv: nn.Conv2d) -> torch.Tensor:
    """Returns the kernel `[O, I, h, w]` of a grouped convolution, with zeros between the groups."""
    if conv.groups == 1:
        return conv.weight
    parts = conv.weight.chunk(conv.groups)
    out = conv.weight.new_zeros(conv.out_channels, conv.in_channels, *conv.kernel_size)
    for i, part in enumerate(parts):
        rows, columns = part.shape[:2]
        out[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns] = part
    return out


def norm_behind(module: nn.Module, name: str, conv: nn.Conv2d) -> _BatchNorm | LaneBatchNorm | None:
    """Returns the batch norm that follows a convolution in the order of their parent, where there is one."""
    children = list(parent_of(module, name)[0].children())
    at = next(i for i, child in enumerate(children) if child is conv)
    following = children[at + 1] if at + 1 < len(children) else None
    if isinstance(following, _BatchNorm | LaneBatchNorm) and following.running_mean is not None:
        return following if len(following.running_mean) == conv.out_channels else None
    return None
