"""The protocol of predictions that notice drift: five test sets, several rules, on finished run folders.

    python -m experiments drift --data DATA --weights W            # trains PerAda, PerAda w/o KD, Ditto; then measures
    python -m experiments drift-protocol RUN... --results results  # measures run folders that are there
    python -m experiments drift-table                              # the tables of what was measured

The logits of both models are computed once per set of images, and all rules use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.client.scores import logits_of, own_logits, score
from perada.data.source import Indices
from perada.errors import InputError
from perada.lanes import mix, repeat, rng_of
from perada.runs.calibration import scorer
from perada.runs.files import jsonable, write_atomic
from perada.runs.run import Run

from .drift_rules import MIXES, Known, ceiling, corrected, features, level_shares, rules
from .results import Interval, interval, machine, paired

FOLDER = "drift-protocol"  # of results
# Name -> what it is. The first five are those of the targets; FedTHE's has the corrupted own images, too.
TESTS = {
    "Local": "a client's own test images (in-distribution)",
    "Global": "everybody's test images",
    "corrupted": "everybody's test images, corrupted",
    "others": "the other clients' test images (out-of-client)",
    "mixed": "half own test images, half everybody's",
    "own corrupted": "own test images, corrupted",
    "natural": "CIFAR-10.1, where the data are there",
}
FIVE = tuple(TESTS)[:5]
KINDS = ("gaussian_noise", "defocus_blur", "snow", "fog", "contrast", "jpeg_compression")
SEVERITY = 3
Say = Callable[[str], None]
Found = dict[str, dict[str, dict[str, list[float]]]]  # test -> rule -> client -> accuracy per set of images


def knowledge(run: Run) -> list[Known]:
    """Returns what each client knows before it sees a test image."""
    data, model = run.in_order(run.federation), run.experiment.model
    personal, shared = run.experiment.both_models()
    indices = [c.val for c in data.clients]
    v, w = own_logits(model, personal, data, indices), own_logits(model, shared, data, indices)
    means = torch.stack([features(one).mean(0) for one in w if len(one)]).mean(0)
    tables = torch.stack([level_shares(one) for one in w if len(one)]).mean(0)
    labels, by = [data.labels(i) for i in indices], run.calibrations
    return [
        Known(by[c.name], one, other, corrected(one, y), means, tables)
        for c, one, other, y in zip(data.clients, v, w, labels, strict=True)
    ]


def test_rows(run: Run) -> dict[str, list[Indices]]:
    """Returns each client's images per test, as numbers in Global-test, in the order in which they come."""
    data = run.in_order(run.federation)
    judge = scorer(run.experiment, data, run.calibrations)
    rows = {name: judge.rows(key) for name, key in (("Local", "local"), ("Global", "global"), ("mixed", "mixed"))}
    rows["others"] = [
        everyone[~np.isin(everyone, own)] for everyone, own in zip(rows["Global"], rows["Local"], strict=True)
    ]
    return rows


