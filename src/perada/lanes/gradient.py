"""The gradient of many lanes' losses on one mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .fast import fast_kernels
from .layers import Norm
from .model import Group, LaneModel
from .state import State, views
from .stem import Stem

Loss = Callable[[Tensor, Tensor], Tensor]
"""logits `[K, B, classes]`, targets `[K, B, ...]` -> loss of each sample `[K, B]`."""


@dataclass(frozen=True)
class Batch:
    """One step's data for k lanes, lane-major."""

    images: Tensor | Stem  # [k·B, C, H, W]
    targets: Tensor  # [k, B] class indices, or [k, B, labels] of zeros and ones
    weights: Tensor | None  # [k, B]; None: all ones, as they are unless samples are drawn at random (Poisson sampling)
    keys: Tensor  # int64 [k], the lanes' random keys of this step


@dataclass(frozen=True)
class Options:
    """SGD's settings that are the same for all lanes. `clip` bounds the norm of a lane's gradient of the loss."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    norm: Norm = "train"
    widths: tuple[int, ...] | None = None  # lane counts a step may run with; None: exactly the active lanes


class Gradient:
    """One step's mini-batch of k lanes: `gradient(state)` may be asked as often as a method needs it."""

    def __init__(self, model: LaneModel, batch: Batch, loss: Loss, lanes: Tensor, options: Options) -> None:
        self.model, self.batch, self.loss, self.options = model, batch, loss, options
        self.lanes = lanes  # int64 [k], which lanes these are
        self.losses: Tensor | None = None  # [k], of the first call
        self.totals: list[Tensor] = []  # [k] each: a lane is finite if its numbers in all of them are
        self.pending: list[Callable[[Tensor], None]] = []  # told which lanes move, bool [k]: they write over parameters
        self.summed: set[int] = set()  # the new tensors (their id) whose totals are there already
        self.flat: Tensor | None = None  # the last call's gradients side by side, as the parameters lie

    def __call__(self, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
        """Gradients of the lanes' mean losses, clipped and with weight decay, and the state with its running
        statistics brought up to date. `of` leaves out all that is not in this group, statistics too."""
        fresh, slots = self._copy(state), {}
        params = fresh.params
        names = [n for n in params if n not in self.model.inert and (of is None or n in of.params)]
        leaves = [params[n].requires_grad_() for n in names]
        if fresh.flat is not None:
            self.flat = torch.zeros_like(fresh.flat[0])
            slots = views(params, self.flat)
            for name in names:
                params[name].slot = slots[name]  # type: ignore[attr-defined]
        logits = self.model(fresh, self.batch.images, norm=self.options.norm, dropout=self.batch.keys)
        each = self.loss(logits, self.batch.targets)
        losses = (each if self.batch.weights is None else each * self.batch.weights).mean(1)
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        kernels = fast_kernels(self.model.device)
        if kernels is not None:
            kernels.join(self.model.device)
        losses = losses.detach()
        if self.losses is None:
            self.losses = losses
        else:
            self.totals.append(losses)
        with torch.no_grad():
            grads = _collected(dict(zip(names, found, strict=True)), params, slots)
            if self.options.clip is not None:
                grads = _clipped(grads, self.options.clip)
            if self.options.weight_decay:
                grads = {n: g + self.options.weight_decay * params[n] for n, g in grads.items()}
            if slots and (self.options.clip is not None or self.options.weight_decay):
                for name, g in grads.items():
                    slots[name].copy_(g)
        for name, b in fresh.buffers.items():
            if of is not None and name not in of.buffers:
                b.copy_(state.buffers[name])
        kept = None if state.flat is None or fresh.flat is None else (state.flat[0], fresh.flat[1])
        return grads, State(state.params, fresh.buffers, kept)

    def _copy(self, state: State) -> State:
        """Parameters to take gradients by, in the type that is computed in, and statistics to write to."""
        compute = self.model.compute
        if state.flat is None:
            params = {n: p.detach() for n, p in state.params.items()}
            return State(params, {n: b.clone() for n, b in state.buffers.items()})
        held, buffers = state.flat
        copy = state.with_flat(held.to(compute) if compute else held, buffers.clone())
        return State({n: p.detach() for n, p in copy.params.items()}, copy.buffers, copy.flat)


def _collected(
    found: dict[str, Tensor | None], params: dict[str, Tensor], slots: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients, all in their slots where there are any. A kernel may have written one there itself, which shows in
    that it took the slot; then autograd has none, or one of further uses of the parameter."""
    if not slots:
        return {n: torch.zeros_like(params[n]) if g is None else g for n, g in found.items()}
    for name, g in found.items():
        written = "slot" not in params[name].__dict__
        if g is not None:
            slots[name].add_(g) if written else slots[name].copy_(g)
    return {n: slots[n] for n in found}


def _clipped(grads: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Each lane's gradient scaled down to norm `bound` where it is longer."""
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    factor = (bound / norm.clamp_min(1e-30)).clamp_max(1.0)
    return {n: g * like(factor, g) for n, g in grads.items()}


def like(per_lane: Tensor, other: Tensor) -> Tensor:
    """`[K]` -> `[K, 1, ...]` with as many dimensions as `other`."""
    return per_lane.view(-1, *([1] * (other.dim() - 1)))
