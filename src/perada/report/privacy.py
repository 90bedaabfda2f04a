"""What a report says about differential privacy: ε per client, over rounds, and what accuracy it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..privacy.guarantee import FREE, Guarantee
from .facts import PERSONAL, Facts
from .figures import Series, Trade, curves, dots, trade
from .panels import Figure

SPLIT = "local_test"


@dataclass(frozen=True)
class PrivacyPanel:
    """The section of a page."""

    rows: list[tuple[str, Guarantee, str]]  # label, guarantee, clients that ended early
    figures: list[Figure]
    free: str = FREE


def privacy_panel(runs: Sequence[Facts]) -> PrivacyPanel | None:
    """Returns the section about privacy; None if no run has any."""
    private = [(r, r.guarantee) for r in runs if r.guarantee is not None]
    if not private:
        return None
    rows = [(r.label, guarantee, ", ".join(r.rows[-1].exhausted) if r.rows else "") for r, guarantee in private]
    return PrivacyPanel(rows, [*_per_client(runs), *_over_rounds(runs), *_against(runs)])


def _per_client(runs: Sequence[Facts]) -> list[Figure]:
    known = [(r.label, dict(r.guarantee.epsilon) if r.guarantee else {}) for r in runs]
    names = list(dict.fromkeys(name for _, of in known for name in of))
    if not names:
        return []
    return [Figure("ε per client", "a client with fewer samples pays more", dots("ε", names, known, top=None), "tall")]


def _over_rounds(runs: Sequence[Facts]) -> list[Figure]:
    lines = []
    for index, run in enumerate(runs):
        points = [(row.round, row.epsilon["mean"], None) for row in run.rows if row.epsilon]
        if points:
            lines.append(Series(run.label, index, points))
    if not lines:
        return []
    return [Figure("ε over rounds", "the mean over clients", curves("ε", lines, unit="epsilon"))]


def _against(runs: Sequence[Facts]) -> list[Figure]:
    """Returns accuracy against ε, where runs with different ε are compared: a line per method, a dot per run."""
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for run in runs:
        score, guarantee = run.score(SPLIT)[0], run.guarantee
        if score is not None and guarantee is not None and guarantee.mean is not None:
            of_method = found.setdefault(run.config.method_name, {})
            of_method.setdefault(guarantee.noise, []).append((guarantee.mean, score))
    levels = {noise for of in found.values() for noise in of}
    if len(levels) < 2:
        return []
    lines = [
        Trade(
            method,
            [dot for dots in of.values() for dot in dots],
            sorted(
                (float(np.mean([e for e, _ in dots])), float(np.mean([s for _, s in dots]))) for dots in of.values()
            ),
        )
        for method, of in found.items()
    ]
    title = f"{PERSONAL[SPLIT][0]} against ε"
    return [Figure(title, "one dot per run; a line joins the means of a method", trade(title, lines))]
