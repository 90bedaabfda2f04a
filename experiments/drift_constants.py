"""Chooses the constants of `perada.Drift` on validation data alone, by the rule in docs/drift.md.

python -m experiments drift-constants RUN... [--out FILE.json]      # finished run folders: seeds of one experiment
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.client.scores import logits_on, score
from perada.lanes import rng_of
from perada.predict.calibrate import calibrated
from perada.predict.drift import Calibration, Drift, answer, label_prior, uniform_prior
from perada.runs.run import Run

WINDOWS = (1, 8, 32)
GRID = {"threshold": (2.0, 2.5, 3.0, 4.0), "mix": (0.4, 0.6, 0.8), "strength": (0.3, 1.0, 3.0)}
PILOT = Drift(threshold=2.5, mix=0.6, strength=1.0)
ALARMS, LOSS, CLOSE = 0.01, 0.3, 0.2  # items 4 and 5 of the rule


@dataclass(frozen=True)
class Client:
    """One client's half of its validation data: what it is calibrated on, and what it is measured on."""

    start: Calibration
    own: tuple[Tensor, Tensor, Tensor]  # logits of v and w and targets, to calibrate on
    home: tuple[Tensor, Tensor, Tensor]  # the rest of the own validation data
    abroad: tuple[Tensor, Tensor, Tensor]  # everybody's, without what it is calibrated on
    both: tuple[Tensor, Tensor, Tensor]  # as many of home as of abroad


def clients_of(run: Run) -> Iterator[Client]:
    """Yields the clients of a finished run, each one twice: cross-fitted by every second validation image."""
    data, experiment, whole = run.in_order(run.federation), run.experiment, run.experiment.global_model
    assert whole is not None
    lanes = experiment.personal()
    v, w = (logits_on(experiment.model, of, data, data.val).cpu() for of in (lanes, whole))
    targets, ends = data.labels(data.val).cpu(), np.cumsum([len(c.val) for c in data.clients])
    everyone = uniform_prior(len(data.classes), data.multilabel)
    for k, (client, end) in enumerate(zip(data.clients, ends, strict=True)):
        draw = rng_of(run.config.run.seed, "drift", client.name)
        index = np.arange(end - len(client.val), end)
        counts = torch.from_numpy(data.label_counts()[k])
        start = Calibration(label_prior(counts, len(client.train), data.multilabel), everyone)
        for half in (0, 1):
            own, home = index[half::2], index[1 - half :: 2]
            abroad = draw.permutation(np.setdiff1d(np.arange(len(targets)), own))
            both = draw.permutation(np.concatenate([home, abroad[: len(home)]]))
            home = draw.permutation(home)
            yield Client(start, *((v[k, i], w[0, i], targets[i]) for i in (own, home, abroad, both)))


def measured(clients: Sequence[Client], options: Drift, windows: Sequence[int] = WINDOWS) -> dict[str, dict[str, Any]]:
    """Returns accuracies in %, means over clients, and the share of home windows with an alarm, by window."""
    fitted = [calibrated(c.start, *c.own, options) for c in clients]
    found: dict[str, dict[str, Any]] = {}
    for size in windows:
        alarms, of = 0, 0
        row: dict[str, list[float]] = {"home": [], "abroad": [], "mixed": []}
        for client, by in zip(clients, fitted, strict=True):
            for name, part in (("home", client.home), ("abroad", client.abroad), ("mixed", client.both)):
                v, w, targets = part
                if not len(targets):
                    continue
                said = answer(by, v, w, options, size)
                row[name].append(score(said.probabilities, targets) or 0.0)
                if name == "home":
                    alarms, of = alarms + int(said.verdict.drifted.sum()), of + len(said.verdict.drifted)
        found[str(size)] = {**{k: float(np.mean(values)) for k, values in row.items()}, "alarms": alarms / max(1, of)}
    return found


def personal_home(clients: Sequence[Client]) -> float:
    """Returns the accuracy at home of the personal models alone."""
    return float(np.mean([score(c.home[0], c.home[2]) or 0.0 for c in clients if len(c.home[2])]))


def candidates() -> list[Drift]:
    """Returns all candidates, the pilot's constants first."""
    several = [
        replace(PILOT, threshold=threshold, mix=mix, strength=strength)
        for threshold, mix, strength in itertools.product(*GRID.values())
    ]
    return [PILOT, *(one for one in several if one != PILOT)]


def gain(found: dict[str, dict[str, Any]]) -> float:
    return float(np.mean([row[name] for row in found.values() for name in ("abroad", "mixed")]))


def chosen(rows: Sequence[tuple[Drift, dict[str, dict[str, Any]]]], alone: float) -> Drift:
    """Returns the constants that items 4 and 5 of the rule choose; the first row has the pilot's."""

    def most(found: dict[str, dict[str, Any]]) -> float:
        return max(float(row["alarms"]) for row in found.values())

    fit = [
        (options, found)
        for options, found in rows
        if most(found) <= ALARMS and all(row["home"] >= alone - LOSS for row in found.values())
    ]
    if not fit:
        fewest = min(most(found) for _, found in rows)
        fit = [(options, found) for options, found in rows if most(found) == fewest]
    best = max(gain(found) for _, found in fit)
    for options, found in fit:
        if options == rows[0][0] and gain(found) >= best - CLOSE:
            return options
    return next(options for options, found in fit if gain(found) == best)


def constants(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns what the rule chooses, and the numbers of every candidate."""
    clients = [c for run in runs for c in clients_of(run)]
    alone, rows = personal_home(clients), [(one, measured(clients, one)) for one in candidates()]
    best = chosen(rows, alone)

    def named(options: Drift) -> dict[str, float]:
        return {key: getattr(options, key) for key in GRID}

    return {
        "chosen": named(best),
        "personal_home": alone,
        "clients": len(clients) // 2,
        "candidates": [{**named(o), "gain": gain(found), "windows": found} for o, found in rows],
    }
