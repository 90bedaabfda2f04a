"""Can I trust the number? Probabilities beside what is true, and labels found at thresholds from validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..client.scores import own_logits, personal_thresholds
from ..data import Federation
from ..runs.run import Run
from .charts import Path, square
from .panels import Figure
from .svg import COLOURS

BINS = 10
SPECIFICITY = 0.95
MOST = 2 * COLOURS  # curves in one figure
POINTS = 60  # of a drawn ROC curve
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Predictions in bins of their probability: how many, their mean probability, and how often they are right."""

    counts: tuple[int, ...]
    said: tuple[float | None, ...]
    true: tuple[float | None, ...]

    @classmethod
    def of(cls, probabilities: Numbers, right: Numbers) -> Reliability:
        """Sorts probabilities, and whether each was right, into `BINS` bins of equal width."""
        places = np.minimum((probabilities * BINS).astype(int), BINS - 1)
        counts = np.bincount(places, minlength=BINS)
        sums = [np.bincount(places, weights=values, minlength=BINS) for values in (probabilities, right)]
        said, true = ([float(s / n) if n else None for s, n in zip(of, counts, strict=True)] for of in sums)
        return cls(tuple(counts.tolist()), tuple(said), tuple(true))

    @property
    def error(self) -> float | None:
        """The expected calibration error: the mean distance of said and true over the predictions. None without any."""
        total = sum(self.counts)
        parts = zip(self.counts, self.said, self.true, strict=True)
        known = [n * abs(s - t) for n, s, t in parts if s is not None and t is not None]
        return sum(known) / total if total else None


@dataclass(frozen=True)
class Label:
    """How well one label is found at all sites, each with its own model."""

    name: str
    curve: tuple[tuple[float, float], ...]  # false alarms and sensitivity, as shares
    area: float | None
    sensitivity: float | None  # at `SPECIFICITY`
    chosen: tuple[float | None, float | None]  # sensitivity and specificity at each site's threshold


def roc(truth: Numbers, probabilities: Numbers) -> list[tuple[float, float]]:
    """Returns the points of a ROC curve, from (0, 0) to (1, 1); nothing for a label with one class only."""
    present = truth == 1
    if not 0 < present.sum() < len(truth):
        return []
    order = np.argsort(-probabilities, kind="stable")
    last = np.append(np.diff(probabilities[order]) != 0, True)  # equal probabilities are one step
    found, alarms = (np.cumsum(of[order])[last] / of.sum() for of in (present, ~present))
    return [(0.0, 0.0), *zip(alarms.tolist(), found.tolist(), strict=True)]


def sensitivity_at(curve: Sequence[tuple[float, float]], specificity: float = SPECIFICITY) -> float | None:
    """Returns the greatest sensitivity at no less than this specificity."""
    return max((found for alarms, found in curve if alarms <= 1 - specificity + 1e-12), default=None)


def _area(curve: Sequence[tuple[float, float]]) -> float | None:
    if not curve:
        return None
    x, y = np.array(curve).T
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))


def label_of(name: str, truth: Numbers, probabilities: Numbers, present: Numbers) -> Label:
    """Returns how well a label is found. truth: 0, 1, or NaN where it is unknown.

    present: 1 where a site's own threshold says so, and NaN where there is no threshold.
    """
    known = ~np.isnan(truth)
    curve = roc(truth[known], probabilities[known])
    judged = known & ~np.isnan(present)
    found, rejected = present[judged & (truth == 1)], 1 - present[judged & (truth == 0)]
    chosen = float(found.mean()) if len(found) else None, float(rejected.mean()) if len(rejected) else None
    return Label(name, tuple(curve), _area(curve), sensitivity_at(curve), chosen)


@dataclass(frozen=True)
class TrustPanel:
    """What the page says of one run's probabilities."""

    label: str
    error: float | None  # expected calibration error of all predictions
    clients: tuple[tuple[str, int, float | None], ...]  # test images, and the same error of each client's predictions
    labels: tuple[Label, ...]
    figures: list[Figure]


