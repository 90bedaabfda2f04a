"""The last round beside the round that validation data choose, over all clients and over the larger ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..client.scores import Scores
from ..methods import REGISTRY
from ..runs.moment import Evaluation
from ..runs.run import Run

SPLITS = {"local_test": "Local-test", "global_test": "Global-test"}  # of the personal models
Part = tuple[list[str], list[list[str]]]  # a table's head and rows
ABOUT = "chosen: the round with the best mean Local-validation of the personal models, so test data play no part"


def chosen_row(rows: Sequence[Evaluation]) -> Evaluation | None:
    """Returns the evaluation with the best mean score on the clients' validation data; of equals the first."""
    known = [(of.mean, row) for row in rows if (of := row.scores.get("local_val")) and of.mean is not None]
    return max(known, key=lambda one: (one[0], -one[1].round))[1] if known else None


@dataclass(frozen=True)
class Choice:
    """The scores of a method after one round per seed. every: over all clients; large: over those above a size."""

    method: str
    which: str  # last or chosen
    rounds: tuple[int, ...]  # one per seed
    every: Mapping[str, float | None]
    large: Mapping[str, float | None]
    server: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": list(self.rounds),
            **self.every,
            "large": dict(self.large),
            "global_model": self.server,
        }


@dataclass(frozen=True)
class Choices:
    rows: tuple[Choice, ...]
    above: int | None  # training images from which a client counts as large; None if all clients have as many

    @property
    def about(self) -> str:
        seeds = "; means over seeds, without ±" if any(len(one.rounds) > 1 for one in self.rows) else ""
        large = f"; ≥ {self.above}: over the clients with at least as many training images" if self.above else ""
        return f"{ABOUT}{seeds}{large}"

    @property
    def part(self) -> Part:
        """Returns the table's head and rows."""
        sizes = [f"≥ {self.above}"] if self.above is not None else []
        head = ["method", "round", *(name for title in SPLITS.values() for name in (title, *sizes)), "global model"]
        rows = []
        for one in self.rows:
            large = [one.large] if sizes else []
            values = [of[split] for split in SPLITS for of in (one.every, *large)]
            shown = ["n/a" if v is None else f"{v:.2f}" for v in (*values, one.server)]
            rows.append([one.method, f"{one.which} ({_span(one.rounds)})", *shown])
        return head, rows

    def comma_separated(self) -> str:
        """Returns every number, unrounded."""
        out = io.StringIO()
        write = csv.writer(out, lineterminator="\n")
        write.writerow(["method", "which", "rounds", "above", *SPLITS, *(f"{s}_large" for s in SPLITS), "global_model"])
        for one in self.rows:
            rounds = " ".join(map(str, one.rounds))
            values = [of[split] for of in (one.every, one.large) for split in SPLITS]
            write.writerow([one.method, one.which, rounds, self.above, *values, one.server])
        return out.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """Returns the choices by method."""
        methods = dict.fromkeys(one.method for one in self.rows)
        return {m: {one.which: one.as_dict() for one in self.rows if one.method == m} for m in methods}


def _span(rounds: Sequence[int]) -> str:
    return f"{rounds[0]}" if len(set(rounds)) == 1 else f"{min(rounds)}–{max(rounds)}"


def choices(runs: Sequence[Run], above: int | None = None, labels: Sequence[str] = ()) -> Choices:
    """Returns two rows per method: its last round, and the one that validation data choose.

    labels: of the runs; runs of one label are seeds of the same settings. By default the methods' names.
    above: training images from which a client counts as large; by default the clients' median.
    """
    sizes = {name: one[0] for name, one in runs[0].folder.about().get("clients", {}).items()}
    least = int(np.median(list(sizes.values()) or [0])) if above is None else above
    large = [name for name, size in sizes.items() if size >= least]
    found: dict[str, list[list[Evaluation]]] = {}
    for run, label in zip(runs, labels or [run.config.method_name for run in runs], strict=True):
        found.setdefault(label, []).append(run.folder.evaluations())
    names = [*(n for n in REGISTRY if n in found), *(n for n in found if n not in REGISTRY)]
    rows = []
    for name in names:
        for which, picked in (("last", [rows[-1] for rows in found[name]]), ("chosen", _chosen(found[name]))):
            if picked:
                rows.append(_choice(name, which, picked, large))
    return Choices(tuple(rows), least if len(large) < len(sizes) else None)


def _chosen(seeds: Sequence[Sequence[Evaluation]]) -> list[Evaluation]:
    """Returns each seed's choice; nothing if one has no validation scores."""
    rows = [row for of in seeds if (row := chosen_row(of)) is not None]
    return rows if len(rows) == len(seeds) else []


def _choice(name: str, which: str, rows: Sequence[Evaluation], large: Sequence[str]) -> Choice:
    return Choice(
        name,
        which,
        tuple(row.round for row in rows),
        {split: _mean([_over(row.scores.get(split)) for row in rows]) for split in SPLITS},
        {split: _mean([_over(row.scores.get(split), large) for row in rows]) for split in SPLITS},
        _mean([row.global_model for row in rows]),
    )


def _over(scores: Scores | None, clients: Sequence[str] | None = None) -> float | None:
    """Returns the mean over these clients, or over all."""
    if scores is None or clients is None:
        return scores.mean if scores else None
    return Scores({name: scores.per_client.get(name) for name in clients}).mean


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean over seeds; None if one has no value, since a mean of fewer would not compare."""
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None