def measure(run: Run, windows: tuple[int, ...] = (1, 8, 32), kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Returns accuracies in % by test, rule and client, and how often windows drifted."""
    data, known, rows = run.in_order(run.federation), knowledge(run), test_rows(run)
    named, found = rules(run.config.drift, windows), Found()
    names = [c.name for c in data.clients]

    def note(test: str, rule: str, k: int, value: float | None) -> None:
        if value is not None:
            found.setdefault(test, {}).setdefault(rule, {}).setdefault(names[k], []).append(value)

    def on(tests: Mapping[str, list[Indices]], v: Tensor, w: Tensor, wise: Mapping[str, Tensor], y: Tensor) -> None:
        for test, index in tests.items():
            for k, row in enumerate(index):
                at = torch.from_numpy(row).to(w.device)
                if not len(at):
                    continue
                for rule, predict in named.items():
                    note(test, rule, k, score(predict(known[k], v[k, at], w[at]), y[at]))
                for rule, logits in wise.items():
                    note(test, rule, k, score(logits[k, at], y[at]))
                note(test, "ceiling", k, ceiling(known[k], v[k, at], w[at], y[at]))

    labels = data.labels(data.test)
    seen = _logits(run, data.take(data.test))
    on({name: rows[name] for name in ("Local", "Global", "others", "mixed")}, *seen, labels)
    alarms = _alarms(run, known, rows, *seen[:2], windows)
    for kind in kinds:
        here = {"corrupted": rows["Global"], "own corrupted": rows["Local"]}
        for copy, _ in run.test_sets(data, f"{kind}:{SEVERITY}"):
            on(here, *_logits(run, torch.from_numpy(copy)), labels)
    for extra, targets in _natural(run):
        order = [rng_of(run.config.run.seed, "natural", n).permutation(len(targets)).astype(np.int64) for n in names]
        on({"natural": order}, *_logits(run, extra), targets)
    tests = {t: {r: {n: float(np.mean(v)) for n, v in c.items()} for r, c in of.items()} for t, of in found.items()}
    return {"tests": tests, "alarms": alarms}


def _logits(run: Run, images: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the logits of the personal models, of the global one, and of fixed mixes of their weights (WiSE-FT)."""
    data, model = run.in_order(run.federation), run.experiment.model
    personal, shared = run.experiment.both_models()
    every = repeat(shared, personal.lanes)
    v, w = (logits_of(model, lanes, data, images) for lanes in (personal, shared))
    part = next(iter(personal.tensors())).new_ones(personal.lanes)
    wise = {f"weights {a:g}": logits_of(model, mix(personal, every, (1 - a) * part), data, images) for a in MIXES}
    return v, w[0], wise


def _alarms(
    run: Run, known: list[Known], rows: Mapping[str, list[Indices]], v: Tensor, w: Tensor, windows: Sequence[int]
) -> dict[str, dict[str, list[int]]]:
    """Returns by window and test how many windows drifted, and of how many, over all clients."""
    from perada.predict.drift import answer

    counts: dict[str, dict[str, list[int]]] = {}
    for size in windows:
        for test, index in rows.items():
            pair = counts.setdefault(str(size), {}).setdefault(test, [0, 0])
            for k, row in enumerate(index):
                at = torch.from_numpy(row).to(w.device)
                if len(at):
                    drifted = answer(known[k].by, v[k, at], w[at], run.config.drift, size).verdict.drifted
                    pair[0], pair[1] = pair[0] + int(drifted.sum()), pair[1] + len(drifted)
    return counts


def _natural(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields CIFAR-10.1, if its files are there."""
    try:
        for images, targets in run.test_sets(run.federation, "cifar10.1"):
            yield torch.from_numpy(images), targets
    except (InputError, OSError):
        return


def protocol(run: Run, results: Path, name: str = "", kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Measures a run folder and writes RESULTS/drift-protocol/NAME.json; returns its content."""
    name = name or run.path.resolve().name
    found = {
        "run": name,
        "method": run.config.method_name,
        "seed": run.config.run.seed,
        "data": run.federation.name,
        "rounds": run.experiment.now.round,
        "checkpoint": run.folder.checkpoint_digest(run.experiment.now.round),
        "drift": run.config.as_dict()["drift"],
        "kinds": list(kinds),
        "severity": SEVERITY,
        **measure(run, kinds=kinds),
        "device": machine(run.experiment.device),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    path = results / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(jsonable(found), indent=1) + "\n").encode())
    return found


# tables


def read(results: Path) -> list[dict[str, Any]]:
    """Returns what was measured."""
    return [json.loads(path.read_text("utf8")) for path in sorted((results / FOLDER).glob("*.json"))]


def mean_of(one: Mapping[str, Any], test: str, rule: str) -> float | None:
    """Returns the mean over clients."""
    values = one["tests"].get(test, {}).get(rule, {})
    return float(np.mean(list(values.values()))) if values else None


def five(one: Mapping[str, Any], rule: str) -> float | None:
    """Returns the mean of the five tests of the targets."""
    values = [mean_of(one, test, rule) for test in FIVE]
    return None if None in values else float(np.mean([v for v in values if v is not None]))


def table(several: Sequence[Mapping[str, Any]], method: str) -> list[str]:
    """Returns Markdown: a row per rule, a column per test; means over seeds with half of the 95% interval."""
    runs = [one for one in several if one["method"] == method]
    tests = [t for t in TESTS if any(t in one["tests"] for one in runs)]
    lines = ["| rule | " + " | ".join([*tests, "mean of five"]) + " |", "| --- |" + " ---: |" * (len(tests) + 1)]
    for rule in dict.fromkeys(rule for one in runs for rule in one["tests"]["Local"]):
        columns = [[mean_of(one, test, rule) for one in runs] for test in tests] + [[five(one, rule) for one in runs]]
        lines.append(f"| {rule} | " + " | ".join(map(_text, columns)) + " |")
    return lines


def _text(values: Sequence[float | None]) -> str:
    found = interval([v for v in values if v is not None])
    return "–" if found is None else found.text()


def gains(several: Sequence[Mapping[str, Any]], rule: str, against: str, method: str) -> dict[str, Interval]:
    """Returns a rule's difference from another per test, paired over seeds."""
    runs = {one["seed"]: one for one in several if one["method"] == method}
    out = {}
    for test in TESTS:
        ours, theirs = ({s: mean_of(one, test, r) for s, one in runs.items()} for r in (rule, against))
        if (found := paired(ours, theirs)) is not None:
            out[test] = found
    return out


def between(several: Sequence[Mapping[str, Any]], rule: str, method: str, other: str) -> dict[str, Interval]:
    """Returns the difference of two methods under one rule, paired over seeds: does distillation pay?"""
    out = {}
    for test in TESTS:
        both = [
            {one["seed"]: mean_of(one, test, rule) for one in several if one["method"] == m} for m in (method, other)
        ]
        if (found := paired(*both)) is not None:
            out[test] = found
    return out


def false_alarms(several: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Returns by window how many of all windows at home raised an alarm."""
    return {
        size: (
            sum(one["alarms"][size]["Local"][0] for one in several),
            sum(one["alarms"][size]["Local"][1] for one in several),
        )
        for size in (several[0]["alarms"] if several else ())
    }


def document(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns all tables as Markdown."""
    lines: list[str] = []
    for data in dict.fromkeys(one["data"] for one in several):
        here = [one for one in several if one["data"] == data]
        for method in dict.fromkeys(one["method"] for one in here):
            seeds = [one["seed"] for one in here if one["method"] == method]
            lines += [f"### {data}, {method}: {len(seeds)} seeds", "", *table(here, method), ""]
            for against in ("personal", "FedTHE", "BTFL"):
                shown = gains(here, "drift 32", against, method)
                words = ", ".join(f"{t} {i.text(sign=True)}" for t, i in shown.items())
                lines += [f"Windows of 32, less {against}, paired over seeds: {words}.", ""]
        if {"perada", "perada-no-kd"} <= {one["method"] for one in here}:
            for rule in ("personal", "drift 1", "drift 32"):
                shown = between(here, rule, "perada", "perada-no-kd")
                words = ", ".join(f"{t} {i.text(sign=True)}" for t, i in shown.items())
                lines += [f"PerAda less PerAda without distillation, {rule}: {words}.", ""]
        rates = ", ".join(f"{a} of {n} windows of {s}" for s, (a, n) in false_alarms(here).items())
        lines += [f"False alarms at home: {rates}.", ""]
    return lines
