"""SGD and Adam as steps of a loop. `Ops` has their arithmetic."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .gradient import Gradient, Loss, Options
from .model import Group, LaneModel
from .ops import AdamPlan, Pulled
from .state import State, views
from .train import Batches, Result, Update, check_lanes, loop


@dataclass(frozen=True)
class Pull:
    """Adds `strength_k (p − towards)` to lane k's gradient: the gradient of `strength/2 ‖p − towards‖²`."""

    towards: State  # one lane that all share, or one per lane
    strength: Sequence[float]


Slopes = Callable[[Gradient, State, Group | None], tuple[dict[str, Tensor], State]]
"""Returns what `Gradient` returns when it is called: gradients by name, and the state with new statistics."""


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
    slopes_of: Slopes | None = None,
) -> Result:
    """Trains lane k for `steps[k]` steps of size `lr[k]`: gradient, clipping, decay, pull, momentum, in this order.

    of: the group that is trained; the rest of a lane stays as it is, including its running statistics.
    slots: how many lanes are trained at once; 0 is all.
    slopes_of: computes the gradients instead, clipped and with weight decay; such steps are not recorded.
    """
    first = next(iter(start.params.values()))
    check_lanes(start.lanes, lr=lr, **({"pull strength": pull.strength} if pull else {}))

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=first.dtype, device=first.device).unsqueeze(1)

    numbers = {"lr": column(lr)} | ({"pull": column(pull.strength)} if pull else {})
    velocity = State({n: torch.zeros_like(p) for n, p in start.params.items()} if options.momentum else {})
    centre = pull.towards.only(start.params, ()) if pull else State()
    cache: dict[str, Tensor] = {}

    def update(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
        state, speed, towards, each = states
        grads, state = gradient(state, of) if slopes_of is None else slopes_of(gradient, state, of)
        with torch.no_grad():
            slopes, params, speeds, centres = _lists(gradient, grads, state, speed, towards)
            if pull and gradient.flat is not None and "where" not in cache:  # before a step is recorded, for all steps
                cache["where"] = _where(state, grads)
            pulled = Pulled(centres, each.params["pull"], cache.get("where")) if pull else None
            gradient.changes += gradient.ops.sgd(params, slopes, each.params["lr"], pulled, options.momentum, speeds)
        return state, speed, towards, each

    begin = (start, velocity, centre, State(numbers))
    key = ("sgd", of, bool(pull)) if slopes_of is None else None
    done = loop(model, begin, batches, loss, steps, update, options, key, slots)
    return replace(done, states=done.states[:1])


def adam(rates: Sequence[float], pull: float, device: torch.device, dtype: torch.dtype) -> Update:
    """Returns Adam as a loop's step on the states of `adam_states`. After its last rate it stands still."""
    betas = 0.9, 0.999
    rows = [[r / (1 - betas[0] ** t), (1 - betas[1] ** t) ** 0.5] for t, r in enumerate([*rates, 0.0], 1)]
    plan = AdamPlan(torch.tensor(rows, dtype=dtype, device=device), betas, eps=1e-8)

    def update(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
        grads, state = gradient(states[0])
        _, first, second, count, *centre = states
        with torch.no_grad():
            slopes, params, firsts, seconds, *centres = _lists(gradient, grads, state, first, second, *centre)
            for each in centres:  # parameters without a gradient are still at their centre
                slopes = [g.to(p.dtype) + pull * (p - c) for g, p, c in zip(slopes, params, each, strict=True)]
            gradient.changes += gradient.ops.adam(params, slopes, firsts, seconds, count.params["t"], plan)
        return state, *states[1:]

    return update


def adam_states(start: State, pull: float, done: int = 0) -> tuple[State, ...]:
    """Returns what `adam` works on: parameters, first and second moments, steps done and, with a pull, its centre."""
    zeros = State({n: torch.zeros_like(p) for n, p in start.params.items()})
    device = next(iter(start.tensors())).device
    count = State({"t": torch.full((start.lanes, 1), done, dtype=torch.float64, device=device)})
    return start, zeros, zeros, count, *([State(start.params)] if pull else [])


def _lists(gradient: Gradient, grads: dict[str, Tensor], *states: State) -> list[list[Tensor]]:
    """Returns the gradients and the states' parameters of the same names; or the flat tensors that hold them all.
    An empty state gives an empty list."""
    if gradient.flat is None:
        return [list(grads.values()), *([s.params[n] for n in grads] if s.lanes else [] for s in states)]
    return [[gradient.flat], *([s.flat[0]] if s.flat else [] for s in states)]


def _where(state: State, names: Iterable[str]) -> Tensor:
    """Returns ones `[n]` where these parameters lie in the flat tensor, and zeros elsewhere."""
    assert state.flat is not None
    where = torch.zeros_like(state.flat[0][:1])
    for name, view in views(state.params, where).items():
        view.fill_(float(name in names))
    return where[0]
