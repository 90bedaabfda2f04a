"""The HTML page about runs: its pictures and numbers. page.html arranges them and escapes every text."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data import Federation
from ..errors import InputError
from ..predict.scores import EDGES
from ..runs.files import write_output
from ..runs.run import Run
from .facts import JOINED, PERSONAL, SERVER, Facts, Holdings, gather_facts, mean_and_std, over_whom, unlikeness
from .figures import Series, bars, bubbles, curves, dots, likenesses
from .measured import panels_of, sites_of
from .privacy import privacy_panel
from .standings import places
from .svg import colour, dash, human_bytes, millions

SPLITS = {**PERSONAL, **SERVER}
BUBBLES = "The area of a bubble is the number of training images; the bars are all of a client's."


Score = tuple[float | None, float | None]  # mean and standard deviation over clients
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


class Tile(NamedTuple):
    """One number in large type: a score, or another one with its unit."""

    title: str
    about: str
    score: tuple[float | None, float | None] = (None, None)
    number: str = ""
    unit: str = ""


def write_report(runs: Sequence[Run], out: Path, theory: bool = False, sites: bool = False) -> None:
    """Writes a page about these runs to `out`; the same runs give the same bytes.

    theory: measures the bounds of the runs that have a global model. sites: compares each site's models. Both need the
    data, and take a while.
    """
    if not runs:
        raise InputError("nothing to report on: name at least one run folder")
    facts = gather_facts(runs)
    several, unit = len(facts) > 1, common(f.unit for f in facts)
    alike = several and len({(f.data, f.unit) for f in facts}) == 1
    write_page(
        out,
        title=f"{f'{len(facts)} runs' if several else facts[0].label} on {common(f.data for f in facts)}",
        runs=facts,
        several=several,
        setup=list(_setup(facts)),
        tiles=list(_tiles(facts)),
        unit=unit[0].upper() + unit[1:],
        splits=SPLITS,
        alike=alike,
        places={n: _places(facts, n) if alike else [""] * len(facts) for n in SPLITS},
        over_rounds=_over_rounds(facts) if any(f.rows for f in facts) else None,
        by_client=_by_client(facts),
        drift=list(_drift(facts)),
        privacy=privacy_panel(facts),
        numbers=[("local_val", "Local-validation"), *((n, title) for n, (title, _) in PERSONAL.items())],
        holdings=_holdings(facts),
        communication=_communication(facts),
        theory=panels_of(runs, [f.label for f in facts]) if theory else [],
        sites=sites_of(runs, [f.label for f in facts]) if sites else [],
    )


def write_partition(federation: Federation, out: Path) -> None:
    """Writes a page that shows how many samples of which class each client has."""
    holdings = Holdings.of(federation)
    apart = f"Mean total-variation distance between two clients' labels: {unlikeness(np.array(holdings.counts)):.2f}."
    figure = Figure("", f"{BUBBLES} {apart}", bubbles(holdings), "scroll tall")
    write_page(out, title=f"{federation.name}: who holds what", data=federation.name, runs=(), holdings=[figure])


def write_page(out: Path, template: str = "page.html", **values: Any) -> None:
    """Writes one of the page templates, filled with these values, as one file."""
    from jinja2 import DictLoader, Environment, StrictUndefined  # only a report needs it

    names = ("macros.html", "page.html", "site.html", "style.css")
    files = {name: (resources.files(__package__) / name).read_text("utf8") for name in names}
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader(files),
    )
    environment.filters["millions"] = millions
    environment.globals |= {"colour": colour, "dash": dash, "costs": _costs, "machine": _machine, "models": JOINED}
    text = environment.get_template(template).render(style=files["style.css"], **values)
    write_output(out, text.encode("utf-8", "replace"))  # a file name may have bytes that are not text


def common(values: Iterable[Any]) -> str:
    """Returns what all runs have, or each of the values they have."""
    return " / ".join(dict.fromkeys(str(v) for v in values))


def _setup(runs: Sequence[Facts]) -> Iterator[str]:
    configs = [r.config for r in runs]
    if len(runs) > 1:
        yield common(c.method_name for c in configs)
    clients, cohorts = (common(values) for values in zip(*map(_clients, runs), strict=True))
    yield f"{clients} client{'' if clients == '1' else 's'}, {cohorts} per round"
    yield f"{common(c.train.rounds for c in configs)} rounds, local epochs: {common(c.train.epochs for c in configs)}"
    yield f"{common(c.model.backbone for c in configs)}, weights: {common(c.model.weights for c in configs)}"
    yield "split: " + common(
        f"Dirichlet, α = {c.data.alpha:g}" if c.data.partition == "dirichlet" else c.data.partition for c in configs
    )
    yield f"seed {common(c.run.seed for c in configs)}"


def _clients(run: Facts) -> tuple[int, int | str]:
    """Returns how many clients a run has, and how many train per round."""
    return len(run.clients) or run.config.data.clients, run.config.train.cohort or "all"


def _tiles(runs: Sequence[Facts]) -> Iterator[Tile]:
    """Yields the run's numbers; of several runs the best of the finished ones."""
    finished = [r for r in runs if r.finished] or runs
    for split, (title, about) in PERSONAL.items():
        scores = [(r.label, *r.score(split)) for r in finished]
        best = max((round(mean, 2) for _, mean, _ in scores if mean is not None), default=None)
        if len(runs) == 1:
            yield Tile(title, about, runs[0].score(split))
        elif best is not None:
            first = [(label, std) for label, mean, std in scores if mean is not None and round(mean, 2) == best]
            names = common(label for label, _ in first) if len(first) < 4 else f"{len(first)} runs"
            yield Tile(f"Best {title}", names, (best, first[0][1]))
    spent = [(r.label, r.guarantee) for r in finished if r.guarantee is not None and r.guarantee.mean is not None]
    if len(runs) == 1 and spent:
        of = spent[0][1]
        yield Tile("ε per client", f"{of.mechanism}, at δ = {of.delta:g}", (of.mean, of.std))
    shares = [r.share for r in runs if r.share is not None]
    ends = dict.fromkeys(f"{s:.1f}" for s in (min(shares), max(shares))) if shares else ()
    about = "of the full model's parameters, per client and round"
    if len(runs) == 1 and shares:
        sizes = runs[0].sizes
        about = f"of the full model, per client and round: {sizes['communicated']:,} of {sizes['full']:,} parameters"
    pretrained = any(r.pretrain for r in runs)
    if pretrained:
        about += "; without pretraining"
    yield Tile("Uploaded", about, number="–".join(ends) or "n/a", unit="%" if ends else "")
    if pretrained and len(runs) == 1:
        yield Tile("Sent by clients", _apart(runs[0]), number=human_bytes(sent(runs[0], "up") or 0))


