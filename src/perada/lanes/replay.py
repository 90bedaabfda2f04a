"""Steps of a loop as CUDA graphs: recorded once, replayed without the interpreter in between.

A graph works on the tensors it was recorded with, so a loop's states, batches and counters live in tensors that stay
where they are: slots, into which lanes are copied as the schedule has it (`schedule.py`). Nothing is read back before
the loop has ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .model import LaneModel
from .schedule import cheapest, waste
from .state import State, flattened, sent

if TYPE_CHECKING:
    from .gradient import Batch, Loss, Options
    from .train import Batches, Result, Run, Update


DEVICES = ("cuda",)  # where steps are recorded; tests add the CPU, where they are only run
KEPT = 8  # loops whose recordings are kept, those used last
WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # lane counts that get a recording of their own


@runtime_checkable
class Static(Protocol):
    """Batches that can be asked for with steps that are a tensor, and that can be written over."""

    def shape(self) -> Hashable:
        """What two of them must have in common to be written over each other; None: these cannot be."""

    def copy_(self, other: Any) -> None: ...

    @property
    def capacity(self) -> int:
        """Steps there is room for."""

    def twin(self) -> Any:
        """One like this, with tensors of its own and room for some more steps."""

    def __call__(self, step: Tensor, lanes: Tensor) -> Batch: ...


def recorded(
    model: LaneModel,
    start: tuple[State, ...],
    batches: Batches,
    loss: Loss,
    update: Update,
    options: Options,
    key: Hashable,
    slots: int,
) -> Replay | None:
    """The slots for such a loop, those of an earlier one where that was alike; None where steps cannot be recorded."""
    if key is None or model.device.type not in DEVICES or not isinstance(batches, Static) or batches.shape() is None:
        return None
    lanes = max(s.lanes for s in start)
    shapes = tuple(
        (n, s.lanes == lanes, tuple(t.shape[1:])) for s in start for n, t in {**s.params, **s.buffers}.items()
    )
    whole = (key, options, slots, shapes, batches.shape(), loss)
    kept = model.replays
    found = kept.pop(whole, None) or Replay(model, start, batches, loss, update, options, slots)
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]
    kept[whole] = found  # the newest last
    return found


class Replay:
    """Slots, and the recorded steps that work on the first so many of them."""

    def __init__(
        self,
        model: LaneModel,
        start: tuple[State, ...],
        batches: Static,
        loss: Loss,
        update: Update,
        options: Options,
        slots: int,
    ) -> None:
        from .train import Run

        self.model, self.loss, self.update, self.options = model, loss, update, options
        lanes = max(s.lanes for s in start)
        self.own = [s.lanes == lanes for s in start]
        states = tuple(
            flattened(s.map(lambda t: t[:1].expand(slots, *t.shape[1:])) if mine else s) if s.lanes else s
            for s, mine in zip(start, self.own, strict=True)
        )
        self.batches = batches.twin()
        dtype, none = next(iter(states[0].params.values())).dtype, torch.zeros(slots, dtype=torch.int64)
        self.run = Run.of(states, none, none.clone(), self.batches.capacity, dtype, model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def train(self, start: tuple[State, ...], batches: Any, steps: Sequence[int]) -> Result:
        """`loop`, with these batches, which are `Static`."""
        from .train import Result, Run

        run, device, slots = self.run, self.model.device, len(self.run.finite)
        given = tuple(flattened(s) if s.lanes else s for s in start)
        for mine, state, own in zip(run.states, given, self.own, strict=True):
            if not own and state.lanes:
                _write(mine, slice(None), state, slice(None))
        self.batches.copy_(batches)
        kept = tuple(s.with_flat(s.flat[0].clone(), s.flat[1].clone()) if s.flat else s for s in given)
        done = Run.of(kept, torch.arange(len(steps)), torch.tensor(steps), max(steps), run.trace.dtype, device)
        run.counts.zero_()
        run.at.zero_()
        spans = cheapest(steps, slots, WIDTHS if self.options.widths is None else self.options.widths)
        self.model.lane_steps = [a + b for a, b in zip(self.model.lane_steps, waste(steps, spans), strict=True)]
        for span in spans:
            if span.stored:
                self._store(done, *_columns(span.stored, device))
            if span.loaded:
                self._load(given, done.counts, *_columns(span.loaded, device))
            for high, low in span.moved:
                self._move(high, low)
            for _ in range(span.steps):
                self.step(span.width)
        return Result(tuple(State(s.params, s.buffers) for s in done.states), done.trace[:-1], done.finite)

    def _lanes(self, states: tuple[State, ...]) -> Iterator[tuple[State, State]]:
        """What slots hold, beside what lanes have; not what all lanes share."""
        return ((m, s) for m, s, own in zip(self.run.states, states, self.own, strict=True) if own and s.lanes)

    def _store(self, done: Run, here: Tensor, there: Tensor) -> None:
        """Slots `here` are done with lanes `there`."""
        run = self.run
        for mine, state in self._lanes(done.states):
            _write(state, there, mine, here)
        done.finite[there] = run.finite[here]
        done.trace[:, there] = run.trace[: len(done.trace), here]
        run.counts[here] = run.at[here] = 0

    def _load(self, given: tuple[State, ...], counts: Tensor, here: Tensor, there: Tensor) -> None:
        """Slots `here` begin with lanes `there`."""
        run = self.run
        for mine, state in self._lanes(given):
            _write(mine, here, state, there)
        run.finite[here] = True
        run.order[here], run.counts[here], run.at[here] = there, counts[there], torch.zeros_like(there)
        run.trace[:, here] = torch.nan

    def _move(self, high: int, low: int) -> None:
        run = self.run
        for mine, _ in self._lanes(run.states):
            _write(mine, slice(low, low + 1), mine, slice(high, high + 1))
        for tensor in (run.finite, run.order, run.counts, run.at, run.trace.T):
            tensor[low].copy_(tensor[high])
        run.counts[high].zero_()
        run.at[high].zero_()

    def step(self, width: int) -> None:
        if self.model.device.type != "cuda":
            self._one(width)
            return
        if width not in self.graphs:
            self._record(width)
        self.graphs[width].replay()

    def _one(self, width: int) -> None:
        from .train import one_step

        batch = self.batches(self.run.at[:width], self.run.order[:width])
        one_step(self.model, self.run, batch, self.loss, self.update, self.options, width)

    def _record(self, width: int) -> None:
        """Twice in earnest on a stream of its own, as libraries choose and allocate on first use; then put back."""
        run, ops = self.run, self.model.context.ops
        ops.join(self.model.device)  # a recording must not wait for work that an error left unjoined
        standing = [t for s in run.states for t in s.flat or ()] + [run.finite, run.at, run.trace]
        held = [t.clone() for t in standing]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ops.compile(lambda: self._one(width))
            for _ in range(2):
                for mine, kept in zip(standing, held, strict=True):
                    mine.copy_(kept)
                self._one(width)
        torch.cuda.current_stream().wait_stream(side)
        for mine, kept in zip(standing, held, strict=True):
            mine.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._one(width)
        self.graphs[width] = graph


def _write(mine: State, here: Any, given: State, there: Any) -> None:
    """Lanes `there` of one flat state over lanes `here` of another."""
    for a, b in zip(mine.flat or (), given.flat or (), strict=True):
        a[here] = b[there]


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    here, there = sent(torch.tensor(pairs), device).unbind(1)
    return here, there
