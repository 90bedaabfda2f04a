"""Scores of predictions that notice drift, beside those of the personal models alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..client.scores import Scores, logits_on, mean_scores, scores_of
from ..data import Federation
from ..data.source import Indices
from ..lanes import LaneModel, State, rng_of
from .drift import Answer, Calibration, Drift, answer

BINS = 40  # of the picture of s
MOST = 10**12  # a larger count is not one that was written
EDGES = (-8.0, 4.0)  # of that picture, in standard deviations from home; what is beyond counts at the edge
OWN = ("local", "global", "mixed")  # test sets that every run has
NAMES = {"local": "local_test", "global": "global_test"}


@dataclass(frozen=True)
class DriftScores:
    """Scores by test set: of the personal models alone, and of the same models when they notice drift."""

    window: int
    alone: Mapping[str, Scores]
    aware: Mapping[str, Scores]
    picture: Mapping[str, list[int]] = field(default_factory=dict)  # s of home and abroad, as counts of `BINS`
    alarms: Mapping[str, dict[str, float | None]] = field(default_factory=dict)  # share of windows that drifted

    def as_dict(self) -> dict[str, Any]:
        parts = {"alone": self.alone, "aware": self.aware}
        scores = {key: {name: s.as_dict() for name, s in of.items()} for key, of in parts.items()}
        return {"window": self.window, **scores, "picture": dict(self.picture), "alarms": dict(self.alarms)}

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> DriftScores:
        """Returns what `as_dict` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        alone, aware = ({n: Scores.read(s) for n, s in written[key].items()} for key in ("alone", "aware"))
        values = [v for of in (alone, aware) for one in of.values() for v in one.per_client.values()]
        counts = [written["window"], *(n for row in written["picture"].values() for n in row)]
        if not all(v is None or (isinstance(v, int | float) and 0 <= v <= 100) for v in values):
            raise ValueError("a score that is not a share in percent")
        if not all(isinstance(n, int) and 0 <= n < MOST for n in counts) or alone.keys() != aware.keys():
            raise ValueError("a value of another kind than was written")
        picture = {name: list(row) for name, row in written["picture"].items()}
        return cls(written["window"], alone, aware, picture, dict(written["alarms"]))


class DriftScorer:
    """Scores all clients of a federation. Images come in a random order, which depends on the seed alone."""

    def __init__(
        self,
        model: LaneModel,
        personal: State,
        shared: State,
        federation: Federation,
        calibrations: Mapping[str, Calibration],
        options: Drift,
        seed: int,
    ) -> None:
        self.model, self.personal, self.shared, self.federation = model, personal, shared, federation
        self.by = [calibrations[c.name] for c in federation.clients]
        self.options, self.seed = options, seed
        self.alone, self.aware = dict[str, list[Scores]](), dict[str, list[Scores]]()
        self.picture, self.alarms = dict[str, list[int]](), dict[str, dict[str, float | None]]()

    def own(self, names: Sequence[str] = OWN) -> None:
        """Scores these of `OWN`."""
        data = self.federation
        v, w = (logits_on(self.model, lanes, data, data.test) for lanes in (self.personal, self.shared))
        targets = data.labels(data.test)
        for name in names:
            said = self.see(NAMES.get(name, name), v, w[0], targets, self.rows(name))
            if name != "mixed":
                self.picture["home" if name == "local" else "abroad"] = self._histogram(said)

    def see(self, name: str, v: Tensor, w: Tensor, targets: Tensor, rows: Sequence[Indices]) -> list[Answer]:
        """Scores one test set: logits `[clients, n, classes]` and `[n, classes]`, and each client's images in order."""
        said, alone, wanted = [], [], []
        for k, row in enumerate(rows):
            at = torch.from_numpy(row).to(w.device)
            said.append(answer(self.by[k], v[k, at], w[at], self.options))
            alone.append(v[k, at])
            wanted.append(targets[at])
        self.alone.setdefault(name, []).append(scores_of(self.federation, alone, wanted))
        aware = [one.probabilities for one in said]
        self.aware.setdefault(name, []).append(scores_of(self.federation, aware, wanted))
        shares = [one.verdict.drifted.double().mean() for one in said]
        clients = (c.name for c in self.federation.clients)
        self.alarms[name] = {c: float(s) if len(r) else None for c, s, r in zip(clients, shares, rows, strict=True)}
        return said

    def see_all(self, name: str, logits: Sequence[Tensor], targets: Tensor) -> None:
        """Scores a test set that is the same for all clients; several of one name are averaged."""
        v, w = logits
        number = len(self.alone.get(name, ()))
        everything = [self._drawn(f"{name} {number}", c.name, len(targets)) for c in self.federation.clients]
        self.see(name, v, w[0], targets, everything)

    def result(self) -> DriftScores:
        """Returns the scores so far."""
        alone, aware = ({n: mean_scores(self.federation, s) for n, s in of.items()} for of in (self.alone, self.aware))
        return DriftScores(self.options.window, alone, aware, self.picture, self.alarms)

    def rows(self, name: str) -> list[Indices]:
        """Returns the images of each client in a test set, as numbers in Global-test, in the order they come."""
        rows, end = [], 0
        for client in self.federation.clients:
            home = np.arange(end, end + len(client.test))
            end += len(client.test)
            everybody = self._drawn("global", client.name, len(self.federation.test))
            if name == "mixed":  # as many of everybody's as of its own
                both = np.concatenate([home, everybody[: len(home)]])
                home = both[self._drawn(name, client.name, len(both))]
            elif name == "local":
                home = home[self._drawn(name, client.name, len(home))]
            rows.append(everybody if name == "global" else home)
        return rows

    def _drawn(self, name: str, client: str, images: int) -> Indices:
        return rng_of(self.seed, "drift", name, client).permutation(images).astype(np.int64)

    def _histogram(self, said: Sequence[Answer]) -> list[int]:
        """Returns how often s is how many standard deviations from home, over all clients."""
        parts = [
            ((one.likeness - by.mean) / by.deviation).clamp(*EDGES).cpu().numpy()
            for one, by in zip(said, self.by, strict=True)
            if by.deviation and len(one.likeness)
        ]
        values = np.concatenate(parts) if parts else np.zeros(0)
        counts, _ = np.histogram(values[np.isfinite(values)], BINS, EDGES)
        return [int(n) for n in counts]
