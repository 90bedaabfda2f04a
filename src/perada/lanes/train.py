"""Training K lanes at once: one loop over ragged lanes. Optimisers are in optim.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .gradient import Batch, Gradient, Loss, Options
from .model import LaneModel
from .state import State, gather, sent, stack

Batches = Callable[[int, Tensor], Batch]
"""(step, lane numbers int64 `[k]`) -> their batch. Batches that can be recorded (`replay.Static`) also take a tensor of
steps int64 `[k]`. Those that are `on_host` get the numbers there, so that reading them does not wait for a GPU."""


@dataclass(frozen=True)
class Result:
    states: tuple[State, ...]
    trace: Tensor  # [steps, K], the loss of each lane at each step; NaN after a lane's last step
    finite: Tensor  # bool [K]; a lane that stops being finite keeps its last finite state

    @property
    def state(self) -> State:
        return self.states[0]

    @property
    def failed(self) -> tuple[int, ...]:
        """Returns the lanes that stopped being finite. On a GPU, waits for the end of the loop."""
        return tuple(torch.nonzero(~self.finite).flatten().tolist())


Update = Callable[[Gradient, tuple[State, ...]], tuple[State, ...]]
"""One step of a method: the states of k lanes -> their new states. A tensor that is returned as it is stays. An
optimiser may add to `gradient.changes` instead."""


@torch.no_grad()
def loop(
    model: LaneModel,
    start: tuple[State, ...],
    batches: Batches,
    loss: Loss,
    steps: Sequence[int],
    update: Update,
    options: Options = Options(),
    key: Hashable = None,
    slots: int = 0,
) -> Result:
    """Takes lane k of all states through `steps[k]` updates. `start` is not changed. A state of one lane is shared by
    all lanes and stays as it is.

    slots: how many lanes are trained at once; 0 is all.
    key: promises that a call with the same key, shapes and options runs the same `update`. On a GPU the steps of such
        a loop are recorded once and then replayed, and lanes take turns in the slots (`replay.py`). Such a loop may
        also run together with others (`pool.py`). Without a key, one group of lanes is trained after another.
    """
    job = Job(model, start, batches, loss, steps, update, options, key, slots)
    check_lanes(job.lanes, steps=steps)
    return alone(job) if model.pool is None or key is None or not any(steps) else model.pool.run(job)


@dataclass(frozen=True)
class Job:
    """The arguments of a `loop`."""

    model: LaneModel
    start: tuple[State, ...]
    batches: Batches
    loss: Loss
    steps: Sequence[int]
    update: Update
    options: Options
    key: Hashable
    slots: int

    @property
    def lanes(self) -> int:
        return max(s.lanes for s in self.start)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.start[0].params.values())).dtype


@torch.no_grad()
def alone(job: Job) -> Result:
    """Runs a job by itself."""
    from .replay import recorded  # imports this module

    lanes, longest = job.lanes, max(job.steps, default=0)
    slots = min(job.slots or lanes, lanes)
    replay = recorded(job, slots) if longest else None
    if replay is not None:
        return replay.train(job)
    parts = [_group(job, range(first, min(first + slots, lanes))) for first in range(0, lanes, slots)]
    states = tuple(stack(*(p.states[i] for p in parts)) if s.lanes == lanes else s for i, s in enumerate(job.start))
    trace = torch.cat([F.pad(p.trace, (0, 0, 0, longest - len(p.trace)), value=torch.nan) for p in parts], 1)
    return Result(states, trace, torch.cat([p.finite for p in parts]))


def _group(job: Job, numbers: Sequence[int]) -> Result:
    """Trains the lanes of these numbers at once.

    Lanes are sorted by their number of steps, so the active ones are always a prefix, and the work shrinks as short
    lanes finish. A lane in the prefix that is finished or not finite is masked.
    """
    counts = torch.tensor([job.steps[k] for k in numbers])
    order = torch.argsort(counts, descending=True, stable=True)
    back, lanes, longest = torch.argsort(order), torch.tensor(numbers)[order], int(counts.max())
    own = [s.lanes == job.lanes for s in job.start]  # the others are shared by all lanes
    states = tuple(gather(s, lanes) if one else s for s, one in zip(job.start, own, strict=True))
    run = Run.of(states, lanes, counts[order], longest, job.dtype, job.model.device)
    numbering = lanes if getattr(job.batches, "on_host", False) else run.order
    for step in range(longest):
        width = _width(int((counts > step).sum()), len(lanes), job.options.widths)
        one_step(job, run, job.batches(step, numbering[:width]), width)
    states = tuple(gather(s, back) if one else s for s, one in zip(run.states, own, strict=True))
    back = back.to(job.model.device)
    return Result(states, run.trace[:-1, back], run.finite[back])


@dataclass
class Run:
    """A loop's tensors, with one lane per slot."""

    states: tuple[State, ...]
    finite: Tensor  # bool [K]
    order: Tensor  # int64 [K], the number of the lane
    counts: Tensor  # int64 [K], its steps
    at: Tensor  # int64 [K], its steps so far
    trace: Tensor  # [steps + 1, K], its losses; the last row takes writes after a lane's last step

    @classmethod
    def of(
        cls,
        states: tuple[State, ...],
        order: Tensor,
        counts: Tensor,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Run:
        lanes = len(counts)
        finite, at = torch.ones(lanes, dtype=torch.bool, device=device), torch.zeros_like(counts, device=device)
        trace = torch.full((longest + 1, lanes), torch.nan, dtype=dtype, device=device)
        return cls(states, finite, sent(order, device), sent(counts, device), at, trace)

    def prefix(self, width: int) -> tuple[State, ...]:
        lanes = len(self.finite)
        return tuple(s.first(width) if s.lanes == lanes else s for s in self.states)


def one_step(job: Job, run: Run, batch: Batch, width: int) -> None:
    """Updates the first `width` lanes once, in place."""
    gradient = Gradient(job.model, batch, job.loss, run.order[:width], job.options)
    old = run.prefix(width)
    with torch.enable_grad():
        new = job.update(gradient, old)
    replaced = [pair for a, b in zip(old, new, strict=True) for pair in _changed(a, b)]
    changes = [*gradient.changes, *(gradient.ops.replace(o, n) for o, n in replaced)]
    losses = torch.zeros_like(run.trace[0, :width]) if gradient.losses is None else gradient.losses
    totals = [t.to(losses.dtype) for t in (*gradient.totals, *(c.total for c in changes))]
    total = torch.stack(totals).sum(0) if totals else losses
    counts, at, finite = run.counts[:width], run.at[:width], run.finite[:width]
    moves = gradient.ops.settle(counts, at, finite, losses, total, run.trace)
    for change in changes:
        change.write(moves)


def check_lanes(lanes: int, **settings: Sequence[float]) -> None:
    """Raises ValueError unless there is one value per lane."""
    for name, values in settings.items():
        if len(values) != lanes:
            raise ValueError(f"{name}: {len(values)} values for {lanes} lanes")


def _width(active: int, lanes: int, widths: tuple[int, ...] | None) -> int:
    return active if widths is None else min((w for w in widths if active <= w <= lanes), default=lanes)


def _changed(old: State, new: State) -> list[tuple[Tensor, Tensor]]:
    if old.flat is not None and new.flat is not None:
        return [(o, n) for o, n in zip(old.flat, new.flat, strict=True) if o is not n and o.numel()]
    pairs = [(t, new.params[n]) for n, t in old.params.items()]
    pairs += [(t, new.buffers[n]) for n, t in old.buffers.items()]
    return [(o, n) for o, n in pairs if o is not n]
