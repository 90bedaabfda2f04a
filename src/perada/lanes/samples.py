"""The gradient of every single sample. A lane's gradient is of its batch, so each sample is a lane of its own here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .front import Features, Front, Stem
from .gradient import Batch, Loss
from .model import Group, LaneModel
from .ops import plain
from .state import State, sent


@dataclass(frozen=True)
class Samples(Batch):
    """One step's samples for k lanes, those of the first lane first. The lanes may have different numbers of samples.

    Each sample has a key of its own, and images `[M, C, H, W]`, targets `[M, 1, ...]` as a lane with a batch of one.
    """

    counts: tuple[int, ...]  # [k], the samples of each lane
    lanes: tuple[int, ...]  # [k], the lanes' numbers
    step: int


class Piece(NamedTuple):
    """Some samples, one after another."""

    owner: Tensor  # int64 [m], the sample's lane, counted from 0
    losses: Tensor  # [m]
    grads: dict[str, Tensor]  # name -> [m, ...]


def trained_names(model: LaneModel, state: State, of: Group | None = None) -> list[str]:
    """Returns the parameters that an optimiser changes; with `of`, only those of this group.

    They are in the order of their names, because a state that was read from a file has another order than a new one.
    """
    return [n for n in sorted(state.params) if n not in model.inert and (of is None or n in of.params)]


def sample_gradients(
    model: LaneModel, state: State, batch: Samples, loss: Loss, most: int, of: Group | None = None
) -> Iterator[Piece]:
    """Yields the gradients of all samples' losses, at most `most` samples at once.

    Norms use the running statistics and leave them as they are, so no sample has a part in another one's gradient.
    """
    owner = torch.repeat_interleave(torch.arange(len(batch.counts)), torch.tensor(batch.counts, dtype=torch.int64))
    owner = sent(owner, model.device)
    params = {n: p.detach() if model.compute is None else p.detach().to(model.compute) for n, p in state.params.items()}
    rounded, names = State(params, state.buffers), trained_names(model, state, of)
    for first in range(0, len(owner), most):
        rows = slice(first, min(first + most, len(owner)))
        with plain(model.context), torch.enable_grad():
            piece = _piece(model, rounded, names, batch, loss, owner, rows)
        yield piece


def _piece(
    model: LaneModel, state: State, names: Sequence[str], batch: Samples, loss: Loss, owner: Tensor, rows: slice
) -> Piece:
    """Returns the gradients of the samples in these rows."""
    lanes = State(
        {n: t.index_select(0, owner[rows]) for n, t in state.params.items()},
        {n: t.index_select(0, owner[rows]) for n, t in state.buffers.items()},
    )
    leaves = [lanes.params[n].requires_grad_() for n in names]
    logits = model(lanes, images_of(batch.images, rows), norm="running", dropout=batch.keys[rows])
    each = loss(logits, batch.targets[rows])[:, 0]
    slopes = torch.autograd.grad(each.sum(), leaves, allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, leaves, slopes, strict=True)}
    return Piece(owner[rows], each.detach(), grads)


def images_of(images: Front, rows: slice) -> Front:
    """Returns some of the images, or of what the network's front made of them."""
    if isinstance(images, Stem):
        raise TypeError("a stem's chunks are shared by lanes, so they are not the samples of one")
    return replace(images, values=images.values[rows]) if isinstance(images, Features) else images[rows]
