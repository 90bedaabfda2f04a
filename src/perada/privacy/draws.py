"""Batches by truncated Poisson sampling: every lane draws its own, so a client's copies draw independently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.federation import Federation
from ..lanes import Samples, fold, sent
from ..lanes.ops import plain
from .randomness import Randomness
from .sampling import Sampling


class PoissonBatches:
    """Makes the batches of lanes: lane k draws from the data of client `owners[k]` as `plans[k]` says.

    A sample's key depends on its position in its client's data, not on who else was drawn. So a sample changes neither
    the views nor the dropout of another.
    """

    on_host = True  # the numbers of lanes, which the draws need

    def __init__(
        self,
        federation: Federation,
        owners: Sequence[int],
        plans: Sequence[Sampling],
        randomness: Randomness,
        dtype: torch.dtype,
    ) -> None:
        self.federation, self.plans, self.randomness, self.dtype = federation, plans, randomness, dtype
        self.train = [federation.clients[c].train for c in owners]
        self.keys = torch.tensor([randomness.key(k) for k in range(len(owners))], dtype=torch.int64)

    def __call__(self, step: int | Tensor, lanes: Tensor) -> Samples:
        """Returns the lanes' samples at one step."""
        assert isinstance(step, int)
        numbers = lanes.tolist()
        positions = [self.randomness.positions(k, step, self.plans[k]) for k in numbers]
        samples = torch.from_numpy(np.concatenate([self.train[k][p] for k, p in zip(numbers, positions, strict=True)]))
        counts = tuple(len(p) for p in positions)
        own = torch.repeat_interleave(fold(self.keys[lanes], step), torch.tensor(counts))
        keys = fold(own, torch.from_numpy(np.concatenate(positions)).to(torch.int64))
        return self._batch(samples, keys, counts, tuple(numbers), step)

    def _batch(
        self, samples: Tensor, keys: Tensor, counts: tuple[int, ...], lanes: tuple[int, ...], step: int
    ) -> Samples:
        """Returns these samples, each as a lane with a batch of one."""
        fed, device = self.federation, self.federation.device
        fetched = fed.images[samples].to(device) if fed.stream and fed.features is None and len(samples) else None
        index, keys = sent(samples, device).unsqueeze(1), sent(keys, device)
        targets = fed.targets[index]
        if not len(samples):  # nobody was drawn: nothing is computed, and the noise is all
            return Samples(torch.zeros(0, device=device), targets, None, keys, counts, lanes, step)
        with plain():
            images = fed.views(index, keys, self.dtype, fetched)
        return Samples(images, targets, None, keys, counts, lanes, step)