def trust_of(runs: Sequence[Run], labels: Sequence[str]) -> list[TrustPanel]:
    """Returns a panel per run: each client's own model on its own test images."""
    return [_panel(run, label) for run, label in zip(runs, labels, strict=True)]


def _panel(run: Run, label: str) -> TrustPanel:
    data, experiment = run.in_order(run.federation), run.experiment
    lanes, tests = experiment.personal(), [c.test for c in data.clients]
    logits = own_logits(experiment.model, lanes, data, tests)
    truth = [data.labels(index).double().cpu().numpy() for index in tests]
    if data.multilabel:
        shares = [one.double().sigmoid().cpu().numpy() for one in logits]
        pairs = [_known(p.ravel(), t.ravel()) for p, t in zip(shares, truth, strict=True)]
    else:
        shares = [one.double().softmax(-1).cpu().numpy() for one in logits]
        pairs = [_known(p.max(1), (p.argmax(1) == t).astype(float)) for p, t in zip(shares, truth, strict=True)]
    every = Reliability.of(*(np.concatenate(of) for of in zip(*pairs, strict=True)))
    rows = [(c.name, len(c.test), Reliability.of(*pair).error) for c, pair in zip(data.clients, pairs, strict=True)]
    figures = [_diagram(label, every, "says that a label is there" if data.multilabel else "names a class")]
    found: list[Label] = []
    if data.multilabel:
        found = _labels(run, data, shares, truth)
        figures += _curves(label, found)
    return TrustPanel(label, every.error, tuple(rows), tuple(found), figures)


def _known(probabilities: Numbers, right: Numbers) -> tuple[Numbers, Numbers]:
    """Returns those that are numbers: a label may be unknown, and a model that diverged says nothing."""
    known = np.isfinite(probabilities) & np.isfinite(right)
    return probabilities[known], right[known]


def _labels(run: Run, data: Federation, shares: Sequence[Numbers], truth: Sequence[Numbers]) -> list[Label]:
    """Returns how well each label is found, at thresholds that each site chose on its own validation data."""
    by = personal_thresholds(run.experiment.model, run.experiment.personal(), data)
    limits = [np.array([by[c.name][name] for name in data.classes], float) for c in data.clients]
    present = [np.where(np.isnan(limit), np.nan, p >= limit) for p, limit in zip(shares, limits, strict=True)]
    columns: list[Any] = [np.concatenate(of) for of in (truth, shares, present)]
    return [label_of(name, *(of[:, j] for of in columns)) for j, name in enumerate(data.classes)]


def _diagram(label: str, of: Reliability, what: str) -> Figure:
    points = [(s, t) for s, t in zip(of.said, of.true, strict=True) if s is not None and t is not None]
    most = max(of.counts) or 1
    error = "n/a" if of.error is None else f"{of.error:.3f}"
    spoken = f"Reliability diagram of {sum(of.counts)} predictions, expected calibration error {error}"
    about = f"Expected calibration error {error}. How often a model is right that {what}, by its probability. "
    about += "Grey: how many predictions."
    bars = [n / most for n in of.counts]
    drawing = square(spoken, "probability", "how often right", [Path("right", 0, points, dots=True)], bars)
    return Figure(f"Reliability of {label}", about, drawing)


def _curves(run: str, labels: Sequence[Label]) -> list[Figure]:
    shown = [one for one in labels if one.curve][:MOST]
    if not shown:
        return []
    paths = [Path(one.name, k, _thinned(one.curve)) for k, one in enumerate(shown)]
    spoken = "ROC curves: " + ", ".join(f"{one.name} {100 * (one.area or 0):.1f}" for one in shown)
    about = "One curve per label, over all sites, each with its own model."
    return [Figure(f"ROC of {run}", about, square(spoken, "false alarms", "sensitivity", paths))]


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `POINTS` points of a curve, with both ends."""
    places = np.unique(np.linspace(0, len(curve) - 1, POINTS).astype(int))
    return [curve[k] for k in places]
