"""The tables that the command line prints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from ..client.cost import RoundCost
from ..client.scores import Scores
from ..data import Federation
from ..data.download import Entry
from ..predict.predictor import Check
from ..predict.scores import DriftScores
from ..privacy.guarantee import Guarantee
from ..report.costs import HEAD, cells
from ..report.costs import about as about_costs
from ..report.facts import JOINED, distillations, drift_of, mishaps, partial_means, unlikeness, worth_of
from ..report.standings import PERSONAL, Standings, further_parts, parts
from ..report.svg import millions
from ..runs.moment import Evaluation
from ..runs.run import Run

SHADES = "·░▒▓█"


def spread(scores: Scores | None) -> str:
    """Returns `91.82±4.43`, or n/a; with a star if the mean is not over all clients."""
    star = "*" if scores is not None and scores.over else ""
    return "n/a" if scores is None or scores.mean is None else f"{scores.mean:.2f}±{scores.std:.2f}{star}"


def house_table(title: str | None, first: str, *rest: str) -> Table:
    """Returns an empty table, narrow enough for 80 columns: first column left, the others right."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left"
    )
    table.caption_justify = "left"
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def results(runs: Sequence[Run]) -> Table:
    """Returns one row per run, as in the paper's table."""
    summaries = [r.summary for r in runs]
    rows = [(s, Evaluation.read(s)) for s in summaries]
    history = [r.folder.evaluations() for r in runs]
    unit = "AUC" if summaries[0]["metric"] == "auc" else "accuracy"
    title = f"{summaries[0]['data']}: {unit} in %, mean ± std over the clients' personal models"
    splits = [name for name in PERSONAL if name != "shifted" or any(name in last.scores for _, last in rows)]
    distilled = any(distillations(last, of)[0] for (_, last), of in zip(rows, history, strict=True))
    columns = ["trained", "sent", *(PERSONAL[name] for name in splits), "server"]
    table = house_table(title, "method", *columns, *(["distilled"] if distilled else []))
    table.caption = "server: the global model on Global-test"
    table.caption += "; distilled: rounds in which it was used" if distilled else ""
    for (s, last), measured, worth in zip(rows, history, map(worth_of, runs), strict=True):
        table.caption += f"\n{s['method']}, {_sent(s, last)}"
        if (guarantee := Guarantee.read(s)) is not None:
            table.caption += f"\n{s['method']}: {guarantee.sentence}"
        table.caption += "".join(f"\n{s['method']}: * {line}" for line in partial_means(last))
        table.caption += "".join(f"\n{s['method']}: {line}" for line in mishaps(measured))
        table.caption += "".join(f"\n{line}" for line in worth.lines)
        table.add_row(
            s["method"],
            millions(s["parameters"]["trained"]),
            millions(s["parameters"]["communicated"]),
            *(spread(last.scores.get(split)) for split in splits),
            "n/a" if last.global_model is None else f"{last.global_model:.2f}",
            *([_kept(last, s["guarded"], measured)] if distilled else []),
        )
        if (aware := drift_of(s)) is not None:
            marks = [spread(aware.aware.get(split)) for split in splits]
            table.add_row("  + drift", "", "", *marks, "", *([""] if distilled else []))
            mixed = (spread(of.get("mixed")) for of in (aware.alone, aware.aware))
            table.caption += (
                f"\n+ drift: {s['method']}, noticing drift in windows of {aware.window} images; on half home, half "
                f"everybody's: {' → '.join(mixed)}"
            )
    return table


def _sent(summary: Mapping[str, Any], last: Evaluation) -> str:
    """Returns what was sent per client and round, by those that took part, and in pretraining."""
    planned = last.round * summary["cohort"]
    times = last.took_part or planned  # an older version did not count them
    up, down = (size / max(1, times) / 1e3 for size in (last.bytes_up, last.bytes_down))
    text = f"per client and round: {up:,.0f} kB up, {down:,.0f} kB down"
    text += f" ({times:,} of {planned:,} uploads)" if times < planned else ""
    if (before := summary.get("pretrain")) is not None:
        up, all_up = before["bytes_up"] / 1e6, (before["bytes_up"] + last.bytes_up) / 1e6
        text += f"\n  and whole models in pretraining: {up:,.1f} of the {all_up:,.1f} MB that clients sent in all"
    return text


