"""The checks on what a site reports, and the clock of a round."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..config import in_keys
from ..lanes import State
from .messages import Refused

Number = float | list[float] | None
MIN_WAIT_S = 10.0  # a question still gets this long after the end of a round (a quarter of a short round)


@dataclass(frozen=True)
class Clock:
    """The end of a round: one for all that it waits for (sites, weights, uploads, the guard)."""

    seconds: float
    end: float

    @classmethod
    def start(cls, seconds: float) -> Clock:
        return cls(seconds, time.monotonic() + seconds)

    def left(self, reserve: float = 0.0) -> float:
        """Returns the seconds to wait now; `reserve` is the share of the round that is kept for later questions."""
        least = min(MIN_WAIT_S, self.seconds / 4)
        return max(least, self.end - reserve * self.seconds - time.monotonic())


@dataclass
class Gathered:
    """The uploads of a round, and each site's scores of the round before."""

    uploads: dict[str, State] = field(default_factory=dict)
    numbers: dict[str, dict[str, Number]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # sites whose training diverged
    refused: dict[str, str] = field(default_factory=dict)


def why_not(error: Exception) -> str:
    """Returns why a reply is refused. A reply that breaks its reader is the site's fault, and does not end the run."""
    return in_keys(str(error)) if isinstance(error, Refused) else f"it cannot be read ({type(error).__name__})"


def sample_count(value: Number, limit: int) -> float:
    """Returns the number of samples that a site reports; it becomes the site's weight in the mean."""
    if not isinstance(value, float) or not value >= 1 or not math.isfinite(value) or value != int(value):
        raise Refused("it did not say how many samples it has (Train.weighting=samples)")
    if value > limit:
        raise Refused(f"it says it has {value:.6g} samples, more than {limit} (Rounds.max_samples)")
    return value


def guard_losses(value: Number, candidates: int) -> list[float]:
    """Returns a site's losses of the guard's candidates; NaN is an abstention."""
    if not isinstance(value, list) or len(value) != candidates:
        raise Refused(f"{candidates} losses were asked for")
    if any(x < 0 or math.isinf(x) for x in value):
        raise Refused("a loss is negative or infinite")
    return value


def mean_loss(values: Iterable[Number]) -> float | None:
    """Returns the mean of the finite losses, or None if there is none."""
    finite = [x for x in values if isinstance(x, float) and math.isfinite(x)]
    return math.fsum(x / len(finite) for x in finite) if finite else None
