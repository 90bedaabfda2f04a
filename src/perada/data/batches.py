"""Batches of exactly B for every lane, from seeded permutations of each client's samples."""

import copy
import itertools
import math
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..lanes import Batch, key_of, ops_for, rng_of
from .federation import Federation
from .source import Indices


def steps_of(samples: int, batch: int, epochs: int) -> int:
    """Returns `epochs · max(1, ceil(n/B))`."""
    return epochs * max(1, math.ceil(samples / batch))


def sample_stream(train: Indices, length: int, *key: int | str) -> Indices:
    """Returns `length` samples: one permutation of `train` after another, each with its own generator."""
    rounds = math.ceil(length / len(train))
    stream = [rng_of(*key, "permutation", i).permutation(train) for i in range(rounds)]
    return np.concatenate(stream)[:length]


class ClientBatches:
    """Makes the batches of lanes: lane k trains on the data of client `lane_clients[k]`.

    What a client sees depends on (seed, round, its name, step) alone: not on the method, the lane's purpose, or the
    other clients. It does not depend on its number either, because alone on its own machine it is number 0.
    """

    def __init__(
        self,
        federation: Federation,
        lane_clients: Sequence[int],
        steps: Sequence[int],
        batch: int,
        seed: int,
        round: int,
        dtype: torch.dtype,
    ) -> None:
        self.federation, self.dtype = federation, dtype
        self.ahead: tuple[int, list[int], Future[Tensor]] | None = None
        clients = sorted(set(lane_clients))
        longest = {c: max(s for s, lane in zip(steps, lane_clients, strict=True) if lane == c) for c in clients}
        try:
            index = np.zeros((len(clients), max(steps, default=0), batch), np.int64)
        except ValueError as error:  # numpy cannot even count them
            raise MemoryError(f"{max(steps)} steps are too many for one round: lower Train.epochs") from error
        for row, c in enumerate(clients):
            client = federation.clients[c]
            stream = sample_stream(client.train, longest[c] * batch, seed, round, client.name)
            index[row, : longest[c]] = stream.reshape(-1, batch)
        self.host = index  # [clients, steps, B]
        device = federation.device
        self.index = torch.from_numpy(index).to(device)
        self.row = torch.tensor([clients.index(c) for c in lane_clients], device=device)
        keys = [key_of(seed, round, federation.clients[c].name, "step") for c in lane_clients]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)

    def __call__(self, step: int | Tensor, lanes: Tensor) -> Batch:
        """Returns the lanes' batch at one step, or each lane's at its own."""
        ops, labels = ops_for(self.index.device), self.federation.targets
        samples, targets, keys = ops.client_batch(self.index, self.row, self.keys, labels, lanes, step)
        stream = self.federation.stream and self.federation.features is None
        fetched = self._fetched(step, lanes) if stream and isinstance(step, int) else None
        return Batch(self.federation.views(samples, keys, self.dtype, fetched), targets, None, keys)

    # What a recorded step needs (lanes/replay.py): the same tensors, overwritten.

    @property
    def capacity(self) -> int:
        """The number of steps, rounded up so that a round of other clients can use the recordings of this one."""
        return 1 << max(10, (self.index.shape[1] - 1).bit_length())

    def shape(self) -> Hashable:
        """Returns what batches must have in common to use the same recording; None if they cannot be recorded."""
        clients, _, batch = self.index.shape
        key = (id(self.federation), len(self.row), clients, self.capacity, batch)
        return None if self.federation.stream else key

    def twin(self) -> Self:
        """Returns batches with tensors of their own, with room for `capacity` steps."""
        other = copy.copy(self)
        clients, _, batch = self.index.shape
        other.index = torch.zeros(clients, self.capacity, batch, dtype=torch.int64, device=self.index.device)
        other.row, other.keys = self.row.clone(), self.keys.clone()
        return other

    def copy_(self, other: Self) -> None:
        """Overwrites these batches' tensors with those of others."""
        self.index[:, : other.index.shape[1]].copy_(other.index)
        self.row.copy_(other.row)
        self.keys.copy_(other.keys)

    # What lanes of several trainings need (lanes/pool.py).

    def merge_key(self) -> Hashable:
        """Returns what batches of several trainings must have in common to be merged; None if they cannot be."""
        f = self.federation
        kept = f.features.key if f.features else ""
        return None if f.stream else (id(f.images), id(f.targets), f.augment, self.index.shape[2], self.dtype, kept)

    def merged(self, others: Sequence[Self]) -> Self:
        """Returns the batches of the lanes of all trainings, one after another."""
        batches = [self, *others]
        result, longest = copy.copy(self), max(b.index.shape[1] for b in batches)
        result.index = torch.cat([F.pad(b.index, (0, 0, 0, longest - b.index.shape[1])) for b in batches])
        first = itertools.accumulate((len(b.index) for b in batches), initial=0)
        result.row = torch.cat([b.row + at for b, at in zip(batches, first, strict=False)])
        result.keys = torch.cat([b.keys for b in batches])
        return result

    def _fetched(self, step: int, lanes: Tensor) -> Tensor:
        """Returns the images of this step, which were requested one step ago, and requests those of the next."""
        rows = self.row[lanes].tolist()
        next_step, next_rows, pending = self.ahead or (-1, [], None)
        if (
            pending is not None and next_step == step and next_rows[: len(rows)] == rows
        ):  # finished lanes leave from the end
            images = pending.result()[: len(rows) * self.host.shape[2]]
        else:
            images = self._read(step, rows)
        if step + 1 < self.host.shape[1]:
            self.ahead = (step + 1, rows, _READER.submit(self._read, step + 1, rows))
        return images.to(self.federation.device, non_blocking=True)

    def _read(self, step: int, rows: list[int]) -> Tensor:
        images = self.federation.images[torch.from_numpy(self.host[rows, step].reshape(-1))]
        return images.pin_memory() if self.federation.device.type == "cuda" else images


_READER = ThreadPoolExecutor(1, "perada-images")  # starts its thread with the first request
