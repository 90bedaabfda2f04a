"""Steps of a loop as CUDA graphs: recorded once, then replayed without Python.

A graph works on the tensors it was recorded with. So a loop's states, batches and counters live in fixed tensors with
slots, and lanes are copied into the slots by a schedule. Nothing is read back before the loop ends.

Lanes have different numbers of steps. The longest start first, and a lane that is done makes room for the next. When no
lane waits, the steps get narrower, in the few widths that are recorded. All of this is known before the first step, so
the device is never asked. Short lanes may take turns in fewer slots, because the longest lane takes its time anyway.
The schedule is the cheapest of a few.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .gradient import Batch
from .state import State, flattened, sent
from .train import Job, Result, Run, one_step

DEVICES = ("cuda",)  # where steps are recorded; tests add the CPU, which runs them without recording
KEPT = 8  # loops whose recordings are kept: the last used
STEP = 13  # the fixed cost of a step, in lanes (docs/performance.md: 0.80 ms for 1 lane, 1.67 for 16)
WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # the lane counts that are recorded


@runtime_checkable
class Static(Protocol):
    """Batches that live in fixed tensors and take a tensor of steps."""

    def shape(self) -> Hashable:
        """Returns what two of them must have in common for `copy_`; None if they cannot be recorded."""

    def copy_(self, other: Any) -> None: ...

    @property
    def capacity(self) -> int:
        """Returns the number of steps that fit."""

    def twin(self) -> Any:
        """Returns a copy with its own tensors, which may fit more steps."""

    def __call__(self, step: Tensor, lanes: Tensor) -> Batch: ...


def recorded(job: Job, slots: int) -> Replay | None:
    """Returns the recordings for a job, which may be those of an earlier one like it; None if it cannot be recorded."""
    model, batches = job.model, job.batches
    if job.key is None or model.device.type not in DEVICES or not isinstance(batches, Static):
        return None
    if batches.shape() is None:
        return None
    shapes = tuple(
        (n, s.lanes == job.lanes, tuple(t.shape[1:])) for s in job.start for n, t in {**s.params, **s.buffers}.items()
    )
    kind = (job.key, job.options, slots, shapes, batches.shape(), job.loss)
    replay = model.replays.pop(kind, None) or Replay(job, batches.twin(), slots)
    while len(model.replays) >= KEPT:
        del model.replays[next(iter(model.replays))]
    model.replays[kind] = replay  # the newest last
    return replay


class Replay:
    """Slots, and recorded steps that work on the first n of them."""

    def __init__(self, job: Job, batches: Any, slots: int) -> None:
        self.job, self.batches = replace(job, start=(), batches=batches, steps=()), batches  # without the job's tensors
        self.own = [s.lanes == job.lanes for s in job.start]  # the others are shared by all lanes
        states = tuple(
            flattened(s.map(lambda t: t[:1].expand(slots, *t.shape[1:])) if own else s) if s.lanes else s
            for s, own in zip(job.start, self.own, strict=True)
        )
        none, device = torch.zeros(slots, dtype=torch.int64), job.model.device
        self.run = Run.of(states, none, none.clone(), batches.capacity, job.dtype, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def train(self, job: Job) -> Result:
        """Runs a job that is like the one these slots were made for."""
        run, model, steps, slots = self.run, job.model, job.steps, len(self.run.finite)
        start = tuple(flattened(s) if s.lanes else s for s in job.start)
        for slot_state, state, own in zip(run.states, start, self.own, strict=True):
            if not own and state.lanes:
                _write(slot_state, slice(None), state, slice(None))
        self.batches.copy_(job.batches)
        kept = tuple(s.with_flat(s.flat[0].clone(), s.flat[1].clone()) if s.flat else s for s in start)
        done = Run.of(kept, torch.arange(len(steps)), torch.tensor(steps), max(steps), job.dtype, model.device)
        run.counts.zero_()
        run.at.zero_()
        spans = cheapest(steps, slots, WIDTHS if job.options.widths is None else job.options.widths)
        model.lane_steps = [a + b for a, b in zip(model.lane_steps, waste(steps, spans), strict=True)]
        for span in spans:
            if span.stored:
                self._store(done, *_columns(span.stored, model.device))
            if span.loaded:
                self._load(start, done.counts, *_columns(span.loaded, model.device))
            for high, low in span.moved:
                self._move(high, low)
            for _ in range(span.steps):
                self.step(span.width)
        return Result(tuple(State(s.params, s.buffers) for s in done.states), done.trace[:-1], done.finite)

    def _lanes(self, states: tuple[State, ...]) -> Iterator[tuple[State, State]]:
        """Yields the slots' states with the lanes' states, without those that all lanes share."""
        return ((m, s) for m, s, own in zip(self.run.states, states, self.own, strict=True) if own and s.lanes)

    def _store(self, done: Run, here: Tensor, there: Tensor) -> None:
        """Copies the slots `here` to the lanes `there`, which are done."""
        run = self.run
        for slots, state in self._lanes(done.states):
            _write(state, there, slots, here)
        done.finite[there] = run.finite[here]
        done.trace[:, there] = run.trace[: len(done.trace), here]
        run.counts[here] = run.at[here] = 0

    def _load(self, start: tuple[State, ...], counts: Tensor, here: Tensor, there: Tensor) -> None:
        """Copies the lanes `there` into the slots `here`, where they begin."""
        run = self.run
        for slots, state in self._lanes(start):
            _write(slots, here, state, there)
        run.finite[here] = True
        run.order[here], run.counts[here], run.at[here] = there, counts[there], torch.zeros_like(there)
        run.trace[:, here] = torch.nan

    def _move(self, high: int, low: int) -> None:
        """Moves a lane to a lower slot."""
        run = self.run
        for slots, _ in self._lanes(run.states):
            _write(slots, slice(low, low + 1), slots, slice(high, high + 1))
        for tensor in (run.finite, run.order, run.counts, run.at, run.trace.T):
            tensor[low].copy_(tensor[high])
        run.counts[high].zero_()
        run.at[high].zero_()

    def step(self, width: int) -> None:
        """Updates the first `width` slots once. Records the step when this width is new."""
        if self.job.model.device.type != "cuda":
            self._one(width)
            return
        if width not in self.graphs:
            self._record(width)
        self.graphs[width].replay()

    def _one(self, width: int) -> None:
        batch = self.batches(self.run.at[:width], self.run.order[:width])
        one_step(self.job, self.run, batch, width)

    def _record(self, width: int) -> None:
        """Records a step. Runs it twice first, on another stream, as libraries choose and allocate on first use; then
        restores the slots."""
        run, model = self.run, self.job.model
        model.context.ops.join(model.device)  # a recording must not wait for work that an error left unjoined
        fixed = [t for s in run.states for t in s.flat or ()] + [run.finite, run.at, run.trace]
        before = [t.clone() for t in fixed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.context.ops.compile(lambda: self._one(width))
            for _ in range(2):
                for tensor, value in zip(fixed, before, strict=True):
                    tensor.copy_(value)
                self._one(width)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(fixed, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._one(width)
        self.graphs[width] = graph


def _write(target: State, here: Any, source: State, there: Any) -> None:
    """Copies the lanes `there` of one flat state over the lanes `here` of another."""
    for a, b in zip(target.flat or (), source.flat or (), strict=True):
        a[here] = b[there]


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    here, there = sent(torch.tensor(pairs), device).unbind(1)
    return here, there


@dataclass
class Span:
    """Steps of the same width, and what happens before them, in this order."""

    width: int = 0
    steps: int = 0
    stored: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane) of lanes that are done
    loaded: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane) of lanes that begin
    moved: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


def schedule(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """Returns spans that load every lane once, run its steps and store it once. The last span only stores.

    A step is as wide as one of `widths`, where that is less than `slots`, or as `slots`.
    """
    waiting = sorted((k for k, n in enumerate(steps) if n), key=lambda k: -steps[k])
    place: dict[int, int] = {}  # slot -> lane
    left: dict[int, int] = {}  # lane -> steps
    spans: list[Span] = []
    allowed = sorted({w for w in widths if w < slots} | {slots})
    free = list(range(slots))
    while True:
        span = Span(stored=[(s, k) for s, k in place.items() if not left[k]])
        for slot, _ in span.stored:
            del place[slot]
            free.append(slot)
        free.sort()
        while waiting and free:
            place[free.pop(0)] = waiting.pop(0)
            span.loaded.append(list(place.items())[-1])
            left[span.loaded[-1][1]] = steps[span.loaded[-1][1]]
        spans.append(span)
        if not place:
            return spans
        span.width = next(w for w in allowed if w >= len(place))
        for high in sorted(s for s in place if s >= span.width):
            low = free.pop(0)  # all remaining lanes fit below the width
            place[low] = place.pop(high)
            free.append(high)
            span.moved.append((high, low))
        span.steps = min(left[k] for k in place.values())
        for k in place.values():
            left[k] -= span.steps


def cheapest(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """Returns the `schedule` in the number of slots that costs least."""
    choices = sorted({w for w in widths if 0 < w < slots} | {slots})
    return min((schedule(steps, w, widths) for w in choices), key=price)


def price(spans: Sequence[Span]) -> int:
    return sum(s.steps * (STEP + s.width) for s in spans)


def waste(steps: Sequence[int], spans: Sequence[Span]) -> tuple[int, int]:
    """Returns the steps of all lanes, and the steps of empty slots."""
    useful = sum(steps)
    return useful, sum(s.width * s.steps for s in spans) - useful
