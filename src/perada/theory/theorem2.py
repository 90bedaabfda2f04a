"""Theorem 2: a bound on the personal models' errors, by the global model's and their distance from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .distances import error, hoeffding, interval, prediction_distance, rademacher
from .generalisation import Generalisation
from .terms import HELD_OUT, MEASURED, STATED, Bound, Term, Total


def theorem2(of: Generalisation) -> Bound:
    """Returns Theorem 2 for the personal models, as the mean over clients."""
    n, k = len(of.labels), len(of.data.classes)
    chosen = 1 - of.common.gather(-1, of.labels.unsqueeze(-1)).squeeze(-1)
    distances = prediction_distance(of.personal, of.common)
    errors = error(of.personal, of.labels)
    sure, names = f"Hoeffding, probability {1 - of.delta:g}", of.probe.names
    complexity = 8 * k * rademacher(of.parameters, n)
    terms = (
        Term(
            "risk of the global model",
            "1−g_y",
            float(chosen.mean()),
            f"mean of 1 − g(x)_y on {n} test images",
            sure,
            2.0,
            *interval(chosen, of.delta),
        ),
        Term(
            "prediction distance",
            "min{1,‖p−g‖₁}",
            float(distances.mean()),
            f"mean of min{{1, ‖p_m(x) − g(x)‖₁}} on {n} test images",
            sure,
            2.0,
            *interval((of.personal - of.common).abs().sum(-1).clamp(max=1).mean(0), of.delta),
            per_client=_by_name(names, distances),
        ),
        Term(
            "sampling",
            "√(log(1/δ)/n)",
            math.sqrt(of.log(2) / (2 * n)),
            "the theorem's formula",
            f"part of its 1 − {of.delta:g}",
            6.0,
        ),
        Term("complexity", "Rad", complexity, "4 Σ_j (Rad(P_j) + Rad(G_j)), as in the proof", "an upper bound"),
    )
    measured = float(2 * chosen.mean() + 2 * distances.mean())
    doubt = 4 * hoeffding(n, of.delta, 1)  # of a mean of (1 − g_y) + min{1, ‖p − g‖₁}, from 0 to 2
    totals = (
        Total(MEASURED, measured, "2 E(1 − g_y) + 2 min{1, ‖p − g‖₁} on the test images", False),
        Total(STATED, sum(t.share or 0.0 for t in terms), "with the sampling and complexity terms", True),
        Total(HELD_OUT, measured + doubt, "no model saw these images, so it needs no complexity term", True),
    )
    bounds = 2 * chosen.mean() + 2 * distances + doubt
    per_client = {
        name: {"prediction_distance": d, "error": e, "bound": b}
        for name, d, e, b in zip(names, distances.tolist(), errors.tolist(), bounds.tolist(), strict=True)
    }
    return Bound(2, "the personal models p_m", terms, totals, float(errors.mean()), per_client)


def _by_name(names: Sequence[str], values: Tensor) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))
