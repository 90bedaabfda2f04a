"""Theorem 1: a bound on the global model's error, by the local models' errors and the distillation distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..lanes import repeat
from .distances import (
    distillation_distance,
    error,
    hoeffding,
    mean_of_probabilities,
    prediction_distance,
    rademacher,
    risk,
)
from .generalisation import Apart, Generalisation
from .terms import HELD_OUT, MEASURED, STATED, Bound, Term, Total


def theorem1(of: Generalisation) -> Bound | None:
    """Returns Theorem 1 for the run's global model; None without public images, as Φ and TV are about them."""
    public, shift = of.probe.public, of.shift
    if public is None or shift is None:
        return None
    terms = (
        _risk(of),
        _divergence(of),
        _joint(of),
        _distance(of, public),
        _variation(of, shift),
        *_sampling(of, len(public)),
    )
    return Bound(1, "the global model g", terms, _totals(of, terms), float(error(of.common, of.labels)))


def _risk(of: Generalisation) -> Term:
    risks = {n: float(t.mean()) for n, t in zip(of.probe.names, of.local_risks("train"), strict=True) if t is not None}
    steps = f"{max(of.probe.taken_steps)} of {max(of.probe.planned_steps)} local steps from g, in memory"
    return Term(
        name="local empirical risk",
        symbol="ERR",
        value=float(np.mean(list(risks.values()))),
        estimator=f"mean of 1 − h_m(x)_y on the clients' training images; h_m: {steps}",
        confidence="exact on these images, which h_m was trained on",
        factor=2.0,
        per_client=risks,
    )


def _divergence(of: Generalisation) -> Term:
    apart = of.heterogeneity
    return Term(
        name="client heterogeneity",
        symbol="d̂",
        value=float(np.mean([2 * a.seen.value for a in apart])),
        estimator="2 × the cross-validated advantage of a logistic regression on frozen features, client against "
        "everybody: a lower estimate",
        confidence=f"each at least its low value with probability {1 - of.delta:g}; upper: {apart[0].why}",
        low=float(np.mean([2 * a.seen.low for a in apart])),
        high=float(np.mean([2 * a.high for a in apart])),
        per_client={n: 2 * a.seen.value for n, a in zip(of.probe.names, apart, strict=True)},
    )


def _joint(of: Generalisation) -> Term:
    ideal = _ideal(of)
    return Term(
        name="joint error of the best model",
        symbol="λ_m",
        value=float(np.mean(ideal)),
        estimator="the smallest sum of risks, at the client and everywhere, of g, h_m and p_m on test images: an upper "
        "estimate",
        confidence="no interval: it is a minimum over models",
        factor=2.0,
        low=0.0,
        per_client=dict(zip(of.probe.names, ideal, strict=True)),
    )


def _ideal(of: Generalisation) -> list[float]:
    """Returns an upper estimate of λ_m per client: of the best of three models at hand."""
    everywhere = [risk(of.common, of.labels), risk(of.local, of.labels), risk(of.personal, of.labels)]
    out, common = [], repeat(of.probe.common, of.probe.clients)
    models = (of.own(common, "test"), of.own_tests, of.own(of.probe.personal, "test"))
    for m, index in enumerate(of.probe.own("test")):
        said, labels = [model[m] for model in models], of.data.labels(index)
        own = [1.0 if p is None else float(risk(p, labels)) for p in said]
        elsewhere = [float(everywhere[0]), float(everywhere[1][m]), float(everywhere[2][m])]
        out.append(min(a + b for a, b in zip(own, elsewhere, strict=True)))
    return out


def _distance(of: Generalisation, public: Tensor) -> Term:
    ensemble, common = mean_of_probabilities(of.public_local), of.public_common[0].softmax(-1)
    seen = ", which g was distilled on" if of.probe.experiment.distils else ""
    return Term(
        name="ensemble distillation distance",
        symbol="Φ",
        value=float(distillation_distance(common, ensemble)),
        estimator=f"mean of ‖g − mean of h_m‖₁ in probabilities, on {len(public)} public images, running statistics",
        confidence=f"exact on these images{seen}",
        factor=2.0,
        low=0.0,
        high=2.0,
    )


