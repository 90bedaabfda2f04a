"""The page's pictures, from what its runs have measured."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..predict.scores import EDGES
from .charts import Spot, heat, scatter
from .facts import PERSONAL, SERVER, Facts, Holdings
from .figures import Point, Series, bars, bubbles, curves, dots, likenesses
from .groups import Group, Score, over_seeds
from .svg import human_bytes, millions

SPLITS = {**PERSONAL, **SERVER}
BUBBLES = "The area of a bubble is the number of training images; the bars are all of a client's."
TITLES = {**{n: title for n, (title, _) in PERSONAL.items()}, "mixed": "Mixed"}
ABOUT_MIXED = "half a client's own test images, half everybody's"
KINDS = {"home": "own test images", "abroad": "everybody's test images"}


class Figure(NamedTuple):
    """A picture with its caption. `kind` is a class of the page's CSS."""

    title: str
    about: str
    drawing: str  # markup, as svg.py makes it
    kind: str = ""


class Aware(NamedTuple):
    """How one run's clients do when they notice drift: rows of a table, and pictures."""

    label: str
    window: int
    rows: list[tuple[str, Score, Score]]  # test set, alone, noticing drift
    head: list[str]
    clients: list[tuple[str, list[float | None]]]  # alone and noticing drift, per test set
    figures: list[Figure]


def over_rounds(groups: Sequence[Group]) -> list[Figure]:
    """Returns the scores over rounds: a line per method. The band is over clients, or over the seeds of a method."""
    panels, seeds = [], any(g.seeds > 1 for g in groups)
    for index, split in enumerate(("local_test", "global_test", "global_model")):
        lines = [
            Series(g.label, i if len(groups) > 1 else index, _banded(g, split, seeds), g.partial(split))
            for i, g in enumerate(groups)
        ]
        if any(s.known for s in lines):
            title, about = SPLITS[split]
            band = True if seeds else None
            panels.append(Figure(title, f"{about}{_hollow(lines)}", curves(title, lines, band=band)))
    return panels


def _banded(group: Group, split: str, seeds: bool) -> list[Point]:
    """Returns the points of a line. Beside means over seeds, a single run has no band: its own is over clients."""
    points = group.points(split)
    return [(r, v, None) for r, v, _ in points] if seeds and group.seeds == 1 else points


def _hollow(lines: Sequence[Series]) -> str:
    """Returns what the hollow dots of a figure mean: over whom those means are, and in which rounds."""
    spans: list[str] = []
    for one in lines:
        name = f"{one.label}, " if len(lines) > 1 else ""
        groups = itertools.groupby((r for r, _, _ in one.known), key=lambda r: one.partial.get(r, ""))
        for over, of in groups:
            if not over:
                continue
            first, *rest = of
            rounds = f"rounds {first} to {rest[-1]}" if rest else f"round {first}"
            spans.append(f"{name}{rounds}: {over}")
    if not spans:
        return ""
    more = f"; and {len(spans) - 3} more spans" if len(spans) > 3 else ""
    return f". Hollow dots are means over fewer clients ({'; '.join(spans[:3])}{more})"


def by_client(groups: Sequence[Group]) -> list[Figure]:
    """Returns each client's scores: bars of a single method, dots of several."""
    names = list(dict.fromkeys(c for g in groups for c in g.clients))
    panels = []
    for index, (split, (title, about)) in enumerate(PERSONAL.items()):
        scores = [(g.label, g.per_client(split)) for g in groups]
        if not any(of for _, of in scores):
            continue
        alone = bars(title, scores[0][1], groups[0].score(split)[0], index) if len(groups) == 1 else ""
        panels.append(Figure(title, about, alone or dots(title, names, scores), "tall"))
    return panels


def cost_and_score(groups: Sequence[Group]) -> list[Figure]:
    """Returns Local-test against what a method trains and sends; nothing for a single method."""
    if len(groups) < 2:
        return []
    sizes = [(g, g.first.sizes.get("trained"), g.mean(lambda run: run.upload)) for g in groups]
    figures = []
    for title, about, axis, costs, show in (
        ("Parameters", "that a client trains", "trained parameters", [n for _, n, _ in sizes], _count),
        ("Bytes", "that a client sends per round", "bytes sent per round", [b for _, _, b in sizes], human_bytes),
    ):
        spots = [
            Spot(g.label, i, float(cost), score, half if g.seeds > 1 else None)
            for i, (g, cost) in enumerate(zip(groups, costs, strict=True))
            for score, half in [g.score("local_test")]
            if cost and score is not None
        ]
        if spots:
            left = [g.label for g, cost in zip(groups, costs, strict=True) if cost == 0]
            note = f"; {', '.join(left)}: none" if left else ""
            figures.append(
                Figure(f"{title} and Local-test", f"{title} {about}{note}", scatter(title, axis, spots, show))
            )
    return figures


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else millions(round(value))


