"""Adapters: small trained parts that are inserted into a frozen network. One file per kind."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..errors import InputError
from ..lanes import Group, LaneModel, Prefix, convert, default_groups, last_linear
from ..plugins import called, check, find
from .bottleneck import Bottleneck
from .lora import Lora
from .residual import Residual

__all__ = [
    "KINDS",
    "Adapter",
    "Bottleneck",
    "Exports",
    "Lora",
    "Residual",
    "adapt",
    "adapter_of",
    "fitting",
    "known",
    "name_of",
]

KINDS: Mapping[str, Callable[..., Any]] = {
    "residual": Residual,
    "lora": Lora,
    "bottleneck": Bottleneck,
    "none": lambda: None,
}
GROUP = "perada.adapters"  # of entry points

Groups = Callable[[nn.Module], Mapping[str, Group]]


@runtime_checkable
class Adapter(Protocol):
    """A kind of adapter with its settings. What it adds lies below submodules named `adapter`.

    A file of weights holds the added tensors under the names that they have in the network.
    """

    def places(self, module: nn.Module) -> list[str]:
        """Returns the names of the layers that get an adapter."""

    def insert(self, module: nn.Module, seed: int) -> frozenset[str]:
        """Inserts adapters into `module`. Returns the parameters that cannot change what the network computes."""

    def merge(self, module: nn.Module) -> nn.Module:
        """Returns a copy without adapters that computes the same in eval mode."""


@runtime_checkable
class KnowsHead(Protocol):
    """A kind that must be told which layer is the head; then `insert` takes its name."""

    knows_head: bool

    def insert(self, module: nn.Module, seed: int, head: str = "") -> frozenset[str]: ...


@runtime_checkable
class Exports(Protocol):
    """A kind with a format of its own for others to read."""

    def export(self, module: nn.Module, trained: Iterable[str], head: str) -> dict[str, bytes]:
        """Returns the files of a folder, by name.

        module: a personal model. trained: the names of its own parameters and running statistics.
        """


def known(name: str) -> None:
    """Raises InputError if a name cannot be an adapter. Imports nothing."""
    check("adapter", GROUP, name, KINDS)


def adapter_of(adapter: Adapter | str | None) -> Adapter | None:
    """Returns the adapter that a name stands for: one of `KINDS`, an entry point or `package.module:callable`."""
    if isinstance(adapter, str):
        adapter = called("adapter", adapter, find("adapter", GROUP, adapter, KINDS))
    if isinstance(adapter, type):
        raise InputError(f"adapter must be an object, such as {adapter.__name__}(), not the class")
    if adapter is not None and not isinstance(adapter, Adapter):
        raise InputError(f"{type(adapter).__name__} is not an adapter: it needs places, insert and merge")
    return adapter


def name_of(adapter: Adapter | None) -> str:
    """Returns the name that stands for an adapter with its default settings."""
    if adapter is None:
        return "none"
    kind = type(adapter)
    name = next((n for n, ours in KINDS.items() if ours is kind), f"{kind.__module__}:{kind.__qualname__}")
    if name not in KINDS and adapter_of(name) != adapter:
        raise InputError(f"a run folder cannot hold the settings of {adapter}: use those that {name}() has")
    return name


def fitting(module: nn.Module, head: str) -> Adapter | None:
    """Returns the kind of adapter that a network has places for: residual, LoRA, or none."""
    if Residual().places(module):
        return Residual()
    return Lora() if Lora().places(module, head) else None


def inserted(module: nn.Module, adapter: Adapter, seed: int, head: str) -> frozenset[str]:
    """Inserts adapters into `module`. Returns the parameters that cannot change what the network computes."""
    return adapter.insert(module, seed, head) if isinstance(adapter, KnowsHead) else adapter.insert(module, seed)


def adapt(
    module: nn.Module,
    *,
    adapter: Adapter | str | None = "residual",
    trained: str | Iterable[str] = "adapter",
    head: str | None = None,
    groups: Groups | None = None,
    seed: int = 0,
    start: str = "",
) -> LaneModel:
    """Freezes a copy of `module`, inserts adapters and makes what is trained lane-aware. Returns its lanes.

    adapter: what to insert: an object such as `Residual(dropout=0.1)`, a name, or None for nothing.
    trained: a parameter group ("adapter", "full", "output", ...) or the names of parameters.
    head: the name of the prediction layer. None takes the last linear layer.
    groups: computes the parameter groups. None takes `lanes.default_groups`.
    seed: of the adapters' first weights.
    start: the first stage that is adapted (`lanes.Prefix.cut`). Those before it stay frozen for every method, have no
        adapters and normalise with the statistics that they came with. Empty adapts all.
    """
    module = copy.deepcopy(module)
    kind, head = adapter_of(adapter), head or last_linear(module)
    prefix = Prefix.cut(module, start) if start else None
    inert = inserted(module, kind, seed, head) if kind else frozenset()
    return convert(module, trained, groups(module) if groups else default_groups(module, head), inert, prefix)
