"""What a finished run guarantees: the `privacy` part of summary.json, and sentences about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

UNITS = {"sample": "sample", "client": "client"}
FREE = (
    "Averaging, distillation on public images and everything else that the server does reads only what was noised, and "
    "the public images. Such post-processing costs nothing."
)


@dataclass(frozen=True)
class Guarantee:
    """The options of a run with differential privacy, and the ε per client, where the run knows it."""

    level: str
    noise: float
    clip: float
    delta: float
    accountant: str
    epsilon: Mapping[str, float]  # per client; empty over a network at level `sample`: each site knows its own
    budget: float = 0.0

    @classmethod
    def read(cls, summary: Mapping[str, Any]) -> Self | None:
        """Returns the guarantee that a summary.json holds; None for a run without differential privacy.

        Raises ValueError, KeyError, TypeError or AttributeError for what `as_dict` does not write.
        """
        if (written := summary.get("privacy")) is None:
            return None
        known = {name: written[name] for name in ("level", "noise", "clip", "delta", "accountant", "budget")}
        numbers = [known["noise"], known["clip"], known["delta"], known["budget"]]
        epsilon = dict(written["epsilon"]["per_client"])
        if known["level"] not in UNITS or not all(type(n) in (int, float) for n in (*numbers, *epsilon.values())):
            raise ValueError("a value of another kind than was written")
        return cls(**known, epsilon=epsilon)

    def as_dict(self) -> dict[str, Any]:
        """Returns what summary.json says."""
        names = ("level", "noise", "clip", "delta", "accountant", "budget")
        spread = {"mean": self.mean, "std": self.std, "per_client": dict(self.epsilon)}
        return {**{name: getattr(self, name) for name in names}, "epsilon": spread}

    @property
    def mean(self) -> float | None:
        return float(np.mean(list(self.epsilon.values()))) if self.epsilon else None

    @property
    def std(self) -> float | None:
        return float(np.std(list(self.epsilon.values()))) if self.epsilon else None

    @property
    def most(self) -> float | None:
        return max(self.epsilon.values(), default=None)

    @property
    def mechanism(self) -> str:
        """The setting in words."""
        return f"σ = {self.noise:g}, C = {self.clip:g}, {self.accountant.upper()}"

    @property
    def sentence(self) -> str:
        """What the run guarantees, in one line."""
        of = f"differential privacy of every {UNITS[self.level]}"
        if self.mean is None:
            return f"{of}: each site knows its own ε, at δ = {self.delta:g} ({self.mechanism})"
        return (
            f"{of}: ε = {self.mean:.2f} ± {self.std:.2f} over clients, at most {self.most:.2f}, at δ = {self.delta:g} "
            f"({self.mechanism})"
        )
