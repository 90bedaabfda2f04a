"""Whether a score is worth something: how sure it is, and what a constant answer would score."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..client.interval import Z, wilson


def margin(scores: Iterable[tuple[float, int]]) -> float | None:
    """Returns by how much a mean of accuracies may be off, in points: half a 95% interval.

    scores: each client's accuracy and its number of test images. It counts the chance in these images alone. A client
    with all or nothing right counts with what Wilson's interval takes as its middle.
    """
    parts = []
    for score, images in scores:
        if images == 0:
            return None
        p = (score / 100 * images + Z**2 / 2) / (images + Z**2)
        parts.append(p * (1 - p) / images)
    return 100 * Z * math.sqrt(sum(parts)) / len(parts) if parts else None


class Worth:
    """What Local-test is worth: each client's interval, and what its most frequent training class always would score.

    Without values for a run of an older version, for multi-label data, and for data that stay at the sites.
    """

    def __init__(self, summary: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]) -> None:
        measured, constant = (_per_client(part.get("local_test")) for part in (summary, _dict(summary.get("majority"))))
        self.constant = constant if measured else {}
        known = self.constant.keys() & sizes.keys()
        self.scores = {name: (v, sizes[name][2]) for name, v in measured.items() if name in known and sizes[name][2]}

    def interval(self, client: str) -> str:
        """Returns a client's interval as text."""
        if client not in self.scores:
            return "n/a"
        score, images = self.scores[client]
        low, high = wilson(round(score / 100 * images), images) or (0.0, 100.0)
        return f"{low:.0f} to {high:.0f}"

    @property
    def lines(self) -> list[str]:
        """Returns what a table's caption says."""
        off = margin(self.scores.values())
        if off is None:
            return []
        images, mean = sum(n for _, n in self.scores.values()), sum(self.constant.values()) / len(self.constant)
        sure = f"Local-test is of {images:,} images: its mean is certain to ±{off:.1f} (95%)"
        return [f"always the client's most frequent class: Local-test {mean:.2f}", sure]


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _per_client(scores: Any) -> dict[str, float]:
    """Returns the scores that are numbers."""
    values = _dict(_dict(scores).get("per_client"))
    return {n: float(v) for n, v in values.items() if isinstance(v, int | float) and 0 <= v <= 100}
