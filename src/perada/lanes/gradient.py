"""The gradient of many lanes' losses on one mini-batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .front import Front
from .layers import Norm, Slots
from .model import Group, LaneModel
from .ops import Change
from .state import State, like, views

Loss = Callable[[Tensor, Tensor], Tensor]
"""logits `[K, B, classes]`, targets `[K, B, ...]` -> loss of each sample `[K, B]`."""


@dataclass(frozen=True)
class Batch:
    """One step's data for k lanes, lane-major."""

    images: Front  # [k·B, C, H, W]
    targets: Tensor  # [k, B] class indices, or [k, B, labels] of zeros and ones
    weights: Tensor | None  # [k, B]; None: all ones, as always except where samples are drawn at random (Poisson)
    keys: Tensor  # int64 [k], the lanes' random keys of this step


@dataclass(frozen=True)
class Options:
    """Settings of SGD that all lanes share. `clip` bounds the norm of a lane's gradient of the loss."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    norm: Norm = "train"
    widths: tuple[int, ...] | None = None  # the lane counts that a step may have; None: exactly the active lanes


class Gradient:
    """One step of k lanes: its mini-batch, its losses, and the changes that wait for its end.

    A method calls `gradient(state)` as often as it needs.
    """

    def __init__(self, model: LaneModel, batch: Batch, loss: Loss, lanes: Tensor, options: Options) -> None:
        self.model, self.batch, self.loss, self.options = model, batch, loss, options
        self.ops = model.context.ops
        self.lanes = lanes  # int64 [k], the numbers of these lanes
        self.losses: Tensor | None = None  # [k], of the first call
        self.totals: list[Tensor] = []  # [k] each, of later calls: a lane is finite if all its totals are
        self.changes: list[Change] = []  # written when it is known which lanes move
        self.flat: Tensor | None = None  # the last call's gradients in one tensor, where the state is flat

    def __call__(self, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
        """Returns the gradients of the lanes' mean losses, clipped and with weight decay; and the state with updated
        running statistics. With `of`, only this group has gradients and new statistics."""
        fresh = self._copy(state)
        params, places = fresh.params, dict[str, Tensor]()
        names = [n for n in params if n not in self.model.inert and (of is None or n in of.params)]
        leaves = [params[n].requires_grad_() for n in names]
        if fresh.flat is not None:
            self.flat = torch.zeros_like(fresh.flat[0])
            places = views(params, self.flat)
        slots = Slots(params, {n: places[n] for n in names if places})
        batch = self.batch
        logits = self.model(fresh, batch.images, norm=self.options.norm, dropout=batch.keys, slots=slots)
        each = self.loss(logits, batch.targets)
        losses = (each if batch.weights is None else each * batch.weights).mean(1)
        slopes = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        self.ops.join(self.model.device)
        losses = losses.detach()
        if self.losses is None:
            self.losses = losses
        else:
            self.totals.append(losses)
        with torch.no_grad():
            grads = _collected(dict(zip(names, slopes, strict=True)), params, places, slots)
            if self.options.clip is not None:
                grads = _clipped(grads, self.options.clip)
            if self.options.weight_decay:
                grads = {n: g + self.options.weight_decay * params[n] for n, g in grads.items()}
            if places and (self.options.clip is not None or self.options.weight_decay):
                for name, g in grads.items():
                    places[name].copy_(g)
        for name, b in fresh.buffers.items():
            if of is not None and name not in of.buffers:
                b.copy_(state.buffers[name])
        kept = None if state.flat is None or fresh.flat is None else (state.flat[0], fresh.flat[1])
        return grads, State(state.params, fresh.buffers, kept)

    def _copy(self, state: State) -> State:
        """Returns parameters to differentiate by, in the type of computing, and statistics that may be written."""
        compute = self.model.compute
        if state.flat is None:
            params = {n: p.detach() for n, p in state.params.items()}
            return State(params, {n: b.clone() for n, b in state.buffers.items()})
        flat, buffers = state.flat
        copy = state.with_flat(flat.to(compute) if compute else flat, buffers.clone())
        return State({n: p.detach() for n, p in copy.params.items()}, copy.buffers, copy.flat)


def _collected(
    slopes: dict[str, Tensor | None], params: dict[str, Tensor], places: dict[str, Tensor], slots: Slots
) -> dict[str, Tensor]:
    """Returns the gradients, each in its place where there are places. An operation that took a parameter's slot has
    written the gradient there; autograd then has none, or that of further uses of the parameter."""
    if not places:
        return {n: torch.zeros_like(params[n]) if g is None else g for n, g in slopes.items()}
    for name, g in slopes.items():
        if g is not None:
            places[name].copy_(g) if slots.is_free(params[name]) else places[name].add_(g)
    return {n: places[n] for n in slopes}


def _clipped(grads: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Returns each lane's gradient, scaled down to norm `bound` where it is longer."""
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    factor = (bound / norm.clamp_min(1e-30)).clamp_max(1.0)
    return {n: g * like(factor, g) for n, g in grads.items()}
