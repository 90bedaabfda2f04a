"""Bottleneck adapters behind attention and MLP (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", 2019).

What such a part adds to a block becomes y + Up(Dropout(GELU(Down(y)))). Up starts at zero.
"""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..lanes import Bottleneck as Layer
from ..lanes import key_of
from .linear import KINDS, adapt_at

# The last linear layer of an attention or an MLP, as timm, transformers and torchvision name it.
LAST = re.compile(
    r"(^|\.)(attn\.proj|attention\.o_proj|output\.dense|self_att(n|ention)\.out_proj|mlp\.(fc2|3)|linear2)$"
)
STD = 1e-2  # of a new adapter's first weights


@dataclass(frozen=True)
class Bottleneck:
    """Where bottleneck adapters go and how narrow they are. `where` replaces the rule: behind attention and MLP."""

    reduction: int = field(default=16, metadata={"help": "how many times narrower than the layer an adapter is"})
    dropout: float = field(default=0.0, metadata={"help": "share of the narrow values that training sets to zero"})
    where: str | None = field(
        default=None, metadata={"help": "regular expression: linear layers with a matching name get an adapter"}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, int) or self.reduction < 1:
            raise InputError(f"Bottleneck.reduction must be a whole number of at least 1, not {self.reduction}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"Bottleneck.dropout must be in [0, 1), not {self.dropout}")
        try:
            re.compile(self.where or "")
        except re.error as error:
            raise InputError(f"Bottleneck.where is not a regular expression: {error}") from error

    def places(self, module: nn.Module) -> list[str]:
        """Returns the names of the linear layers that get an adapter."""
        rule = re.compile(self.where) if self.where else LAST
        return [n for n, m in module.named_modules() if type(m) in KINDS and ".adapter." not in n and rule.search(n)]

    def insert(self, module: nn.Module, seed: int) -> frozenset[str]:
        """Inserts an adapter at every place. No parameter of it is inert."""
        places = self.places(module)
        if not places:
            raise InputError(
                "this network has no attention or MLP of a known name: set Bottleneck.where to the names of linear "
                "layers, or choose a method without adapters, such as ditto or fedavg"
            )
        for name in places:
            adapt_at(module, name, lambda path, weight: self._new(path, weight, seed))
        return frozenset()

    def _new(self, name: str, weight: Tensor, seed: int) -> Layer:
        """Returns an adapter that adds zero."""
        width = len(weight)
        narrow = max(width // self.reduction, 1)
        draw = torch.Generator().manual_seed(key_of(seed, name, "adapter") & (2**63 - 1))
        down = STD * torch.randn(narrow, width, generator=draw)
        return Layer(down.to(weight), torch.zeros(width, narrow).to(weight), self.dropout, f"{name}.adapter")

    def merge(self, module: nn.Module) -> nn.Module:
        """Refuses: no linear layer computes what a bottleneck does."""
        raise InputError("bottleneck adapters are not linear and cannot be merged: export the model with its adapters")
