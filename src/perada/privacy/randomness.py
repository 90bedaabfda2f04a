"""Where the draws and the noise come from: a secret of the operating system, or, for tests, the run's seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..lanes import key_of, rng_of
from .options import Privacy
from .sampling import Sampling

Key = tuple[int | str, ...]


class Randomness(Protocol):
    """The draws of one training. No two lanes, steps or parameters share any."""

    def positions(self, lane: int, step: int, plan: Sampling) -> np.ndarray:
        """Returns which of a lane's samples are in its batch: positions from 0, in ascending order."""

    def key(self, lane: int) -> int:
        """Returns a lane's key, for dropout and augmentation."""

    def normal(self, like: Sequence[Tensor], lanes: Sequence[int], step: int) -> list[Tensor]:
        """Returns standard normal noise for tensors `[k, ...]` of these lanes."""


def drawn(draw: np.random.Generator, plan: Sampling) -> np.ndarray:
    """Returns the positions of one draw.

    How many samples a Poisson draw has is binomial. Given the number, all subsets are equally likely, and so they are
    after a random subset of `most` was kept. So the number is drawn and cut off first.
    """
    count = min(int(draw.binomial(plan.samples, plan.probability)), plan.most)
    return np.sort(draw.choice(plan.samples, count, replace=False, shuffle=False))


def secret_generator() -> np.random.Generator:
    """Returns a generator that is seeded from the operating system."""
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))


class Secret:
    """Generators that are seeded from the operating system. Nobody can repeat them: not even this program."""

    def __init__(self, device: torch.device) -> None:
        self._host = secret_generator()
        self._device: torch.Generator | None = None
        if device.type != "cpu":  # a torch generator on the CPU would keep 32 bits of the seed
            self._device = torch.Generator(device)
            self._device.manual_seed(secrets.randbits(64) - 2**63)

    def positions(self, lane: int, step: int, plan: Sampling) -> np.ndarray:
        return drawn(self._host, plan)

    def key(self, lane: int) -> int:
        return int(self._host.integers(-(2**63), 2**63))

    def normal(self, like: Sequence[Tensor], lanes: Sequence[int], step: int) -> list[Tensor]:
        if self._device is None:
            return [on_host(self._host, t) for t in like]
        return [torch.randn(t.shape, generator=self._device, dtype=t.dtype, device=t.device) for t in like]


def randomness_of(privacy: Privacy, device: torch.device, keys: Sequence[Key]) -> Randomness:
    """Returns the source of draws that the options ask for. keys: of the lanes, for draws that can be repeated."""
    return Repeatable(keys) if privacy.deterministic else Secret(device)


class Repeatable:
    """UNSAFE: draws that follow from the lanes' keys, such as (seed, round, client's name, purpose)."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def positions(self, lane: int, step: int, plan: Sampling) -> np.ndarray:
        return drawn(rng_of(*self._keys[lane], step, "draw"), plan)

    def key(self, lane: int) -> int:
        return key_of(*self._keys[lane], "step")

    def normal(self, like: Sequence[Tensor], lanes: Sequence[int], step: int) -> list[Tensor]:
        each = [rng_of(*self._keys[lane], step, "noise") for lane in lanes]
        return [torch.stack([on_host(draw, one) for draw, one in zip(each, t, strict=True)]) for t in like]


def on_host(draw: np.random.Generator, like: Tensor) -> Tensor:
    """Returns standard normal numbers of a generator, as a tensor of this shape, type and device."""
    kind = np.float64 if like.dtype == torch.float64 else np.float32
    return torch.from_numpy(draw.standard_normal(tuple(like.shape), kind)).to(like)
