"""The HTML page about runs: its pictures and numbers. page.html arranges them and escapes every text."""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data import Federation
from ..errors import InputError
from ..runs.files import write_output
from ..runs.run import Run
from . import costs as cost_tables
from .choices import choices
from .costs import Costs, costs_beside
from .facts import JOINED, PERSONAL, Facts, Holdings, gather_facts, unlikeness
from .figures import bubbles
from .groups import Group, groups_of
from .measured import panels_of, sites_of
from .panels import (
    BUBBLES,
    SPLITS,
    Figure,
    by_client,
    communication,
    cost_and_score,
    drift_panels,
    over_rounds,
    partitions,
    shift_maps,
)
from .privacy import privacy_panel
from .standings import places
from .svg import colour, dash, human_bytes, millions
from .trust import trust_of


class Tile(NamedTuple):
    """One number in large type: a score, or another one with its unit."""

    title: str
    about: str
    score: tuple[float | None, float | None] = (None, None)
    number: str = ""
    unit: str = ""


def write_report(
    runs: Sequence[Run],
    out: Path,
    theory: bool = False,
    sites: bool = False,
    costs: Costs | None = None,
    figures: Path | None = None,
) -> None:
    """Writes a page about these runs to `out`; the same runs give the same bytes.

    theory: measures the bounds of the runs that have a global model. sites: compares each site's models, and their
    probabilities with what is true. Both need the data, and take a while. costs: of a client's round, by method; by
    default those that a comparison of these runs has measured. figures: a folder that gets each figure as a file.
    """
    if not runs:
        raise InputError("nothing to report on: name at least one run folder")
    facts = gather_facts(runs)
    groups, labels = groups_of(facts), [f.label for f in facts]
    values = {
        **_scores(runs, facts, groups),
        **_pictures(facts, groups),
        "costs": costs_beside(runs) if costs is None else costs,
        "theory": panels_of(runs, labels) if theory else [],
        "sites": sites_of(runs, labels) if sites else [],
        "trust": trust_of(runs, labels) if sites else [],
    }
    write_page(out, **values)
    if figures is not None:
        from .export import write_figures

        write_figures(list(figures_in(values)), figures, [g.label for g in groups] if len(groups) > 1 else ())


def _scores(runs: Sequence[Run], facts: Sequence[Facts], groups: Sequence[Group]) -> dict[str, Any]:
    """Returns what the page says in numbers."""
    several, unit = len(groups) > 1, common(f.unit for f in facts)
    alike = len(facts) > 1 and len({(f.data, f.unit) for f in facts}) == 1
    label_of = {id(member): g.label for g in groups for member in g.members}
    finished = [(run, label_of[id(f)]) for run, f in zip(runs, facts, strict=True) if f.rows]
    return {
        "title": f"{f'{len(facts)} runs' if len(facts) > 1 else facts[0].label} on {common(f.data for f in facts)}",
        "runs": facts,
        "groups": groups,
        "several": several,
        "many": len(facts) > 1,
        "firsts": {g.first.label for g in groups},  # of several seeds, the others are shown on demand
        "seeds": max(g.seeds for g in groups),
        "setup": list(_setup(facts)),
        "tiles": list(_tiles(groups)),
        "unit": unit[0].upper() + unit[1:],
        "splits": SPLITS,
        "alike": alike and several,
        "places": {n: _places(groups, n) if alike and several else [""] * len(groups) for n in SPLITS},
        "choices": choices([r for r, _ in finished], labels=[label for _, label in finished])
        if finished and len({f.data for f in facts}) == 1
        else None,
        "numbers": [("local_val", "Local-validation"), *((n, title) for n, (title, _) in PERSONAL.items())],
    }


