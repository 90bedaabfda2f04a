"""Steps of a loop as CUDA graphs: recorded once, replayed without the interpreter in between.

A graph works on the tensors it was recorded with, so a loop's states, batches and counters live in tensors that stay
where they are, and a round's data are copied into them. Nothing is read back before the loop has ended.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .model import LaneModel
from .state import State, flattened

if TYPE_CHECKING:
    from .train import Batch, Batches, Loss, Options, Run, Update


DEVICES = ("cuda",)  # where steps are recorded; tests add the CPU, where they are only run
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # lane counts that get a recording of their own


@runtime_checkable
class Static(Protocol):
    """Batches that can be asked for with a step that is a tensor, and that can be written over."""

    def shape(self) -> Hashable:
        """What two of them must have in common to be written over each other; None: these cannot be."""

    def copy_(self, other: Any) -> None: ...

    @property
    def capacity(self) -> int:
        """Steps there is room for."""

    def twin(self) -> Any:
        """One like this, with tensors of its own and room for some more steps."""

    def __call__(self, step: Tensor, lanes: Tensor) -> Batch: ...


def replayed(
    model: LaneModel,
    run: Run,
    batches: Batches,
    loss: Loss,
    update: Update,
    options: Options,
    key: Hashable,
    steps: int,
) -> Replay | None:
    """The loop's recorded steps, loaded with `run`; None where steps cannot be recorded."""
    if key is None or model.device.type not in DEVICES or not isinstance(batches, Static) or not steps:
        return None
    if batches.shape() is None:
        return None
    shapes = tuple((n, tuple(t.shape)) for s in run.states for n, t in {**s.params, **s.buffers}.items())
    whole = (key, options, shapes, batches.shape(), loss)
    kept: dict[Hashable, Replay] = model.__dict__.setdefault("replays", {})
    found = kept.get(whole)
    if found is None:
        found = kept[whole] = Replay(model, run, batches, loss, update, options)
    found.load(run, batches)
    return found


class Replay:
    def __init__(
        self, model: LaneModel, run: Run, batches: Static, loss: Loss, update: Update, options: Options
    ) -> None:
        from .train import Run

        self.model, self.loss, self.update, self.options = model, loss, update, options
        own = tuple(flattened(s) if s.lanes else s for s in run.states)
        self.run = Run(own, run.finite.clone(), run.order.clone(), run.counts.clone())
        self.batches = batches.twin()
        dtype = next(iter(own[0].params.values())).dtype
        capacity = self.batches.capacity
        self.trace = torch.full((capacity, len(run.finite)), torch.nan, dtype=dtype, device=model.device)
        self.at = torch.zeros((), dtype=torch.int64, device=model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def load(self, run: Run, batches: Static) -> None:
        for mine, given in zip(_tensors(self.run.states), _tensors(run.states), strict=True):
            mine.copy_(given)
        self.run.finite.copy_(run.finite)
        self.run.order.copy_(run.order)
        self.run.counts.copy_(run.counts)
        self.batches.copy_(batches)
        self.trace.fill_(torch.nan)
        self.at.zero_()

    def step(self, width: int) -> None:
        if self.model.device.type != "cuda":
            self._one(width)
            return
        if width not in self.graphs:
            self._record(width)
        self.graphs[width].replay()

    def result(self, steps: int) -> tuple[Run, Tensor]:
        """Views: copy what is to be kept."""
        return self.run, self.trace[:steps]

    def _one(self, width: int) -> None:
        from .train import one_step

        batch = self.batches(self.at, self.run.order[:width])
        losses = one_step(self.model, self.run, batch, self.loss, self.update, self.options, width, self.at)
        if losses is not None:
            going = self.run.counts[:width] > self.at
            self.trace[:, :width].index_copy_(0, self.at.view(1), torch.where(going, losses, torch.nan).unsqueeze(0))
        self.at += 1

    def _record(self, width: int) -> None:
        """Twice in earnest on a stream of its own, as libraries choose and allocate on first use; then put back."""
        held = [t.clone() for t in _tensors(self.run.states)], self.run.finite.clone(), self.at.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._one(width)
                self.at.copy_(held[2])
        torch.cuda.current_stream().wait_stream(side)
        for mine, kept in zip(_tensors(self.run.states), held[0], strict=True):
            mine.copy_(kept)
        self.run.finite.copy_(held[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._one(width)
        self.graphs[width] = graph


def _tensors(states: tuple[State, ...]) -> list[Tensor]:
    return [t for s in states for t in s.tensors()]
