"""What the layers of a model share during one pass: its operations, how batch norm works, where gradients go."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .ops import PLAIN, Ops

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