def sent(run: Facts, direction: str) -> int | None:
    """Returns the bytes `up` or `down`, those of pretraining included."""
    if run.last is None:
        return None
    before = getattr(run.pretrain, direction) if run.pretrain else 0
    return int(getattr(run.last, f"bytes_{direction}") + before)


def _apart(run: Facts) -> str:
    """Returns what pretraining has of the bytes that the clients sent."""
    assert run.pretrain is not None
    share = 100 * run.pretrain.up / (sent(run, "up") or 1)
    size = human_bytes(run.pretrain.up)
    return f"in all; {size} of it ({share:.0f} %) in {run.pretrain.rounds} rounds of pretraining, with whole models"


def _places(runs: Sequence[Facts], split: str) -> Sequence[str]:
    """Returns best and runner-up; unfinished runs do not compete."""
    return places([r.score(split)[0] if r.finished else None for r in runs])


def _over_rounds(runs: Sequence[Facts]) -> list[Figure]:
    panels = []
    for index, split in enumerate(("local_test", "global_test", "global_model")):
        lines = [
            Series(
                r.label,
                i if len(runs) > 1 else index,
                [(row.round, *mean_and_std(row, split)) for row in r.rows],
                {row.round: over for row in r.rows if (over := over_whom(row.scores.get(split)))},
            )
            for i, r in enumerate(runs)
        ]
        if any(s.known for s in lines):
            title, about = SPLITS[split]
            panels.append(Figure(title, f"{about}{_hollow(lines)}", curves(title, lines)))
    return panels


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


def _by_client(runs: Sequence[Facts]) -> list[Figure]:
    names = list(dict.fromkeys(c for r in runs for c in r.clients))
    panels = []
    for index, (split, (title, about)) in enumerate(PERSONAL.items()):
        scores = [(r.label, r.per_client(split)) for r in runs]
        if not any(of for _, of in scores):
            continue
        alone = bars(title, scores[0][1], runs[0].score(split)[0], index) if len(runs) == 1 else ""
        panels.append(Figure(title, about, alone or dots(title, names, scores), "tall"))
    return panels


def _drift(runs: Sequence[Facts]) -> Iterator[Aware]:
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


def _holdings(runs: Sequence[Facts]) -> list[Figure]:
    """Returns a picture per partition; runs on the same one share it."""
    shown: list[tuple[Holdings, str]] = []
    for r in runs:
        if r.holdings and all(r.holdings != known for known, _ in shown):
            shown.append((r.holdings, f"{r.data} ({r.label})"))
    return [Figure(name if len(shown) > 1 else "", BUBBLES, bubbles(of), "scroll tall") for of, name in shown]


def _communication(runs: Sequence[Facts]) -> Figure:
    def line(label: str, index: int, run: Facts, *directions: str) -> Series:
        before = float(sum(getattr(run.pretrain, name) for name in directions)) if run.pretrain else 0.0
        points = [
            (row.round, before + sum(getattr(row, f"bytes_{name}") for name in directions), None) for row in run.rows
        ]
        return Series(label, index, [(0, before, None), *points])

    if len(runs) == 1:
        about = "All clients together, since the start."
        lines = [line("from clients", 4, runs[0], "up"), line("to clients", 5, runs[0], "down")]
    else:
        about = "To and from all clients together, since the start."
        lines = [line(r.label, i, r, "up", "down") for i, r in enumerate(runs)]
    if any(r.pretrain for r in runs):
        about += " Round 0 has what pretraining sent."
    return Figure("Communicated bytes", about, curves("Communicated", lines, unit="bytes"))


def _costs(run: Facts) -> list[str]:
    """Returns bytes from clients, to clients, per client and round, and what the distillation did."""
    up, down = (_total(run, direction) for direction in ("up", "down"))
    each = "n/a" if run.upload is None else human_bytes(run.upload)
    if run.took_part < run.planned:
        each += f" (over {run.took_part:,} uploads of {run.planned:,} planned)"
    return [up, down, each, run.guard]


def _total(run: Facts, direction: str) -> str:
    """Returns the bytes in a direction, and how many of them are pretraining's."""
    size = sent(run, direction)
    apart = f" (pretraining {human_bytes(getattr(run.pretrain, direction))} of it)" if run.pretrain and size else ""
    return "n/a" if size is None else human_bytes(size) + apart


def _machine(run: Facts) -> list[tuple[str, str]]:
    seconds = {"training and evaluation": f"{run.last.seconds:,.1f} s"} if run.last else {}
    return list({"folder": run.folder, **run.environment, **seconds}.items())