def shift_maps(groups: Sequence[Group]) -> list[Figure]:
    """Returns a heat map per model: its score on each kind of corruption at each severity, all with one scale."""
    tables = [(g, *one) for g in groups for one in g.shifts]
    known = [v for *_, table in tables for row in table.values() for v in row if v is not None]
    ends = (min(known), max(known)) if known else (0.0, 100.0)
    figures = []
    for group, model, severities, table in tables:
        title = f"{group.label}: {model}" if len(groups) > 1 else model.capitalize()
        means = [sum(v for v in row if v is not None) / len(row) for row in table.values()]
        worst = min(zip(means, table, strict=True))[1].replace("_", " ")
        label = f"{title}, scores on {len(table)} kinds of corruption; the worst is {worst}"
        rows = {kind.replace("_", " "): row for kind, row in table.items()}
        figures.append(Figure(title, f"worst: {worst}", heat(label, [str(s) for s in severities], rows, ends)))
    return figures


def drift_panels(runs: Sequence[Facts]) -> Iterator[Aware]:
    """Yields the runs whose clients' predictions notice drift."""
    for run in runs:
        if (found := run.drift) is None:
            continue
        names = [n for n in TITLES if n in found.alone]
        both = [(found.alone[n], found.aware[n]) for n in names]
        figures = [
            Figure(
                TITLES[n],
                ABOUT_MIXED if n == "mixed" else PERSONAL[n][1],
                dots(TITLES[n], run.clients, [("alone", one.per_client), ("noticing drift", other.per_client)]),
                "tall",
            )
            for n, (one, other) in zip(names, both, strict=True)
        ]
        shown = {KINDS.get(kind, kind): counts for kind, counts in found.picture.items()}
        if shown:
            title, about = "How much images look like home", "The statistic s of every client, from its own mean."
            figures.append(Figure(title, about, likenesses(title, shown, EDGES)))
        yield Aware(
            label=run.label,
            window=found.window,
            rows=[(TITLES[n], (a.mean, a.std), (b.mean, b.std)) for n, (a, b) in zip(names, both, strict=True)],
            head=[title for n in names for title in (TITLES[n], "+ drift")],
            clients=[(c, [s.per_client.get(c) for pair in both for s in pair]) for c in run.clients],
            figures=figures,
        )


def partitions(runs: Sequence[Facts]) -> list[Figure]:
    """Returns a picture per partition; runs on the same one share it."""
    shown: list[tuple[Holdings, str]] = []
    for r in runs:
        if r.holdings and all(r.holdings != known for known, _ in shown):
            shown.append((r.holdings, f"{r.data} ({r.label})"))
    return [Figure(name if len(shown) > 1 else "", BUBBLES, bubbles(of), "scroll tall") for of, name in shown]


def communication(groups: Sequence[Group]) -> Figure:
    """Returns the communicated bytes over rounds: a line per method, or one per direction of a single method."""

    def points(run: Facts, *directions: str) -> list[Point]:
        before = float(sum(getattr(run.pretrain, name) for name in directions)) if run.pretrain else 0.0
        sums = [
            (row.round, before + sum(getattr(row, f"bytes_{name}") for name in directions), None) for row in run.rows
        ]
        return [(0, before, None), *sums]

    def line(label: str, index: int, group: Group, *directions: str) -> Series:
        each = [points(run, *directions) for run in group.members]
        return Series(label, index, each[0] if group.seeds == 1 else over_seeds(each))

    if len(groups) == 1:
        about = "All clients together, since the start."
        lines = [line("from clients", 4, groups[0], "up"), line("to clients", 5, groups[0], "down")]
    else:
        about = "To and from all clients together, since the start."
        lines = [line(g.label, i, g, "up", "down") for i, g in enumerate(groups)]
    if any(m.pretrain for g in groups for m in g.members):
        about += " Round 0 has what pretraining sent."
    return Figure("Communicated bytes", about, curves("Communicated", lines, unit="bytes"))
