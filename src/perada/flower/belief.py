"""What the server takes a site's word for, and how long it waits in a round."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..lanes import State
from .messages import Refused

Number = float | list[float] | None
LEAST_S = 10.0  # seconds that a question gets where a round's time is up (less where the whole round has little)


@dataclass(frozen=True)
class Clock:
    """One end for all that a round waits for: sites to come, weights, uploads, the guard."""

    seconds: float
    end: float

    @classmethod
    def start(cls, seconds: float) -> Clock:
        return cls(seconds, time.monotonic() + seconds)

    def left(self, keep: float = 0.0) -> float:
        """Seconds to wait now; `keep` is the part of the round that what comes later shall have."""
        least = min(LEAST_S, self.seconds / 4)
        return max(least, self.end - keep * self.seconds - time.monotonic())


@dataclass
class Gathered:
    """A round's uploads, and everybody's scores of the round before."""

    uploads: dict[str, State] = field(default_factory=dict)
    numbers: dict[str, dict[str, Number]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # training stopped being finite there
    refused: dict[str, str] = field(default_factory=dict)


def why_not(error: Exception) -> str:
    """Why a reply is not believed; one that breaks its reading is the site's fault, not the run's."""
    return str(error) if isinstance(error, Refused) else f"it cannot be read ({type(error).__name__})"


def sample_count(value: Number, most: int) -> float:
    """How many samples a site says it has: they are its weight in the mean."""
    if not isinstance(value, float) or not value >= 1 or not math.isfinite(value) or value != int(value):
        raise Refused("it did not say how many samples it has (train.weighting=samples)")
    if value > most:
        raise Refused(f"it says it has {value:.6g} samples, more than {most} (rounds.max_samples)")
    return value


def guard_losses(value: Number, candidates: int) -> list[float]:
    """A site's losses of the guard's candidates; NaN is no opinion."""
    if not isinstance(value, list) or len(value) != candidates:
        raise Refused(f"{candidates} losses were asked for")
    if any(x < 0 or math.isinf(x) for x in value):
        raise Refused("a loss is negative or infinite")
    return value


def mean_loss(values: Iterable[Number]) -> float | None:
    """Of the finite ones; None where there is none."""
    known = [x for x in values if isinstance(x, float) and math.isfinite(x)]
    return math.fsum(x / len(known) for x in known) if known else None