def _kept(last: Evaluation, guarded: bool, rows: Sequence[Evaluation]) -> str:
    """Returns in how many rounds what was distilled was used: the guard kept it, or it did not diverge."""
    tried, used = distillations(last, rows)
    if not tried:
        return "–"
    if guarded:
        return f"{last.accepted} of {tried}"
    return "all" if used == tried else f"{used} of {tried}"


def standings(ranking: Standings) -> list[Table]:
    """Returns the paper's table of a comparison: personal models, then the global ones if there are any."""
    tables: list[Table] = []
    for head, rows in parts(ranking, {"best": "[bold]{}[/]", "next": "[underline]{}[/]", "": "{}"}):
        table = house_table(None if tables else ranking.about(), *head)
        for name, *rest in rows:
            table.add_row(name, *map(Text.from_markup, rest))
        tables.append(table)
    tables[0].caption = "best in bold, runner-up underlined; trained and sent: parameters per client and round"
    tables[-1].caption = "± std over seeds" if ranking.seeds > 1 and len(tables) > 1 else tables[-1].caption
    for about, (head, rows) in further_parts(ranking, seconds=True):
        table = house_table(None, *head)
        table.caption = about
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def joined(run: Run) -> Table:
    """Returns the scores of a client that joined a run: its own model, one trained alone, and the global one."""
    summary, (client,) = run.summary, run.clients
    about, unit = summary["joined"], "AUC" if summary["metric"] == "auc" else "accuracy"
    table = house_table(f"{client}: {unit} in % on its {about['test_images']} own test images", "model", "score", "95%")
    for kind, title in JOINED.items():
        found = about.get(kind, {"score": None, "interval": None})
        ends = "n/a" if found["interval"] is None else "{:.1f} to {:.1f}".format(*found["interval"])
        table.add_row(title, "n/a" if found["score"] is None else f"{found['score']:.2f}", ends)
    return table


def scores(sets: Mapping[str, Scores]) -> Table:
    """Returns one row per client and one column per test set, with the means; then the AUC per label."""
    table = house_table("personal models, in %", "client", *sets)
    for client in next(iter(sets.values())).per_client:
        row = [s.per_client[client] for s in sets.values()]
        table.add_row(client, *("n/a" if v is None else f"{v:.2f}" for v in row))
    table.add_section()
    table.add_row("mean ± std", *(spread(s) for s in sets.values()))
    if any(s.over for s in sets.values()):
        table.add_row("* over", *(s.over for s in sets.values()))
    labels = next(iter(sets.values())).per_label or {}
    if labels:
        table.add_section()
    for label in labels:
        values = [(s.per_label or {}).get(label) for s in sets.values()]
        table.add_row(f"AUC of {label}", *("undefined" if v is None else f"{v:.2f}" for v in values))
    return table


def drift_scores(found: DriftScores) -> Table:
    """Returns one row per client, with two columns per test set: alone, and when it notices drift."""
    columns = [title for name in found.alone for title in (name, "+drift")]
    table = house_table("personal models, in %", "client", *columns)
    table.caption = f"+drift: windows of {found.window} images are tested for drift"
    both = [of[name] for name in found.alone for of in (found.alone, found.aware)]
    for client in both[0].per_client:
        table.add_row(client, *("n/a" if (v := s.per_client[client]) is None else f"{v:.2f}" for s in both))
    table.add_section()
    table.add_row("mean ± std", *map(spread, both))
    return table


def drift_check(found: Check) -> Table:
    """Returns what was found about images, and which classes they seem to show."""
    table = house_table(None, "class", "these images", "at home")
    table.caption = f"z = {found.z:.2f} (drift above {found.threshold:g}); {found.share:.0%} as at home"
    for name, share in sorted(found.mix.items(), key=lambda pair: -pair[1])[:10]:
        table.add_row(name, f"{share:.1%}", f"{found.home[name]:.1%}")
    return table


