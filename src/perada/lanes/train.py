"""Training K lanes at once: one loop over ragged lanes, and SGD on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .model import Group, LaneModel
from .state import State, gather

Loss = Callable[[Tensor, Tensor], Tensor]
"""logits `[K, B, classes]`, targets `[K, B, ...]` -> loss of each sample `[K, B]`."""


@dataclass(frozen=True)
class Batch:
    """One step's data for k lanes, lane-major."""

    images: Tensor  # [k·B, C, H, W]
    targets: Tensor  # [k, B] class indices, or [k, B, labels] of zeros and ones
    weights: Tensor  # [k, B], all ones unless samples are drawn at random (Poisson sampling)
    keys: Tensor  # int64 [k], the lanes' random keys of this step


Batches = Callable[[int, Tensor], Batch]
"""(step, lane numbers int64 `[k]`) -> their batch."""


@dataclass(frozen=True)
class Pull:
    """Adds `strength_k (p − towards)` to lane k's gradient: the gradient of `strength/2 ‖p − towards‖²`."""

    towards: State  # one lane, or one for each
    strength: Sequence[float]


@dataclass(frozen=True)
class Options:
    """SGD's settings that are the same for all lanes. `clip` bounds the norm of a lane's gradient of the loss."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    widths: tuple[int, ...] | None = None  # lane counts a step may run with; None: exactly the active lanes


@dataclass(frozen=True)
class Result:
    states: tuple[State, ...]
    trace: Tensor  # [steps, K], the loss of each lane at each step; NaN after a lane's last step
    failed: tuple[int, ...]  # lanes that stopped being finite; their last finite state is kept

    @property
    def state(self) -> State:
        return self.states[0]


class Gradient:
    """One step's mini-batch of k lanes: `gradient(state)` may be asked as often as a method needs it."""

    def __init__(self, model: LaneModel, batch: Batch, loss: Loss, lanes: Tensor, options: Options) -> None:
        self.model, self.batch, self.loss, self.options = model, batch, loss, options
        self.lanes = lanes  # int64 [k], which lanes these are
        self.losses: Tensor | None = None  # [k], of the first call
        self.finite = torch.ones(lanes.shape, dtype=torch.bool, device=lanes.device)

    def __call__(self, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
        """Gradients of the lanes' mean losses, clipped and with weight decay, and the state with its running
        statistics brought up to date. `of` leaves out all that is not in this group, statistics too."""
        params = {n: p.detach() for n, p in state.params.items()}
        names = [n for n in params if n not in self.model.inert and (of is None or n in of.params)]
        leaves = [params[n].requires_grad_() for n in names]
        fresh = State(params, {n: b.clone() for n, b in state.buffers.items()})
        logits = self.model(fresh, self.batch.images, norm="train", dropout=self.batch.keys)
        losses = (self.loss(logits, self.batch.targets) * self.batch.weights).mean(1)
        grads = dict(zip(names, torch.autograd.grad(losses.sum(), leaves, materialize_grads=True), strict=True))
        losses = losses.detach()
        self.finite &= losses.isfinite()
        self.losses = losses if self.losses is None else self.losses
        with torch.no_grad():
            if self.options.clip is not None:
                grads = _clipped(grads, self.options.clip)
            if self.options.weight_decay:
                grads = {n: g + self.options.weight_decay * params[n] for n, g in grads.items()}
        buffers = {n: b if of is None or n in of.buffers else state.buffers[n] for n, b in fresh.buffers.items()}
        return grads, State(state.params, buffers)


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
) -> Result:
    """Take lane k of all states through `steps[k]` updates. `start` is not changed.

    Lanes are sorted by their number of steps, so the active ones are always a prefix and the work shrinks
    as short lanes finish. A lane in the prefix that is finished or not finite is masked.
    """
    lanes = start[0].lanes
    _one_each(lanes, steps=steps)
    order = torch.argsort(torch.tensor(steps), descending=True, stable=True)
    back = torch.argsort(order)
    counts, order = torch.tensor(steps)[order], order.to(model.device)
    states = tuple(gather(s, order) for s in start)
    dtype = next(iter(start[0].params.values())).dtype
    trace = torch.full((max(steps, default=0), lanes), torch.nan, dtype=dtype, device=model.device)
    finite = torch.ones(lanes, dtype=torch.bool, device=model.device)
    for step in range(trace.shape[0]):
        active = int((counts > step).sum())
        width = _width(active, lanes, options.widths)
        gradient = Gradient(model, batches(step, order[:width]), loss, order[:width], options)
        old = tuple(s.map(lambda t, w=width: t[:w]) for s in states)  # type: ignore[misc]
        with torch.enable_grad():
            new = update(gradient, old)
        pairs = [(o, n) for a, b in zip(old, new, strict=True) for o, n in _changed(a, b)]
        going = torch.arange(width, device=model.device) < active
        moves = going & finite[:width] & gradient.finite & _all_finite([n for _, n in pairs], gradient.finite)
        finite[:width] &= ~going | moves
        for o, n in pairs:
            o.copy_(torch.where(_like(moves, n), n, o))  # not a product with a mask: 0·NaN is NaN
        if gradient.losses is not None:
            trace[step, :active] = gradient.losses[:active]
    failed = tuple(sorted(int(k) for k in order[~finite].tolist()))
    return Result(tuple(gather(s, back) for s in states), trace[:, back.to(trace.device)], failed)


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
) -> Result:
    """Train lane k for `steps[k]` steps of size `lr[k]`: gradient, clipping, decay, pull, momentum, in this order.

    `of` names the group that is trained; the rest of a lane stays as it is, running statistics too.
    """
    first = next(iter(start.params.values()))
    _one_each(start.lanes, lr=lr, **({"pull strength": pull.strength} if pull else {}))
    rates = torch.tensor(lr, dtype=first.dtype, device=first.device)
    strength = torch.tensor(pull.strength if pull else (), dtype=first.dtype, device=first.device)
    centre = pull.towards.only(start.params, ()) if pull else State()
    shared = centre.lanes == 1 and start.lanes != 1
    velocity = State({n: torch.zeros_like(p) for n, p in start.params.items()} if options.momentum else {})

    def update(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
        state, speed, towards = states[0], states[1], centre if shared else states[2]
        grads, state = gradient(state, of)
        with torch.no_grad():
            params, speeds = dict(state.params), dict(speed.params)
            for name, g in grads.items():
                p = params[name]
                if pull:
                    g = g + _like(strength[gradient.lanes], p) * (p - towards.params[name])
                if options.momentum:
                    g = speeds[name] = options.momentum * speeds[name] + g
                params[name] = torch.addcmul(p, g, _like(rates[gradient.lanes], g), value=-1.0)
        return State(params, state.buffers), State(speeds), states[2]

    begin = (start, velocity, State() if shared else centre)
    done = loop(model, begin, batches, loss, steps, update, options)
    return replace(done, states=done.states[:1])


def _one_each(lanes: int, **given: Sequence[float]) -> None:
    for what, values in given.items():
        if len(values) != lanes:
            raise ValueError(f"{what}: {len(values)} values for {lanes} lanes")


def _width(active: int, lanes: int, widths: tuple[int, ...] | None) -> int:
    return active if widths is None else min((w for w in widths if active <= w <= lanes), default=lanes)


def _changed(old: State, new: State) -> list[tuple[Tensor, Tensor]]:
    pairs = [(t, new.params[n]) for n, t in old.params.items()]
    pairs += [(t, new.buffers[n]) for n, t in old.buffers.items()]
    return [(o, n) for o, n in pairs if o is not n]


def _clipped(grads: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Each lane's gradient scaled down to norm `bound` where it is longer."""
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    factor = (bound / norm.clamp_min(1e-30)).clamp_max(1.0)
    return {n: g * _like(factor, g) for n, g in grads.items()}


def _all_finite(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Boolean `[K]`: whether a lane is finite throughout. One sum a tensor is cheaper than isfinite()."""
    sums = [t.flatten(1).sum(1) for t in tensors]
    return torch.stack(sums).isfinite().all(0) if sums else torch.ones_like(like)


def _like(per_lane: Tensor, other: Tensor) -> Tensor:
    """`[K]` -> `[K, 1, ...]` with as many dimensions as `other`."""
    return per_lane.view(-1, *([1] * (other.dim() - 1)))
