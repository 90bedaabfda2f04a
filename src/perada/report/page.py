"""The page around the pictures. Every text that comes from a run goes through `escape`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from ..cli.tables import millions, unlikeness
from ..sweep.standings import places
from .facts import SCORES, SERVER, Facts, Holdings, finite, of
from .figures import Series, bars, bubbles, curves, dots
from .markup import common, figure, key, score, section, table
from .svg import colour, human_bytes

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


BUBBLES = "The area of a bubble is the number of training images; the bars are all of a client's."


def page(runs: Sequence[Facts]) -> str:
    parts = [_header(runs), _tiles(runs), _results(runs), _convergence(runs), _clients(runs)]
    parts += [_holdings(runs), _communication(runs), *map(_about, runs)]
    return _whole(_title(runs), parts)


def _whole(title: str, parts: Sequence[str]) -> str:
    style = (resources.files(__package__) / "style.css").read_text("utf8")
    return PAGE.substitute(title=f"{escape(title)} · PerAda", style=style, body="\n".join(filter(None, parts)))


def partition_page(data: str, held: Holdings) -> str:
    """Who holds what, alone."""
    apart = f"Mean total-variation distance between two clients' labels: {unlikeness(np.array(held.counts)):.2f}."
    drawn = figure("", f"{BUBBLES} {apart}", bubbles(held), "scroll tall")
    return _whole(
        f"{data}: who holds what", [f"<header><h1>{escape(data)}</h1></header>", section("Who holds what", drawn)]
    )


def _legend(runs: Sequence[Facts]) -> str:
    if len(runs) == 1:
        return ""
    return '<ul class="legend">' + "".join(f"<li>{key(i)}{escape(r.label)}</li>" for i, r in enumerate(runs)) + "</ul>"


def _title(runs: Sequence[Facts]) -> str:
    data = common(r.data for r in runs)
    return f"{runs[0].label} on {data}" if len(runs) == 1 else f"{len(runs)} runs on {data}"


def _header(runs: Sequence[Facts]) -> str:
    configs = [r.config for r in runs]
    clients = common(len(r.clients) or c.data.clients for r, c in zip(runs, configs, strict=True))
    chips = [
        f"{clients} client{'' if clients == '1' else 's'}, {common(c.train.cohort or 'all' for c in configs)} a round",
        f"{common(c.train.rounds for c in configs)} rounds, local epochs: {common(c.train.epochs for c in configs)}",
        f"{common(c.model.backbone for c in configs)}, weights: {common(c.model.weights for c in configs)}",
        "split: " + common(_split(c.data) for c in configs),
        f"seed {common(c.run.seed for c in configs)}",
    ]
    if len(runs) > 1:
        chips.insert(0, common(r.config.method_name for r in runs))
    flags = "".join(f'<p class="flag">{escape(_whose(r, runs))}{escape(r.state)}</p>' for r in runs if r.state)
    listed = "".join(f"<li>{escape(c)}</li>" for c in chips)
    over = '<p class="over">Personalised federated learning</p>'
    return f'<header>{over}<h1>{escape(_title(runs))}</h1>{flags}<ul class="setup">{listed}</ul></header>'


def _split(data: Any) -> str:
    return f"Dirichlet, α = {data.alpha:g}" if data.partition == "dirichlet" else str(data.partition)


def _whose(run: Facts, runs: Sequence[Facts]) -> str:
    return f"{run.label} " if len(runs) > 1 else ""


# numbers


def _tiles(runs: Sequence[Facts]) -> str:
    """The run's numbers; of several (finished) runs the best."""
    parts, compete = [], [r for r in runs if r.finished] or runs
    for index, (name, (title, about)) in enumerate(SCORES.items()):
        found = [(m, r) for r in compete if (m := r.mean(name)) is not None]
        if len(runs) == 1:
            parts.append(_tile(title, score(runs[0].mean(name), runs[0].std(name)), about, index))
        elif found:
            best = max(round(m, 2) for m, _ in found)
            whose = [r for m, r in found if round(m, 2) == best]
            names = common(r.label for r in whose) if len(whose) < 4 else f"{len(whose)} runs"
            parts.append(_tile(f"Best {title}", score(best, whose[0].std(name)), names, index))
    shares = [r.share for r in runs if r.share is not None]
    ends = list(dict.fromkeys(f"{s:.1f}" for s in (min(shares), max(shares)))) if shares else []
    value = "–".join(ends) + " <small>%</small>" if ends else score(None)
    about = "of the full model's parameters, a client and round"
    if len(runs) == 1 and shares:
        sizes = runs[0].sizes
        about = f"of the full model, a client and round: {sizes['communicated']:,} of {sizes['full']:,} parameters"
    parts.append(_tile("Uploaded", value, about, 3))
    return '<div class="tiles">' + "".join(parts) + "</div>"


