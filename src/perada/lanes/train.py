"""Training K lanes at once: one loop over ragged lanes, and SGD on top of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast import fast_kernels
from .gradient import Batch, Gradient, Loss, Options, like
from .model import Group, LaneModel
from .replay import recorded
from .state import State, gather, sent, stack, views

Batches = Callable[[int, Tensor], Batch]
"""(step, lane numbers int64 `[k]`) -> their batch. Those that can be recorded (`replay.Static`) take steps int64 `[k]`,
too."""


@dataclass(frozen=True)
class Pull:
    """Adds `strength_k (p − towards)` to lane k's gradient: the gradient of `strength/2 ‖p − towards‖²`."""

    towards: State  # one lane, or one for each
    strength: Sequence[float]


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
    _one_each(max(s.lanes for s in start), steps=steps)
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
    """One update of the first `width` lanes, in place."""
    gradient = Gradient(model, batch, loss, run.order[:width], options)
    old = run.prefix(width)
    with torch.enable_grad():
        new = update(gradient, old)
    pairs = [(o, n) for a, b in zip(old, new, strict=True) for o, n in _changed(a, b)]
    gradient.totals += [n.flatten(1).sum(1) for _, n in pairs if id(n) not in gradient.summed]
    moves = _settled(run, gradient, width)
    kernels = fast_kernels(model.device)
    for write in gradient.pending:
        write(moves)
    for o, n in pairs:  # not a product with a mask: 0·NaN is NaN
        if kernels is not None and o.dim() == 2 and o.is_contiguous() and n.is_contiguous():
            kernels.keep(o, n, moves)
        else:
            o.copy_(torch.where(like(moves, n), n, o))


def _settled(run: Run, gradient: Gradient, width: int) -> Tensor:
    """Which of the first lanes move, bool `[width]`: they have steps left and are finite. Keeps their losses and counts
    the step."""
    counts, at, finite = run.counts[:width], run.at[:width], run.finite[:width]
    losses = torch.zeros_like(run.trace[0, :width]) if gradient.losses is None else gradient.losses
    total = torch.stack([t.to(losses.dtype) for t in gradient.totals]).sum(0) if gradient.totals else losses
    kernels = fast_kernels(finite.device)
    if kernels is not None:
        return kernels.settle(counts, at, finite, losses, total, run.trace)  # type: ignore[no-any-return]
    going = counts > at
    moves = going & finite & losses.isfinite() & total.isfinite()
    finite.logical_and_(~going | moves)
    run.trace[at, torch.arange(width, device=at.device)] = torch.where(going, losses, torch.nan)
    at += going
    return moves


def sgd(
    model: LaneModel,
    start: State,
    batches: Batches,
    loss: Loss,
    lr: Sequence[float],
    steps: Sequence[int],
    pull: Pull | None = None,
    options: Options = Options(),
    of: Group | None = None,
    slots: int = 0,
) -> Result:
    """Train lane k for `steps[k]` steps of size `lr[k]`: gradient, clipping, decay, pull, momentum, in this order.

    `of` names the group that is trained; the rest of a lane stays as it is, running statistics too.
    """
    first = next(iter(start.params.values()))
    _one_each(start.lanes, lr=lr, **({"pull strength": pull.strength} if pull else {}))

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=first.dtype, device=first.device).unsqueeze(1)

    numbers = {"lr": column(lr)} | ({"pull": column(pull.strength)} if pull else {})
    velocity = State({n: torch.zeros_like(p) for n, p in start.params.items()} if options.momentum else {})
    centre = pull.towards.only(start.params, ()) if pull else State()
    cache: dict[str, Tensor] = {}

    def update(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
        state, speed, towards, each = states
        grads, state = gradient(state, of)
        with torch.no_grad():
            if gradient.flat is not None and not options.momentum:
                if pull and "pulled" not in cache:  # made before a step is recorded, as it stays the same
                    cache["pulled"] = _columns(state, grads)
                towards_ = (towards.flat[0], each.params["pull"], cache["pulled"]) if pull and towards.flat else None
                return _flat_step(state, gradient, each.params["lr"], towards_), speed, towards, each
            params, speeds = dict(state.params), dict(speed.params)
            for name, g in grads.items():
                p = params[name]
                if pull:
                    g = g + like(each.params["pull"], p) * (p - towards.params[name])
                if options.momentum:
                    g = speeds[name] = options.momentum * speeds[name] + g
                params[name] = torch.addcmul(p, g, like(each.params["lr"], g), value=-1.0)
        return State(params, state.buffers), State(speeds), towards, each

    begin = (start, velocity, centre, State(numbers))
    done = loop(model, begin, batches, loss, steps, update, options, ("sgd", of, bool(pull)), slots)
    return replace(done, states=done.states[:1])


def _columns(state: State, names: Iterable[str]) -> Tensor:
    """Ones `[n]` where these parameters lie in the flat tensor, zeros elsewhere."""
    assert state.flat is not None
    where = torch.zeros_like(state.flat[0][:1])
    for name, view in views(state.params, where).items():
        view.fill_(float(name in names))
    return where[0]


def _flat_step(state: State, gradient: Gradient, rates: Tensor, pull: tuple[Tensor, ...] | None) -> State:
    """The same for all parameters at once, where they lie side by side; what is not trained has no gradient. A kernel
    writes over them when it is known which lanes move.

    pull: the centre, its strengths, and ones where it pulls."""
    assert state.flat is not None
    assert gradient.flat is not None
    p, g, kernels = state.flat[0], gradient.flat, fast_kernels(gradient.flat.device)
    if kernels is not None and p.is_contiguous():
        gradient.totals.append(kernels.length(g, rates, pull))
        gradient.pending.append(lambda moves: kernels.sgd_step(p, g, rates, pull, moves))
        return state
    g = g.to(p.dtype)
    g = g if pull is None else g + pull[1] * (p - pull[0]) * pull[2]
    return state.with_flat(torch.addcmul(p, g, rates, value=-1.0), state.flat[1])


def _one_each(lanes: int, **given: Sequence[float]) -> None:
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
