"""What a measured term says of itself: its value, who estimated it, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

HELD_OUT, MEASURED, STATED = "from held-out images", "measured terms alone", "as stated"  # names of totals


@dataclass(frozen=True)
class Term:
    """One term of a bound. It enters the bound as `factor · value`."""

    name: str
    symbol: str
    value: float | None  # None where it cannot be measured
    estimator: str
    confidence: str
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    per_client: Mapping[str, float] | None = None

    @property
    def share(self) -> float | None:
        """Returns what the term adds to the bound."""
        return None if self.value is None else self.factor * self.value


@dataclass(frozen=True)
class Total:
    """A right-hand side beside the error that it is compared with."""

    name: str
    value: float | None  # None where a term is missing
    meaning: str
    holds: bool  # whether the theorem promises that the error is at most this

    @property
    def vacuous(self) -> bool | None:
        """Returns whether it says nothing: an error rate is at most 1 anyway."""
        return None if self.value is None else self.value >= 1


@dataclass(frozen=True)
class Bound:
    """A theorem's terms and totals for one model, and the error that was measured."""

    theorem: int
    model: str
    terms: tuple[Term, ...]
    totals: tuple[Total, ...]
    error: float  # on the target sample, as a share
    per_client: Mapping[str, Mapping[str, float | None]] | None = None  # of the personal models

    def term(self, symbol: str) -> Term:
        """Returns the term with this symbol."""
        return next(t for t in self.terms if t.symbol == symbol)

    def total(self, name: str) -> Total:
        """Returns the total with this name."""
        return next(t for t in self.totals if t.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Returns what `perada bounds --json` prints of it."""
        return {
            "theorem": self.theorem,
            "model": self.model,
            "terms": [asdict(t) | {"share": t.share} for t in self.terms],
            "totals": [asdict(t) | {"vacuous": t.vacuous} for t in self.totals],
            "error": self.error,
            "per_client": self.per_client,
        }
