"""Is it worth joining? Per site: its personal model against the common one, and against one that was trained alone.

Each pair of models is compared on the same images, so a bootstrap resamples the images' differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..client.scores import logits_on, own_logits
from ..data import Federation
from ..data.source import Indices
from ..lanes import State, rng_of
from ..runs.run import Run

EVERYBODY = 1000  # of everybody's test images, those that are drawn for the comparison
RESAMPLES = 2000
SURE = 0.95
ALONE = "standalone"  # the method whose models are trained alone
Right = NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """By how many points one model is right more often than another, with its interval."""

    value: float
    low: float
    high: float
    images: int

    @property
    def verdict(self) -> int:
        """1 if it is better, −1 if it is worse, 0 if these images cannot tell."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        return f"{self.value:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def paired(one: Right, other: Right, seed: int = 0) -> Difference | None:
    """Returns the difference of two accuracies on the same images in points, and its bootstrap interval.

    None without images.
    """
    count = len(one)
    if not count:
        return None
    kinds = np.array([np.sum(one & ~other), np.sum(~one & other), np.sum(one == other)])
    drawn = rng_of(seed, "bootstrap").multinomial(count, kinds / count, RESAMPLES)
    points = 100 * (drawn[:, 0] - drawn[:, 1]) / count
    low, high = np.quantile(points, [(1 - SURE) / 2, (1 + SURE) / 2])
    return Difference(100 * float(kinds[0] - kinds[1]) / count, float(low), float(high), count)


@dataclass(frozen=True)
class Site:
    """One site's comparisons: against the common model and against one trained alone, where there is such a model."""

    name: str
    own: Mapping[str, Difference | None]  # by the other model, "common" or "alone"; on the site's own test images
    everybody: Mapping[str, Difference | None]

    @property
    def sentence(self) -> str:
        """What the site should know, in one sentence."""
        if not any(self.own.values()):
            return f"{self.name} has no test images, so nothing can be said."
        other = "alone" if self.own.get("alone") else "common"
        home, there = self.own[other], self.everybody.get(other)
        assert home is not None
        says, rival = (WORTH, "a model trained alone") if other == "alone" else (PERSONAL, "the common model")
        also = f", and {_points(there)} on everybody's" if there else ""
        return f"{self.name}: {says[home.verdict]}: compared with {rival}, {_points(home)} on its own images{also}."


WORTH = {
    1: "joining is worth it",
    0: "these images cannot tell whether joining is worth it",
    -1: "joining costs accuracy",
}
PERSONAL = {
    1: "its personal model is the one to use at home",
    0: "these images cannot tell its personal model from the common one",
    -1: "the common model is the one to use at home",
}


def _points(of: Difference) -> str:
    if of.low == of.high == 0:
        return f"right on the same of {of.images} images"
    how = f"{abs(of.value):.1f} points {'better' if of.value > 0 else 'worse'}" if of.value else "equally good"
    return f"{how} ({SURE:.0%}: {of.low:+.1f} to {of.high:+.1f})"


def joining(run: Run, alone: Run | None = None) -> list[Site]:
    """Returns each site's comparisons; empty for several labels per image, or for a run with nothing to compare.

    alone: a Standalone run on the same split.
    """
    data = run.federation
    others = {"common": run.experiment.global_model}
    if data.multilabel or (others["common"] is None and alone is None):
        return []
    shared = _sample(len(data.test), run.config.run.seed)
    own, everybody = _right(run, run.experiment.personal(), data, shared)
    rivals = {}
    if others["common"] is not None:
        rivals["common"] = _right(run, others["common"], data, shared)
    if alone is not None:
        same = alone.folder.about() == {**alone.folder.about(), **data.facts()}
        images = replace(data if same else alone.federation, features=None)  # its frozen stages may be others
        rivals["alone"] = _right(alone, alone.experiment.personal(), images, shared)
    return [
        Site(
            client.name,
            {name: paired(own[m], right[0][m]) for name, right in rivals.items()},
            {name: paired(everybody[m], right[1][m]) for name, right in rivals.items()},
        )
        for m, client in enumerate(data.clients)
    ]


def _sample(images: int, seed: int) -> Indices:
    """Returns the places of everybody's test images, or of a sample of them."""
    if images <= EVERYBODY:
        return np.arange(images)
    return np.sort(rng_of(seed, "joining").choice(images, EVERYBODY, replace=False))


def _right(run: Run, lanes: State, data: Federation, places: Indices) -> tuple[list[Right], list[Right]]:
    """Returns on which images each client's model is right: its own test images, and everybody's.

    data: the images as this run has them, as size and normalisation may differ.
    places: of some of everybody's test images.
    """
    model, tests, shared = run.experiment.model, [c.test for c in data.clients], data.test[places]
    at_home = own_logits(model, lanes, data, tests)
    elsewhere = logits_on(model, lanes, data, shared).expand(len(tests), -1, -1)
    return (
        [_hits(logits, data.labels(index)) for logits, index in zip(at_home, tests, strict=True)],
        [_hits(logits, data.labels(shared)) for logits in elsewhere],
    )


def _hits(logits: Tensor, targets: Tensor) -> Right:
    """Returns whether each prediction is right; one that is not finite is wrong."""
    right = (logits.argmax(-1) == targets) & torch.isfinite(logits).all(-1)
    return right.cpu().numpy()


def same_split(runs: Sequence[Run], run: Run) -> Run | None:
    """Returns the first Standalone run on the same split as a run."""
    split = run.folder.about().get("split")
    alike = (o for o in runs if o is not run and o.config.method_name == ALONE and o.clients == run.clients)
    return next((o for o in alike if split and o.folder.about().get("split") == split), None)