def _pictures(facts: Sequence[Facts], groups: Sequence[Group]) -> dict[str, Any]:
    """Returns what the page draws."""
    return {
        "over_rounds": over_rounds(groups) if any(f.rows for f in facts) else None,
        "cost_and_score": cost_and_score(groups),
        "by_client": by_client(groups),
        "shift_maps": shift_maps(groups),
        "drift": list(drift_panels(facts)),
        "privacy": privacy_panel(facts),
        "holdings": partitions(facts),
        "communication": communication(groups),
    }


def figures_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yields every figure of a page with the name of its part."""
    for part, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            found = [one] if isinstance(one, Figure) else getattr(one, "figures", [])
            yield from ((f"{part} {getattr(one, 'label', '')}".strip(), figure) for figure in found)


def write_partition(federation: Federation, out: Path) -> None:
    """Writes a page that shows how many samples of which class each client has."""
    holdings = Holdings.of(federation)
    apart = f"Mean total-variation distance between two clients' labels: {unlikeness(np.array(holdings.counts)):.2f}."
    figure = Figure("", f"{BUBBLES} {apart}", bubbles(holdings), "scroll tall")
    write_page(out, title=f"{federation.name}: who holds what", data=federation.name, runs=(), holdings=[figure])


def write_page(out: Path, template: str = "page.html", **values: Any) -> None:
    """Writes one of the page templates, filled with these values, as one file."""
    from jinja2 import DictLoader, Environment, StrictUndefined  # only a report needs it

    names = ("macros.html", "page.html", "site.html", "style.css", "sort.js")
    files = {name: (resources.files(__package__) / name).read_text("utf8") for name in names}
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader(files),
    )
    environment.filters["millions"] = millions
    environment.globals |= {"colour": colour, "dash": dash, "traffic": _traffic, "machine": _machine, "models": JOINED}
    environment.globals |= {"cost_tables": cost_tables, "script": files["sort.js"], "digest": _digest(files["sort.js"])}
    text = environment.get_template(template).render(style=files["style.css"], **values)
    write_output(out, text.encode("utf-8", "replace"))  # a file name may have bytes that are not text


def _digest(script: str) -> str:
    """Returns what a page's policy says of its script: no other one runs, whatever a name in the page holds."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


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


def _tiles(groups: Sequence[Group]) -> Iterator[Tile]:
    """Yields the numbers of a method; of several methods the best of the finished ones."""
    finished = [g for g in groups if g.finished] or groups
    for split, (title, about) in PERSONAL.items():
        scores = [(g.label, *g.score(split)) for g in finished]
        best = max((round(mean, 2) for _, mean, _ in scores if mean is not None), default=None)
        if len(groups) == 1:
            yield Tile(title, about, groups[0].score(split))
        elif best is not None:
            first = [(label, std) for label, mean, std in scores if mean is not None and round(mean, 2) == best]
            names = common(label for label, _ in first) if len(first) < 4 else f"{len(first)} runs"
            yield Tile(f"Best {title}", names, (best, first[0][1]))
    members = [member for g in groups for member in g.members]
    spent = [r.guarantee for r in members if r.guarantee is not None and r.guarantee.mean is not None]
    if len(groups) == 1 and spent:
        yield Tile("ε per client", f"{spent[0].mechanism}, at δ = {spent[0].delta:g}", (spent[0].mean, spent[0].std))
    yield from _uploads(members, alone=len(groups) == 1)


def _uploads(runs: Sequence[Facts], alone: bool) -> Iterator[Tile]:
    """Yields what clients send. alone: the runs are of one method."""
    shares = [r.share for r in runs if r.share is not None]
    ends = dict.fromkeys(f"{s:.1f}" for s in (min(shares), max(shares))) if shares else ()
    about = "of the full model's parameters, per client and round"
    if alone and shares:
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


def _places(runs: Sequence[Facts | Group], split: str) -> Sequence[str]:
    """Returns best and runner-up; unfinished runs do not compete."""
    return places([r.score(split)[0] if r.finished else None for r in runs])


def _traffic(run: Facts) -> list[str]:
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
