"""Batches of exactly B for every lane, from seeded permutations of each client's samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..lanes import Batch, fold, key_of, rng_of
from .federation import Federation, Indices


def steps_of(samples: int, batch: int, epochs: int) -> int:
    """`epochs · max(1, ceil(n/B))`."""
    return epochs * max(1, math.ceil(samples / batch))


def sample_stream(train: Indices, length: int, *key: int | str) -> Indices:
    """`length` samples: one permutation of `train` after another, each with its own generator."""
    rounds = math.ceil(length / len(train))
    stream = [rng_of(*key, "permutation", i).permutation(train) for i in range(rounds)]
    return np.concatenate(stream)[:length]


class ClientBatches:
    """Lane k trains on the data of client `lane_clients[k]`: (step, lanes) -> `Batch`.

    What a client sees depends on (seed, round, its name, step) alone: not on the method, on the lane's
    purpose, or on who trains beside it. Its number would not do: alone on its own machine it is number 0.
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
        clients = sorted(set(lane_clients))
        longest = {c: max(s for s, lane in zip(steps, lane_clients, strict=True) if lane == c) for c in clients}
        index = np.zeros((len(clients), max(steps, default=0), batch), np.int64)
        for row, c in enumerate(clients):
            client = federation.clients[c]
            stream = sample_stream(client.train, longest[c] * batch, seed, round, client.name)
            index[row, : longest[c]] = stream.reshape(-1, batch)
        device = federation.images.device
        self.index = torch.from_numpy(index).to(device)
        self.row = torch.tensor([clients.index(c) for c in lane_clients], device=device)
        keys = [key_of(seed, round, federation.clients[c].name, "step") for c in lane_clients]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)

    def __call__(self, step: int, lanes: Tensor) -> Batch:
        samples = self.index[self.row[lanes], step]  # [k, B]
        images = self.federation.prepare(self.federation.images[samples.flatten()], self.dtype)
        targets = self.federation.targets[samples]
        weights = torch.ones(samples.shape, dtype=self.dtype, device=samples.device)
        return Batch(images, targets, weights, fold(self.keys[lanes], step))