def _variation(of: Generalisation, shift: Apart) -> Term:
    return Term(
        name="distance of the public images",
        symbol="TV",
        value=shift.seen.value,
        estimator="cross-validated advantage of a logistic regression on frozen features: a lower estimate",
        confidence=f"at least the low value with probability {1 - of.delta:g}; upper: {shift.why}",
        factor=4.0,
        low=shift.seen.low,
        high=shift.high,
    )


def _sampling(of: Generalisation, public: int) -> tuple[Term, ...]:
    """Returns the sampling and complexity terms of Theorem 1, with the proof's own constants."""
    clients, k = of.probe.clients, len(of.data.classes)
    sizes, count = [len(c.train) for c in of.data.clients], of.parameters
    vapnik = np.mean([4 / 3 * math.sqrt((2 * count * math.log(2 * n) + of.log(6 * clients)) / n) for n in sizes])
    drawn = np.mean([math.sqrt(of.log(6 * clients) / (2 * n)) for n in sizes])
    drawn += math.sqrt(of.log(6) / (2 * public))
    complexity = 8 * k * rademacher(count, public) + np.mean([4 * rademacher(count, n) for n in sizes])
    about = f"{count:,} trained parameters stand for the VC dimension, which is larger for deep networks"
    return (
        Term("sampling", "√(log(1/δ)/n)", float(drawn), "the theorem's formula", f"part of its 1 − {of.delta:g}", 6.0),
        Term("domain adaptation", "√(d log n/n)", float(vapnik), f"the theorem's formula; {about}", "as above", 6.0),
        Term(
            "complexity",
            "Rad",
            float(complexity),
            "4 Σ_j (Rad(H_j) + Rad(G_j)) + 4 Rad(H_m), as in the proof; a class with more parameters than images "
            "has 1/2, the most there can be",
            "an upper bound",
        ),
    )


def _totals(of: Generalisation, terms: Sequence[Term]) -> tuple[Total, ...]:
    by = {t.symbol: t for t in terms}
    names = ("ERR", "d̂", "λ_m", "Φ", "TV")
    measured = sum(by[n].share or 0.0 for n in names)
    high = measured + sum(by[n].factor * ((by[n].high or 0.0) - (by[n].value or 0.0)) for n in ("d̂", "TV"))
    stated = high + sum(t.share or 0.0 for t in terms if t.symbol not in names)
    return (
        Total(MEASURED, measured, "2 ERR + d̂ + 2 λ + 2 Φ + 4 TV with lower estimates of d̂ and TV", False),
        Total(STATED, stated, "upper estimates of d̂ and TV, and the sampling and complexity terms", True),
        Total(HELD_OUT, _held_out(of), "the same steps on test images, and Φ on the target's own images", True),
    )


def _held_out(of: Generalisation) -> float | None:
    """Returns a bound that needs neither complexity terms nor public images; None if a client has no test images.

    E(1 − g_y) ≤ E min{1, ‖g − h‖₁} + mean of E_m(1 − h_m,y) + mean of TV(μ_m, μ), each mean with its own interval.
    """
    risks = of.local_risks("test")
    own = [t for t in risks if t is not None]
    if len(own) < len(risks):
        return None
    distance = prediction_distance(of.common, of.local.mean(0))
    samples = len(own) ** 2 / sum(1 / len(t) for t in own)  # of one mean over all clients
    doubt = hoeffding(samples, of.delta / 3, 1) + hoeffding(len(of.labels), of.delta / 3, 1)
    away = float(np.mean([a.high for a in of.heterogeneity]))
    return 2 * (float(distance) + float(np.mean([float(t.mean()) for t in own])) + away + doubt)
