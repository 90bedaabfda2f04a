"""SGD over K lanes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import LaneModel
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
    widths: tuple[int, ...] | None = None  # lane counts a step may run with; None, exactly the active lanes


@dataclass(frozen=True)
class Result:
    state: State
    trace: Tensor  # [steps, K], the loss of each lane at each step; NaN after a lane's last step
    failed: tuple[int, ...]  # lanes whose loss or gradient was not finite; their last finite state is kept


def sgd(
    model: LaneModel,
    start: State,
    batches: Batches,
    loss: Loss,
    lr: Sequence[float],
    steps: Sequence[int],
    pull: Pull | None = None,
    options: Options = Options(),
) -> Result:
    """Train lane k for `steps[k]` steps of size `lr[k]`. `start` is not changed.

    Lanes are sorted by their number of steps, so the active ones are always a prefix and the work shrinks
    as short lanes finish. A lane in the prefix that is finished or not finite is masked.
    """
    counts_given = {"lr": lr, "steps": steps} | ({"pull strength": pull.strength} if pull else {})
    for what, values in counts_given.items():
        if len(values) != start.lanes:
            raise ValueError(f"{what}: {len(values)} values for {start.lanes} lanes")
    order = torch.argsort(torch.tensor(steps), descending=True, stable=True)
    back = torch.argsort(order)
    run = _Run(model, gather(start, order), _sorted_pull(pull, order, start), options)
    rates = torch.tensor(lr, dtype=run.dtype)[order].to(model.device)
    counts = torch.tensor(steps)[order]
    lanes = order.to(model.device)
    trace = torch.full((max(steps, default=0), start.lanes), torch.nan, dtype=run.dtype, device=model.device)
    for step in range(trace.shape[0]):
        active = int((counts > step).sum())
        width = _width(active, start.lanes, options.widths)
        losses = run.step(batches(step, lanes[:width]), loss, rates[:width], active)
        trace[step, :active] = losses[:active]
    failed = tuple(sorted(int(k) for k in lanes[~run.finite].tolist()))
    return Result(gather(run.state, back), trace[:, back.to(trace.device)], failed)


def _width(active: int, lanes: int, widths: tuple[int, ...] | None) -> int:
    return active if widths is None else min((w for w in widths if active <= w <= lanes), default=lanes)


def _sorted_pull(pull: Pull | None, order: Tensor, start: State) -> tuple[State, Tensor] | None:
    if pull is None:
        return None
    towards = pull.towards.only(start.params, ())
    towards = towards if towards.lanes == 1 else gather(towards, order)
    first = next(iter(start.params.values()))
    return towards, torch.tensor(pull.strength, dtype=first.dtype, device=first.device)[order.to(first.device)]


class _Run:
    """The mutable part of one call of `sgd`, lanes already sorted."""

    def __init__(self, model: LaneModel, state: State, pull: tuple[State, Tensor] | None, options: Options) -> None:
        self.model, self.state, self.pull, self.options = model, state, pull, options
        self.names = [n for n in state.params if n not in model.inert]
        self.dtype = state.params[self.names[0]].dtype
        self.finite = torch.ones(state.lanes, dtype=torch.bool, device=model.device)
        self.velocity = [torch.zeros_like(state.params[n]) for n in self.names] if options.momentum else None

    def step(self, batch: Batch, loss: Loss, rates: Tensor, active: int) -> Tensor:
        """One step of the first `len(rates)` lanes, of which the first `active` count; returns losses."""
        width = rates.shape[0]
        params = {n: p[:width].detach() for n, p in self.state.params.items()}
        leaves = [params[n].requires_grad_() for n in self.names]
        fresh = {n: b[:width].clone() for n, b in self.state.buffers.items()}
        logits = self.model(State(params, fresh), batch.images, norm="train", dropout=batch.keys)
        losses = (loss(logits, batch.targets) * batch.weights).mean(1)
        grads = list(torch.autograd.grad(losses.sum(), leaves))
        with torch.no_grad():
            size = sum((g.flatten(1).square().sum(1) for g in grads), torch.zeros_like(losses))
            going = torch.arange(width, device=losses.device) < active
            good = losses.isfinite() & size.isfinite() & _all_finite(list(fresh.values()), losses)
            moves = going & self.finite[:width] & good
            moves = self._update(leaves, grads, size.sqrt(), rates, moves)
            self.finite[:width] &= ~going | moves
            for name, buffer in self.state.buffers.items():
                buffer[:width] = torch.where(_like(moves, buffer), fresh[name], buffer[:width])
        return losses.detach()

    def _update(self, leaves: list[Tensor], grads: list[Tensor], norms: Tensor, rates: Tensor, moves: Tensor) -> Tensor:
        """Move the lanes that may and whose new parameters are finite; returns which ones did."""
        width = rates.shape[0]
        if self.options.clip is not None:
            factor = (self.options.clip / norms.clamp_min(1e-30)).clamp_max(1.0)
            grads = [g * _like(factor, g) for g in grads]
        if self.options.weight_decay:
            torch._foreach_add_(grads, leaves, alpha=self.options.weight_decay)
        if self.pull is not None:
            towards, strength = self.pull
            for g, p, name in zip(grads, leaves, self.names, strict=True):
                centre = towards.params[name]
                g += _like(strength[:width], p) * (p - (centre if centre.shape[0] == 1 else centre[:width]))
        if self.velocity is not None:
            velocity = [v[:width] for v in self.velocity]
            torch._foreach_mul_(velocity, self.options.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        new = [torch.addcmul(p, g, _like(rates, g), value=-1.0) for p, g in zip(leaves, grads, strict=True)]
        moves = moves & _all_finite(new, norms)
        for p, n in zip(leaves, new, strict=True):
            p.copy_(torch.where(_like(moves, n), n, p))  # not a product with a mask: 0·NaN is NaN
        return moves


def _all_finite(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Boolean `[K]`: whether a lane is finite throughout. One sum a tensor is cheaper than isfinite()."""
    return sum((t.flatten(1).sum(1) * 0 for t in tensors), torch.zeros_like(like)).isfinite()


def _like(per_lane: Tensor, other: Tensor) -> Tensor:
    """`[K]` -> `[K, 1, ...]` with as many dimensions as `other`."""
    return per_lane.view(-1, *([1] * (other.dim() - 1)))
