"""LoRA: a low-rank product beside linear layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022: y = W x becomes
y + alpha/rank · B A Dropout(x), with A `[rank, in]` and B `[out, rank]`. B starts at zero. The names of settings and of
the exported files are those of PEFT.
"""

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import InputError
from ..fields import check_fields
from ..lanes import AdaptedLinear, LaneAttention, LowRank, key_of, last_linear, parent_of, plain_attention
from .linear import adapt_at, linear_layers

ALL = "all-linear"
PROJECTIONS = ("qkv", "query", "key", "value", "q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Lora:
    """Where LoRA goes and how large it is. By default it goes to the products that make queries, keys and values.

    The name of an `nn.MultiheadAttention` stands for its product for queries, keys and values.
    """

    rank: int = field(default=8, metadata={"help": "rows of A: the rank of what a layer can learn"})
    alpha: float = field(default=16.0, metadata={"help": "what is added counts alpha/rank times"})
    target_modules: tuple[str, ...] | str = field(
        default=(),
        metadata={"help": "(ends of) names, a regular expression for whole names, or all-linear; empty: q, k, v"},
    )
    dropout: float = field(default=0.0, metadata={"help": "share of A's inputs that training sets to zero"})
    freeze_a: bool = field(default=False, metadata={"help": "A stays as it is drawn: only B is trained and sent (FFA)"})

    knows_head = True  # `insert` takes the name of the prediction layer

    def __post_init__(self) -> None:
        check_fields(self, {"rank": 1}, positive=("alpha",))
        if not 0 <= self.dropout < 1:
            raise InputError(f"Lora.dropout must be in [0, 1), not {self.dropout}")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise InputError(f"Lora.target_modules is not a regular expression: {error}") from error

    def places(self, module: nn.Module, head: str = "") -> list[str]:
        """Returns the names of the layers that get an adapter; never the head."""
        layers = linear_layers(module)
        layers.pop(head or last_linear(module), None)
        return [n for n, m in layers.items() if self._is_target(n, m)]

    def _is_target(self, name: str, layer: nn.Module) -> bool:
        wanted = self.target_modules
        if wanted == ALL:
            return True
        if isinstance(wanted, str) and wanted:
            return re.fullmatch(wanted, name) is not None
        if not wanted and isinstance(layer, nn.MultiheadAttention):
            return True
        return any(name == w or name.endswith(f".{w}") for w in wanted or PROJECTIONS)

    def insert(self, module: nn.Module, seed: int, head: str = "") -> frozenset[str]:
        """Inserts an adapter at every place. No parameter of it is inert."""
        places = self.places(module, head)
        if not places:
            raise InputError(
                f"no linear layer of this network is a target of LoRA: set Lora.target_modules to {ALL!r} or to names, "
                "or choose a method without adapters, such as ditto or fedavg"
            )
        for name in places:
            adapt_at(module, name, lambda path, weight: self._new(path, weight, seed))
        return frozenset()

    def _new(self, name: str, weight: Tensor, seed: int) -> LowRank:
        """Returns an adapter that adds zero; A is a uniform draw within ±1/√in, as in PEFT."""
        out, inputs = weight.shape
        draw = torch.Generator().manual_seed(key_of(seed, name, "adapter") & (2**63 - 1))
        a = (2 * torch.rand(self.rank, inputs, generator=draw) - 1) * inputs**-0.5
        b = torch.zeros(out, self.rank)
        return LowRank(a.to(weight), b.to(weight), self.alpha, self.dropout, f"{name}.adapter", self.freeze_a)

    @torch.no_grad()
    def merge(self, module: nn.Module) -> nn.Module:
        """Returns a copy without adapters that computes the same in eval mode: W + alpha/rank · B A."""
        module = copy.deepcopy(module)
        for name, layer in list(module.named_modules()):
            made: nn.Module
            if isinstance(layer, AdaptedLinear) and isinstance(layer.adapter, LowRank):
                made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                made.weight, made.bias = nn.Parameter(layer.weight + layer.adapter.product), layer.bias
            elif isinstance(layer, LaneAttention):
                made = plain_attention(layer)
                if isinstance(layer.adapter, LowRank):
                    made.in_proj_weight = nn.Parameter(layer.in_proj_weight + layer.adapter.product)
            else:
                continue
            parent, last = parent_of(module, name)
            setattr(parent, last, made.requires_grad_(False).eval())
        return module

    def export(self, module: nn.Module, trained: Iterable[str], head: str) -> dict[str, bytes]:
        """Returns the files of a folder that `PeftModel.from_pretrained` loads, by name.

        module: a personal model. trained: the names of its own parameters and running statistics.
        """
        places = [n for n, m in module.named_modules() if isinstance(getattr(m, "adapter", None), LowRank)]
        kept = sorted({n.rpartition(".")[0] for n in trained if ".adapter." not in n})
        if why := _not_for_peft(module, places, kept, head):
            raise InputError(f"PEFT's format cannot hold this model: it has {why}; export it as .safetensors")
        tensors = {n: t for n, t in module.state_dict().items() if n.rpartition(".")[0] in kept or ".adapter." in n}
        content = {f"base_model.model.{n.replace('.adapter.', '.')}": t for n, t in tensors.items()}
        for name in places:  # PEFT adapts both layers of an attention; one of them adds zero
            layer = module.get_submodule(name)
            if isinstance(layer, LaneAttention):
                weight, place = layer.out_proj.weight, f"base_model.model.{name}.base_layer.out_proj"
                content[f"{place}.lora_A.weight"] = weight.new_zeros(self.rank, weight.shape[1])
                content[f"{place}.lora_B.weight"] = weight.new_zeros(weight.shape[0], self.rank)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": None,
            "task_type": None,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": places,
            "modules_to_save": kept,
            "bias": "none",
            "fan_in_fan_out": False,
        }
        content = {n: t.detach().cpu().contiguous().clone() for n, t in content.items()}
        return {
            "adapter_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
            "adapter_model.safetensors": save(content, {"format": "pt"}),
        }


def _not_for_peft(module: nn.Module, places: list[str], kept: list[str], head: str) -> str:
    """Returns what of a personal model PEFT cannot hold; empty if it can hold all of it."""
    if not places:
        return "no LoRA"
    within = [n for n in places if isinstance(parent_of(module, n)[0], LaneAttention)]
    if within:
        return f"LoRA within nn.MultiheadAttention ({within[0]}), which PEFT adds twice"
    others = [n for n in kept if n != head and "norm" not in type(module.get_submodule(n)).__name__.lower()]
    return f"trained layers of the backbone ({others[0] or 'its own'}, ...)" if others else ""
