"""Training K lanes at once: one loop over ragged lanes, and SGD on top of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .gradient import Batch, Gradient, Loss, Options
from .model import LaneModel
from .replay import recorded
from .state import State, gather, sent, stack

Batches = Callable[[int, Tensor], Batch]
"""(step, lane numbers int64 `[k]`) -> their batch. Those that can be recorded (`replay.Static`) take steps int64 `[k]`,
too."""


@dataclass(frozen=True)
class Result:
    states: tuple[State, ...]
    trace: Tensor  # [steps, K], the loss of each lane at each step; NaN after a lane's last step
    finite: Tensor  # bool [K]; the last finite state is kept of a lane that stopped being so

    @property
    def state(self) -> State:
        return self.states[0]

    @property
    def failed(self) -> tuple[int, ...]:
        """Lanes that stopped being finite. To ask is to wait for the loop's end."""
        return tuple(torch.nonzero(~self.finite).flatten().tolist())


Update = Callable[[Gradient, tuple[State, ...]], tuple[State, ...]]
"""One step of a method: states of the k lanes in this step -> their new states. A tensor handed back as it
was given is left alone."""


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
    """Take lane k of all states through `steps[k]` updates. `start` is not changed; a state of one lane is shared by
    all and stays as it is.

    slots: how many lanes there is room for at once; 0 is all.
    key: says that another call with the same key, shapes and options would run the same `update`. On a GPU the steps
    of such a loop are recorded once and replayed from then on (`replay.py`), and lanes take turns in the slots;
    otherwise one group of lanes is trained after another. With a key, a loop may also be run together with others
    (`pool.py`).
    """
    check_lanes(max(s.lanes for s in start), steps=steps)
    job = Job(model, start, batches, loss, steps, update, options, key, slots)
    return alone(job) if model.pool is None or key is None or not any(steps) else model.pool.run(job)


@dataclass(frozen=True)
class Job:
    """What `loop` was asked for."""

    model: LaneModel
    start: tuple[State, ...]
    batches: Batches
    loss: Loss
    steps: Sequence[int]
    update: Update
    options: Options
    key: Hashable
    slots: int


@torch.no_grad()
def alone(job: Job) -> Result:
    """Run it."""
    lanes, steps = max(s.lanes for s in job.start), job.steps
    slots = min(job.slots or lanes, lanes)
    if any(steps):
        replay = recorded(
            job.model, job.start, job.batches, job.loss, job.update, job.options, job.key, slots
        )  # fmt: skip
        if replay is not None:
            return replay.train(job.start, job.batches, steps)
    parts = []
    for first in range(0, lanes, slots):
        at = range(first, min(first + slots, lanes))
        states = tuple(gather(s, at) if s.lanes == lanes else s for s in job.start)
        count = [steps[k] for k in at]
        parts.append(_group(job.model, states, job.batches, job.loss, count, job.update, job.options, at))
    done = tuple(
        stack(*(p.states[i] for p in parts)) if s.lanes == lanes else parts[-1].states[i]
        for i, s in enumerate(job.start)
    )
    longest = max(steps, default=0)
    trace = torch.cat([F.pad(p.trace, (0, 0, 0, longest - len(p.trace)), value=torch.nan) for p in parts], 1)
    return Result(done, trace, torch.cat([p.finite for p in parts]))


def _group(
    model: LaneModel,
    start: tuple[State, ...],
    batches: Batches,
    loss: Loss,
    steps: Sequence[int],
    update: Update,
    options: Options,
    numbers: Sequence[int],
) -> Result:
    """All at once; `numbers` are what the lanes are called.

    Lanes are sorted by their number of steps, so the active ones are always a prefix and the work shrinks
    as short lanes finish. A lane in the prefix that is finished or not finite is masked.
    """
    counts = torch.tensor(steps)
    order = torch.argsort(counts, descending=True, stable=True)
    back, lanes = torch.argsort(order), len(steps)
    states = tuple(gather(s, order) if s.lanes == lanes else s for s in start)
    dtype = next(iter(start[0].params.values())).dtype
    run = Run.of(states, torch.tensor(numbers)[order], counts[order], max(steps, default=0), dtype, model.device)
    for step in range(max(steps, default=0)):
        width = _width(int((counts > step).sum()), lanes, options.widths)
        one_step(model, run, batches(step, run.order[:width]), loss, update, options, width)
    done, here = tuple(gather(s, back) if s.lanes == lanes else s for s in run.states), back.to(model.device)
    return Result(done, run.trace[:-1, here], run.finite[here])


@dataclass
class Run:
    """A loop's tensors, a lane in each slot."""

    states: tuple[State, ...]
    finite: Tensor  # bool [K]
    order: Tensor  # int64 [K], which lane this is
    counts: Tensor  # int64 [K], its steps
    at: Tensor  # int64 [K], how many it has done
    trace: Tensor  # [steps + 1, K], its losses; the last row is nobody's

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


def one_step(
    model: LaneModel, run: Run, batch: Batch, loss: Loss, update: Update, options: Options, width: int
) -> None:
    """Updates the first `width` lanes once, in place."""
    gradient = Gradient(model, batch, loss, run.order[:width], options)
    old = run.prefix(width)
    with torch.enable_grad():
        new = update(gradient, old)
    replaced = [pair for a, b in zip(old, new, strict=True) for pair in _changed(a, b)]
    changes = [*gradient.changes, *(gradient.ops.replace(o, n) for o, n in replaced)]
    losses = torch.zeros_like(run.trace[0, :width]) if gradient.losses is None else gradient.losses
    totals = [t.to(losses.dtype) for t in (*gradient.totals, *(c.total for c in changes))]
    total = torch.stack(totals).sum(0) if totals else losses
    counts, at, finite = run.counts[:width], run.at[:width], run.finite[:width]
    moves = gradient.ops.settle(counts, at, finite, losses, total, run.trace)
    for change in changes:
        change.write(moves)


def check_lanes(lanes: int, **given: Sequence[float]) -> None:
    """Raises ValueError unless there is one value per lane."""
    for what, values in given.items():
        if len(values) != lanes:
            raise ValueError(f"{what}: {len(values)} values for {lanes} lanes")


def _width(active: int, lanes: int, widths: tuple[int, ...] | None) -> int:
    return active if widths is None else min((w for w in widths if active <= w <= lanes), default=lanes)


def _changed(old: State, new: State) -> list[tuple[Tensor, Tensor]]:
    if old.flat is not None and new.flat is not None:
        return [(o, n) for o, n in zip(old.flat, new.flat, strict=True) if o is not n and o.numel()]
    pairs = [(t, new.params[n]) for n, t in old.params.items()]
    pairs += [(t, new.buffers[n]) for n, t in old.buffers.items()]
    return [(o, n) for o, n in pairs if o is not n]