def catalogue(entries: Sequence[Entry], home: Path) -> Table:
    """Returns the data sets that `perada data get` can download."""
    table = house_table(f"below {home}", "name", "MB", "here", "what", "check")
    for column in table.columns[3:]:
        column.justify, column.overflow, column.no_wrap = "left", "fold", False
    for e in entries:
        table.add_row(e.name, f"{e.megabytes:,}", "yes" if (home / e.folder).exists() else "", e.title, e.checksum)
    return table


def predictions(images: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the most probable classes of each image, or all labels of multi-label data and which are present."""
    table = house_table(None, "image", "prediction")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # a long path leaves the prediction whole
    table.columns[1].no_wrap = not any(one["multilabel"] for one in images)  # many labels take several lines
    for one in images:
        best = list(one["probabilities"].items())[: None if one["multilabel"] else 3]
        least = one.get("thresholds", {})
        present = {name for name, p in best if name in least and p >= least[name]}
        shares = [f"{name} {p:.1%}{' (present)' if name in present else ''}" for name, p in best]
        table.add_row(one["image"], ", ".join(shares) + ("   (drift)" if one.get("drift") else ""))
    return table


def partition(federation: Federation) -> Table:
    """Returns which client has how many samples of which class."""
    counts = federation.label_counts()
    width = sum(max(len(name), len(str(counts[:, i].max()))) + 1 for i, name in enumerate(federation.classes))
    few = federation.classes if width <= 40 else ()  # one column per class, where they fit
    title = f"{federation.name}: training samples per class"
    table = house_table(title, "client", "train", "val", "test", *few, "picture")
    table.caption = f"mean total-variation distance between two clients' labels: {unlikeness(counts):.2f}"
    if not few:
        table.caption += f"\npicture: {', '.join(federation.classes)}"
    top = max(1, int(counts.max()))
    for client, row in zip(federation.clients, counts, strict=True):
        picture = "".join(SHADES[int(np.ceil(n / top * (len(SHADES) - 1)))] for n in row)
        sizes = [str(len(part)) for part in (client.train, client.val, client.test)]
        table.add_row(client.name, *sizes, *(str(n) if n else "·" for n in row if few), picture)
    return table


def partition_json(federation: Federation) -> dict[str, Any]:
    counts = federation.label_counts()
    return {
        "data": federation.name,
        "classes": list(federation.classes),
        "unlikeness": unlikeness(counts),
        "clients": [
            {"name": c.name, "train": len(c.train), "val": len(c.val), "test": len(c.test), "counts": row.tolist()}
            for c, row in zip(federation.clients, counts, strict=True)
        ],
    }


def groups(backbone: str, classes: int, sizes: Mapping[str, Mapping[str, int]]) -> Table:
    """Returns the number of parameters and buffers per group of a network."""
    table = house_table(f"{backbone}, {classes} classes", "group", "parameters", "of full", "buffers")
    for name, size in sizes.items():
        share = size["parameters"] / sizes["full"]["parameters"]
        table.add_row(name, f"{size['parameters']:,}", f"{share:.1%}", f"{size['buffers']:,}")
    return table


def methods(
    sizes: Mapping[str, Mapping[str, int]], backbone: str, classes: int, costs: Mapping[str, RoundCost]
) -> Table:
    """Returns the number of parameters that a client trains and sends per method, and what a round costs it."""
    title = f"parameters per client and round ({backbone}, {classes} classes)"
    table = house_table(title, "method", "trained", "sent", *(HEAD if costs else ()))
    for name, size in sizes.items():
        measured = cells(costs[name]) if name in costs else []
        table.add_row(name, f"{size['trained']:,}", f"{size['communicated']:,}", *measured)
    if costs:
        table.caption = about_costs(costs)
    return table


def presets(descriptions: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    for name, text in descriptions.items():
        table.add_row(name, text)
    return table


def search(choices: Sequence[Mapping[str, Any]]) -> Table:
    """Returns what a search chose for each method."""
    table = house_table("chosen by local validation data", "method", "points", "local_val", "settings")
    table.columns[-1].justify = "left"
    for row in choices:
        settings = ", ".join(f"{key} = {value}" for key, value in row["settings"].items())
        table.add_row(row["method"], str(row["points"]), f"{row['local_val']:.2f}", settings)
    return table