def _tile(title: str, value: str, about: str, index: int) -> str:
    name = f'<span class="name">{escape(title)}</span>'
    return f'<div class="tile {colour(index)}">{name}<b>{value}</b><span>{escape(about)}</span></div>'


def _results(runs: Sequence[Facts]) -> str:
    names = [*SCORES, "global_model"]
    found = {n: [r.server if n == "global_model" else r.mean(n) for r in runs] for n in names}
    alike = len({(r.data, r.metric) for r in runs}) == 1
    marks = {n: _marks(v, [r.finished for r in runs]) if alike else [""] * len(runs) for n, v in found.items()}
    rows = []
    for i, r in enumerate(runs):
        flag = f' <small class="flag">{escape(r.state)}</small>' if r.state else ""
        sizes = [millions(r.sizes[k]) if k in r.sizes else "n/a" for k in ("trained", "communicated")]
        share = "" if r.share is None else f" <small>({r.share:.1f} %)</small>"
        scores = [score(found[n][i], None if n == "global_model" else r.std(n), marks[n][i]) for n in names]
        rows.append([(key(i) if len(runs) > 1 else "") + escape(r.label) + flag, sizes[0], sizes[1] + share, *scores])
    head = ["Method", "Trained", "Sent", *(title for title, _ in SCORES.values()), SERVER[0]]
    said = f"{common(r.unit for r in runs).capitalize().replace('Auc', 'AUC')} in %, mean ± standard deviation"
    said += " over the clients' personal models. Trained and sent: parameters of a client, a round."
    if len(runs) > 1 and alike:
        said += " Best in bold, runner-up underlined."
    notes = f"<p>{escape(_guard(runs[0]))}</p>" if len(runs) == 1 else ""
    return section("Results", f'<p class="note">{escape(said)}</p>', table(head, rows, said), notes)


def _marks(values: Sequence[float | None], finished: Sequence[bool]) -> list[str]:
    """b for the best shown value, u for the next one; unfinished runs do not compete."""
    tags = {"best": "b", "next": "u", "": ""}
    return [tags[p] for p in places([v if done else None for v, done in zip(values, finished, strict=True)])]


def _guard(run: Facts) -> str:
    distilled, accepted = run.last.get("distilled", 0), run.last.get("accepted", 0)
    if not distilled:
        return "No distillation."
    if run.config.distill.guard == "none":
        return f"Distilled in {distilled} rounds, without a guard."
    share = f"{100 * accepted / distilled:.0f} %"
    return f"The guard accepted the distilled adapter in {accepted} of {distilled} rounds ({share})."


# pictures


def _series(runs: Sequence[Facts], name: str, index: int) -> list[Series]:
    inner = "global_test" if name == "global_model" else "mean"
    return [
        Series(
            r.label,
            i if len(runs) > 1 else index,
            [(row["round"], finite(of(row, name, inner)), finite(of(row, name, "std"))) for row in r.rows],
        )
        for i, r in enumerate(runs)
    ]


def _convergence(runs: Sequence[Facts]) -> str:
    if not any(r.rows for r in runs):
        return section("Over rounds", '<p class="note">No round was evaluated yet.</p>')
    panels = []
    shown = [(n, *SCORES[n]) for n in ("local_test", "global_test")]
    for index, (name, title, about) in enumerate([*shown, ("global_model", *SERVER)]):
        series = _series(runs, name, index)
        if any(s.known for s in series):
            panels.append(figure(title, about, curves(title, series)))
    unit = common(r.unit for r in runs)
    note = f"{unit} in %".capitalize().replace("Auc", "AUC")
    note += "; the band is one standard deviation over clients." if len(runs) == 1 else "."
    return section(
        "Over rounds", f'<p class="note">{note}</p>', _legend(runs), f'<div class="panels">{"".join(panels)}</div>'
    )


def _clients(runs: Sequence[Facts]) -> str:
    names = list(dict.fromkeys(c for r in runs for c in r.clients))
    panels = []
    for index, (name, (title, about)) in enumerate(SCORES.items()):
        found = [(r.label, r.per_client(name)) for r in runs]
        if not any(held for _, held in found):
            continue
        alone = len(runs) == 1
        drawn = bars(title, found[0][1], runs[0].mean(name), index) if alone else dots(title, names, found)
        panels.append(figure(title, about, drawn, "tall"))
    if not panels:
        return ""
    note = "The last evaluation. " + ("Dashed: the mean." if len(runs) == 1 else "A dot a run.")
    inside = f'<div class="panels">{"".join(panels)}</div>'
    numbers = f"<details><summary>All numbers</summary>{''.join(_numbers(r, runs) for r in runs)}</details>"
    return section("Client by client", f'<p class="note">{note}</p>', _legend(runs), inside, numbers)


