"""What Theorems 1 and 2 are made of: a run's predictions and distances, each computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.public import VALIDATION
from ..data.source import Indices
from ..lanes import State
from .distances import (
    Advantage,
    advantage,
    distillation_distance,
    label_variation,
    mean_of_probabilities,
    softmax_of_mean,
)
from .probe import LEAST, Probe

COMPARED = 200  # images per client, on average, that a domain classifier sees; ten times as many public ones

OTHERS = 2  # of everybody else's images, for each of a client's, which keeps the classifiers fast


def one(lanes: State, number: int) -> State:
    """Returns one of the lanes."""
    return lanes.map(lambda t: t[number : number + 1])


@dataclass(frozen=True)
class Apart:
    """How far two distributions are from each other, as far as samples can tell."""

    seen: Advantage  # a lower estimate, by a classifier
    high: float  # an upper estimate
    why: str  # what the upper estimate rests on


class Generalisation:
    """Measures one run for Theorems 1 and 2. delta: the probability that a confidence statement fails."""

    def __init__(self, probe: Probe, delta: float) -> None:
        self.probe, self.delta, self.data = probe, delta, probe.federation
        self.labels = self.data.labels(probe.target)

    # Predictions, each computed once

    def _probabilities(self, lanes: State, index: Indices) -> Tensor:
        return self.probe.logits(lanes, self.data.take(index)).softmax(-1)

    @cached_property
    def common(self) -> Tensor:
        """g on the target sample, `[n, k]`."""
        return self._probabilities(self.probe.common, self.probe.target)[0]

    @cached_property
    def local(self) -> Tensor:
        """h_m on the target sample, `[M, n, k]`."""
        return self._probabilities(self.probe.local, self.probe.target)

    @cached_property
    def personal(self) -> Tensor:
        """p_m on the target sample, `[M, n, k]`."""
        lanes = self.probe.experiment.personal()  # one where all clients predict with the same model
        return self._probabilities(lanes, self.probe.target).expand(self.probe.clients, -1, -1)

    def own(self, lanes: State, split: str) -> list[Tensor | None]:
        """Returns what each client's lane says of its own images, `[n_m, k]`; None for a client that has none."""
        rows = enumerate(self.probe.own(split))
        return [self._probabilities(one(lanes, m), index)[0] if len(index) else None for m, index in rows]

    @cached_property
    def own_tests(self) -> list[Tensor | None]:
        """h_m on each client's own test images."""
        return self.own(self.probe.local, "test")

    def local_risks(self, split: str) -> list[Tensor | None]:
        """Returns `1 − h_m(x)_y` of each client's own images; None for a client that has none."""
        out: list[Tensor | None] = []
        seen = self.own_tests if split == "test" else self.own(self.probe.local, split)
        for own, index in zip(seen, self.probe.own(split), strict=True):
            labels = self.data.labels(index).unsqueeze(-1)
            out.append(None if own is None else 1 - own.gather(-1, labels).squeeze(-1))
        return out

    @cached_property
    def public_common(self) -> Tensor:
        """The logits of g on the public images, `[1, n, k]`."""
        assert self.probe.public is not None
        return self.probe.logits(self.probe.common, self.probe.public)

    @cached_property
    def public_local(self) -> Tensor:
        """The logits of h_m on the public images, `[M, n, k]`."""
        assert self.probe.public is not None
        return self.probe.logits(self.probe.local, self.probe.public)

    # Distances between distributions

    @cached_property
    def features(self) -> list[NDArray[np.float32]]:
        """The frozen features of each client's training images, or of the same share of each client's."""
        sizes = [len(c.train) for c in self.data.clients]
        share = min(1.0, COMPARED * len(sizes) / sum(sizes))
        most = [max(LEAST, round(share * n)) for n in sizes]
        clients = zip(self.data.clients, most, strict=True)
        per_client = [self.probe.some(c.train, n, "features", c.name) for c, n in clients]
        every = self.probe.features(self.data.take(np.concatenate(per_client)))
        return np.split(every, np.cumsum([len(i) for i in per_client])[:-1])

    @cached_property
    def heterogeneity(self) -> list[Apart]:
        """How far each client's images are from everybody's.

        A classifier tells a client's images from the others'. Everybody's distribution has a share of the client's own,
        by which the distance to it is smaller, for any class of sets.
        """
        sizes = np.array([len(c.train) for c in self.data.clients], float)
        rest = 1 - sizes / sizes.sum()
        counts = self.data.label_counts()
        dealt = self.data.options.partition == "dirichlet"
        out = []
        for m, own in enumerate(self.features):
            others = np.concatenate([f for j, f in enumerate(self.features) if j != m] or [own])
            others = others[self.probe.some(np.arange(len(others)), OTHERS * len(own), "others", m)]
            seen = advantage(own, others, self.delta, self.probe.seed)
            seen = Advantage(float(rest[m]) * seen.value, float(rest[m]) * seen.low, seen.samples)
            high, why = 1.0, "nothing better than 1 can be said of sites' own images"
            if dealt:  # images were dealt out by their labels: within a class, all clients draw from the same
                high = label_variation(counts[m], counts.sum(0), self.delta / 3 / len(sizes))[1]
                why = "the clients' label counts: images were dealt out by label, so only the labels differ"
            out.append(Apart(seen, high, why))
        return out

    @cached_property
    def shift(self) -> Apart | None:
        """How far the public images are from everybody's; None without public images."""
        if self.probe.public is None:
            return None
        public = self.probe.features(self.probe.public[: 10 * COMPARED])
        seen = advantage(np.concatenate(self.features), public, self.delta, self.probe.seed)
        if self.probe.config.distill.data == VALIDATION and self.data.options.partition == "dirichlet":
            both = (self.data.labels(i).cpu().numpy() for i in (self.data.val, self.data.test))
            counts = [np.bincount(labels, minlength=len(self.data.classes)) for labels in both]
            return Apart(seen, label_variation(counts[0], counts[1], self.delta)[1], "the label counts of both")
        return Apart(seen, 1.0, "samples cannot bound a total variation from above: 1 is all that can be said")

    # Φ, seen in several ways

    def distillation(self) -> dict[str, float | int | None] | None:
        """Returns what the distillation does to Φ in the further round; None for a run without public images."""
        public, made = self.probe.public, self.probe.student
        if public is None:
            return None
        logits, seen = self.public_local, self.probe.as_teachers(self.probe.local, public)

        def both(said: Tensor, lanes: Tensor) -> tuple[float, float]:
            own = said[0].softmax(-1)[: lanes.shape[1]]
            ensembles = mean_of_probabilities(lanes), softmax_of_mean(lanes)
            first, second = (float(distillation_distance(own, e)) for e in ensembles)
            return first, second

        out: dict[str, float | int | None] = {"images": len(public)}
        states = {"global": self.probe.common}
        if made is not None:
            states |= {"average": made[0], "student": made[1]}
            out |= {"steps": made[2], "planned_steps": self.probe.config.distill.steps}
        for name, state in states.items():
            said = self.public_common if name == "global" else self.probe.logits(state, public)
            out[f"{name}_probabilities"], out[f"{name}_logits"] = both(said, logits)
            batch = both(self.probe.as_teachers(state, public), seen)
            out[f"{name}_probabilities_public_norm"], out[f"{name}_logits_public_norm"] = batch
        ensembles = mean_of_probabilities(logits), softmax_of_mean(logits)
        out["between_averages"] = float(distillation_distance(*ensembles))
        return out

    @property
    def parameters(self) -> int:
        """The trained parameters of a model, which stand for the size of its class."""
        return self.probe.common.parameters_per_lane()

    def log(self, factor: float) -> float:
        """Returns log(factor/δ)."""
        return math.log(factor / self.delta)
