"""What summary.json holds of each corruption at each severity, where `shifted` is the mean over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..client.scores import Scores
from ..data import SEVERITIES
from .files import is_number

Levels = tuple[float | None, ...]  # one score per severity, in percent


@dataclass(frozen=True)
class Shifts:
    """Scores by kind of corruption, one per severity: the mean over the clients' personal models, and the global one.

    server: empty for a method without a global model.
    """

    severities: tuple[int, ...]
    personal: Mapping[str, Levels]
    server: Mapping[str, Levels]

    @classmethod
    def of(cls, kinds: Sequence[str], severities: Sequence[int], models: Sequence[Sequence[Scores]]) -> Self:
        """Returns the means of scores on all kinds at all severities, in that order.

        models: the scores of the personal models, and those of the global one where there is one.
        """
        personal, server = [*(_by_kind(kinds, len(severities), scores) for scores in models), {}][:2]
        return cls(tuple(severities), personal, server)

    def as_dict(self) -> dict[str, Any]:
        parts = {"personal": self.personal, "global_model": self.server}
        named = {name: {kind: list(row) for kind, row in of.items()} for name, of in parts.items()}
        return {"severities": list(self.severities), **named}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Self:
        """Returns what `as_dict` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        severities = tuple(written["severities"])
        tables = [{kind: tuple(row) for kind, row in written[n].items()} for n in ("personal", "global_model")]
        rows = [row for table in tables for row in table.values()]
        scores = [value for row in rows for value in row if value is not None]
        if not set(severities) <= set(SEVERITIES) or any(len(row) != len(severities) for row in rows):
            raise ValueError("a table of another shape than was written")
        if not all(is_number(value) and 0 <= value <= 100 for value in scores):
            raise ValueError("a score that is not a share in percent")
        return cls(severities, *tables)


def _by_kind(kinds: Sequence[str], levels: int, scores: Sequence[Scores]) -> dict[str, Levels]:
    means = [None if s.mean is None else round(s.mean, 2) for s in scores]
    return {kind: tuple(means[k * levels : (k + 1) * levels]) for k, kind in enumerate(kinds)}