def _numbers(run: Facts, runs: Sequence[Facts]) -> str:
    """The same as a table."""
    held = run.holdings
    sizes = dict(zip(held.clients, held.sizes, strict=True)) if held else {}
    shown = {n: t for n, (t, _) in SCORES.items() if run.per_client(n)}
    shown = {"local_val": "Local-validation", **shown} if run.per_client("local_val") else shown
    rows = [
        [escape(c), *(f"{n:,}" for n in sizes.get(c, ())), *(score(run.per_client(n).get(c)) for n in shown)]
        for c in run.clients
    ]
    head = ["Client", *(("Train", "Validation", "Test") if held else ()), *shown.values()]
    title = f"<h3>{escape(run.label)}</h3>" if len(runs) > 1 else ""
    return title + table(head, rows, f"{run.label}, client by client")


def _holdings(runs: Sequence[Facts]) -> str:
    shown: list[Facts] = []
    for r in runs:
        if r.holdings and all(r.holdings != s.holdings for s in shown):
            shown.append(r)
    if not shown:
        return section("Who holds what", f'<p class="note">Not shown: {escape(runs[0].problem)}</p>')
    about = BUBBLES
    names = [f"{r.data} ({r.label})" if len(shown) > 1 else "" for r in shown]
    drawn = [bubbles(r.holdings) for r in shown if r.holdings]
    return section("Who holds what", *(figure(n, about, d, "scroll tall") for n, d in zip(names, drawn, strict=True)))


def _communication(runs: Sequence[Facts]) -> str:
    names = {"bytes_up": "from clients", "bytes_down": "to clients"}
    if len(runs) == 1:
        series = [
            Series(label, i, [(0, 0.0, None), *((row["round"], finite(row.get(n)), None) for row in runs[0].rows)])
            for i, (n, label) in enumerate(names.items(), 4)
        ]
    else:
        series = [
            Series(r.label, i, [(0, 0.0, None), *((row["round"], _moved(row), None) for row in r.rows)])
            for i, r in enumerate(runs)
        ]
    drawn = curves("Communicated", series, human_bytes, human_bytes, bounded=False)
    about = "To and from all clients together, since the start."
    if len(runs) == 1:
        about = "All clients together, since the start."
    rows = [
        [escape(r.label), *(_bytes(r.last.get(n)) for n in names), _bytes(_each(r)), escape(_guard(r))] for r in runs
    ]
    head = ["Method", "From clients", "To clients", "Up, a client and round", "Distillation"]
    parts = [_legend(runs), figure("Communicated bytes", about, drawn)]
    if len(runs) == 1:
        keys = zip([key(4), key(5), "", ""], head[1:], rows[0][1:], strict=True)
        facts = "".join(f"<dt>{drawn}{escape(k)}</dt><dd>{v}</dd>" for drawn, k, v in keys)
        parts = [f'<div class="panels side">{parts[1]}<dl>{facts}</dl></div>']
    else:
        parts = [*parts, table(head, rows, "Communicated bytes and distillation")]
    return section("Communication and distillation", *parts)


def _bytes(value: Any) -> str:
    return "n/a" if value is None else human_bytes(value)


def _moved(row: dict[str, Any]) -> float | None:
    up, down = finite(row.get("bytes_up")), finite(row.get("bytes_down"))
    return None if up is None or down is None else up + down


def _each(run: Facts) -> float | None:
    """Measured bytes that a client sends in a round."""
    up, rounds = finite(run.last.get("bytes_up")), run.last.get("round")
    cohort = run.config.train.cohort or len(run.clients)
    return up / rounds / cohort if up is not None and rounds and cohort else None


def _about(run: Facts) -> str:
    """How to make it again."""
    last = run.last
    facts = {"folder": run.folder, **{f"{k} version": v for k, v in (last.get("versions") or {}).items()}}
    facts |= {k: last[k] for k in ("device", "threads") if k in last}
    if (seconds := finite(last.get("seconds"))) is not None:
        facts["training and evaluation"] = f"{seconds:,.1f} s"
    listed = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    name = f"Configuration and versions: {escape(run.label)}"
    config = escape(run.config.toml())
    return f'<details class="about"><summary>{name}</summary><dl>{listed}</dl><pre>{config}</pre></details>'
