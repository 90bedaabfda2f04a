"""Temporary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..lanes import LaneModel
from ..lanes import adapt as _adapt


@dataclass(frozen=True)
class Residual:
    dropout: float = 0.3
    std: float = 1e-4
    where: str | None = None


def adapt(
    module: nn.Module,
    *,
    adapter: Any = "residual",
    trained: Any = "adapter",
    head: str | None = None,
    groups: Any = None,
    seed: int = 0,
) -> LaneModel:
    if adapter == "residual":
        adapter = Residual()
    if adapter is None:
        return _adapt(module, adapter=None, trained=trained, head=head, groups=groups, seed=seed)
    return _adapt(
        module,
        dropout=adapter.dropout,
        std=adapter.std,
        where=adapter.where,
        trained=trained,
        head=head,
        groups=groups,
        seed=seed,
    )
