"""The gradient of every single sample. A lane's gradient is of its batch, so each sample is a lane of its own here.

Large matrices would have to be copied for every sample, and so would their gradients. They stay with their lanes:
`records.py` has the norms of their gradients, and weighted sums, without the gradients themselves.
"""

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
from .records import Record, Recorder
from .state import State, like, sent


@dataclass(frozen=True)
class Samples(Batch):
    """One step's samples for k lanes, those of the first lane first. The lanes may have different numbers of samples.

    Each sample has a key of its own, and images `[M, C, H, W]`, targets `[M, 1, ...]` as a lane with a batch of one.
    """

    counts: tuple[int, ...]  # [k], the samples of each lane
    lanes: tuple[int, ...]  # [k], the lanes' numbers
    step: int


@dataclass(frozen=True)
class Way:
    """How the gradients of single samples are computed: `ways.py` chooses."""

    most: int  # samples at once
    recorded: frozenset[str] = frozenset()  # matrices that stay with their lanes


class Piece(NamedTuple):
    """Some samples of neighbouring lanes, with their gradients or, for large matrices, records of these."""

    owner: Tensor  # int64 [m], the sample's lane, counted from 0
    present: Tensor | None  # bool [m]; where there are records, lanes are filled up to the same number of samples
    losses: Tensor  # [m]
    grads: dict[str, Tensor]  # name -> [m, ...]
    records: dict[str, Record]
    lanes: slice

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Returns the squared norms of the samples' gradients, `[m]`."""
        each = [g.to(dtype).flatten(1).square().sum(1) for g in self.grads.values()]
        return torch.stack([*each, *(r.squares(dtype) for r in self.records.values())]).sum(0)

    def add_to(self, sums: dict[str, Tensor], factors: Tensor) -> None:
        """Adds each sample's gradient times its factor to its lane's sums `[k, ...]`. A factor of 0 is as no sample."""
        for name, g in self.grads.items():
            part = (g.to(factors.dtype) * like(factors, g)).nan_to_num_(0.0, 0.0, 0.0)
            sums[name].index_add_(0, self.owner, part)
        for name, record in self.records.items():
            part = sums[name][self.lanes]
            part += record.total(factors, len(part)).view(part.shape)


def trained_names(model: LaneModel, state: State, of: Group | None = None) -> list[str]:
    """Returns the parameters that an optimiser changes; with `of`, only those of this group.

    They are in the order of their names, because a state that was read from a file has another order than a new one.
    """
    return [n for n in sorted(state.params) if n not in model.inert and (of is None or n in of.params)]


class Block(NamedTuple):
    """Some samples by number. They are on the host until `on` sends them."""

    lanes: slice
    numbers: Tensor  # int64 [m]
    owner: Tensor  # int64 [m]
    present: Tensor | None  # bool [m]; None: all are

    def on(self, device: torch.device) -> Block:
        present = None if self.present is None else sent(self.present, device)
        return Block(self.lanes, sent(self.numbers, device), sent(self.owner, device), present)


def sample_gradients(
    model: LaneModel, state: State, batch: Samples, loss: Loss, way: Way, of: Group | None = None
) -> Iterator[Piece]:
    """Yields the gradients of all samples' losses, some at a time.

    Norms use the running statistics and leave them as they are, so no sample has a part in another one's gradient.
    """
    params = {n: p.detach() if model.compute is None else p.detach().to(model.compute) for n, p in state.params.items()}
    rounded, names = State(params, state.buffers), trained_names(model, state, of)
    recorded = way.recorded & set(names)
    for block in filled(batch.counts, way.most) if recorded else compact(batch.counts, way.most):
        with plain(model.context), torch.enable_grad():
            piece = _piece(model, rounded, names, batch, loss, block.on(model.device), recorded)
        yield piece


def compact(counts: Sequence[int], most: int) -> Iterator[Block]:
    """Yields all samples in their order, `most` at a time."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    for index in torch.split(torch.arange(len(owner)), most) if len(owner) else ():
        yield Block(slice(0, len(counts)), index, owner[index], None)


def filled(counts: Sequence[int], most: int) -> Iterator[Block]:
    """Yields the samples of as many lanes as fit, each filled up to the largest one's number; or a part of one lane."""
    first, starts = 0, [sum(counts[:k]) for k in range(len(counts))]
    while first < len(counts):
        last, width = first + 1, counts[first]
        while last < len(counts) and (last + 1 - first) * max(width, counts[last]) <= most:
            width, last = max(width, counts[last]), last + 1
        owner = torch.arange(first, last).repeat_interleave(width).view(last - first, width)
        place = torch.arange(width).expand(last - first, -1)
        start, count = (torch.tensor(n[first:last]).unsqueeze(1) for n in (starts, counts))
        present = place < count
        index = torch.where(present, start + place, start.clamp_max(max(sum(counts) - 1, 0)))
        for columns in torch.split(torch.arange(width), max(1, most // (last - first))) if width else ():
            parts = (t[:, columns].reshape(-1) for t in (index, owner, present))
            yield Block(slice(first, last), *parts)
        first = last


def _piece(
    model: LaneModel,
    state: State,
    names: Sequence[str],
    batch: Samples,
    loss: Loss,
    block: Block,
    recorded: frozenset[str],
) -> Piece:
    """Returns the gradients of the samples of a block."""
    each = {n: t.index_select(0, block.owner) for n, t in state.params.items() if n not in recorded}
    shared = {n: state.params[n][block.lanes] for n in recorded}
    buffers = {n: t.index_select(0, block.owner) for n, t in state.buffers.items()}
    own = [n for n in names if n not in recorded]
    leaves, recorder = [each[n].requires_grad_() for n in own], Recorder()
    with recorder.watching(model, recorded):
        images = images_of(batch.images, block.numbers)
        logits = model(State({**each, **shared}, buffers), images, norm="running", dropout=batch.keys[block.numbers])
    losses = loss(logits.reshape(len(block.numbers), 1, -1), batch.targets[block.numbers])[:, 0]
    total = losses.sum() if block.present is None else torch.where(block.present, losses, 0.0).sum()
    slopes = torch.autograd.grad(total, [*leaves, *recorder.outputs], allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(own, leaves, slopes, strict=False)}
    records = recorder.finish(slopes[len(leaves) :])
    if records.keys() != recorded:
        raise RuntimeError(f"these layers were not called: {', '.join(sorted(recorded - records.keys()))}")
    return Piece(block.owner, block.present, losses.detach(), grads, records, block.lanes)


def images_of(images: Front, index: Tensor) -> Front:
    """Returns some of the images, or of what the network's front made of them."""
    if isinstance(images, Stem):
        raise TypeError("a stem's chunks are shared by lanes, so they are not the samples of one")
    return replace(images, values=images.values[index]) if isinstance(images, Features) else images[index]
