"""What the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from ..client.scores import Scores
from ..data import Federation
from ..data.download import Entry

if TYPE_CHECKING:
    from ..runs.run import Run

SHADES = "·░▒▓█"


def spread(found: Mapping[str, Any] | None) -> str:
    """`91.82±4.43`, or n/a."""
    if not found or found.get("mean") is None:
        return "n/a"
    return f"{found['mean']:.2f}±{found['std']:.2f}"


def millions(number: int) -> str:
    return f"{number / 1e6:.2f}M" if number >= 10**5 else f"{number:,}"


def house_table(title: str | None, first: str, *rest: str) -> Table:
    """The house style: narrow enough for 80 columns, first column left, the others right."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left"
    )
    table.caption_justify = "left"
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def results(runs: Sequence[Run]) -> Table:
    """A row a run, as in the paper's table."""
    summaries = [r.summary for r in runs]
    unit = "AUC" if summaries[0]["metric"] == "auc" else "accuracy"
    title = f"{summaries[0]['data']}: {unit} in %, mean ± std over the clients' personal models"
    shifted, distilled = any(s.get("shifted") for s in summaries), any(s["distilled"] for s in summaries)
    columns = ["trained", "sent", "Local-test", "Global-test", *(["shifted"] if shifted else []), "server"]
    table = house_table(title, "method", *columns, *(["distilled"] if distilled else []))
    table.caption = "server: the global model on Global-test"
    table.caption += "; distilled: rounds in which the guard kept it" if distilled else ""
    for s in summaries:
        up, down = (s[k] / max(1, s["round"] * s["cohort"]) / 1e3 for k in ("bytes_up", "bytes_down"))
        table.caption += f"\n{s['method']}: {up:,.0f} kB up and {down:,.0f} kB down, a client and round"
        if "pretrain" in s:
            table.caption += "; in pretraining full models, both ways"
    for s in summaries:
        server = s["global_model"]["global_test"] if s["global_model"] else None
        table.add_row(
            s["method"],
            millions(s["parameters"]["trained"]),
            millions(s["parameters"]["communicated"]),
            spread(s["local_test"]),
            spread(s["global_test"]),
            *([spread(s.get("shifted"))] if shifted else []),
            "n/a" if server is None else f"{server:.2f}",
            *([_kept(s)] if distilled else []),
        )
    return table


def _kept(summary: Mapping[str, Any]) -> str:
    """In how many rounds the guard kept what was distilled."""
    if not summary["distilled"]:
        return "–"
    return f"{summary['accepted']} of {summary['distilled']}" if summary["guarded"] else "all"


def scores(found: Mapping[str, Scores]) -> Table:
    table = house_table("personal models, in %", "client", *found)
    for client in next(iter(found.values())).per_client:
        row = [s.per_client[client] for s in found.values()]
        table.add_row(client, *("n/a" if v is None else f"{v:.2f}" for v in row))
    table.add_section()
    table.add_row("mean ± std", *(spread(s.as_dict()) for s in found.values()))
    labels = next(iter(found.values())).per_label or {}
    if labels:
        table.add_section()
    for label in labels:
        values = [(s.per_label or {}).get(label) for s in found.values()]
        table.add_row(f"AUC of {label}", *("undefined" if v is None else f"{v:.2f}" for v in values))
    return table


def catalogue(entries: Sequence[Entry], home: Path) -> Table:
    """What `perada data get` knows."""
    table = house_table(f"below {home}", "name", "MB", "here", "what", "check")
    for column in table.columns[3:]:
        column.justify, column.overflow, column.no_wrap = "left", "fold", False
    for e in entries:
        table.add_row(e.name, f"{e.megabytes:,}", "yes" if (home / e.folder).exists() else "", e.title, e.checksum)
    return table


def predictions(found: Sequence[Mapping[str, Any]]) -> Table:
    table = house_table(None, "image", "prediction")
    for one in found:
        best = list(one["probabilities"].items())[: None if one["multilabel"] else 3]
        table.add_row(one["image"], ", ".join(f"{name} {p:.1%}" for name, p in best))
    return table


def unlikeness(counts: np.ndarray[Any, Any]) -> float:
    """Mean total-variation distance between two clients' label distributions."""
    shares = np.sort(counts / np.maximum(counts.sum(1, keepdims=True), 1), axis=0)
    many = len(shares)
    # In sorted order the k-th of n is subtracted from the n-1-k above it and has the k below subtracted from it:
    # all pairs without a table of them.
    apart = (2 * np.arange(many) - (many - 1)) @ shares
    return float(0.5 * apart.sum() / (many * (many - 1) / 2)) if many > 1 else 0.0


def partition(federation: Federation) -> Table:
    counts = federation.label_counts()
    width = sum(max(len(name), len(str(counts[:, i].max()))) + 1 for i, name in enumerate(federation.classes))
    few = federation.classes if width <= 40 else ()  # a column each, where they fit
    title = f"{federation.name}: training samples of each class"
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


def groups(backbone: str, classes: int, found: Mapping[str, Mapping[str, int]]) -> Table:
    table = house_table(f"{backbone}, {classes} classes", "group", "parameters", "of full", "buffers")
    for name, size in found.items():
        share = size["parameters"] / found["full"]["parameters"]
        table.add_row(name, f"{size['parameters']:,}", f"{share:.1%}", f"{size['buffers']:,}")
    return table


def methods(found: Mapping[str, Mapping[str, int]], backbone: str, classes: int) -> Table:
    title = f"parameters per client and round ({backbone}, {classes} classes)"
    table = house_table(title, "method", "trained", "sent")
    for name, size in found.items():
        table.add_row(name, f"{size['trained']:,}", f"{size['communicated']:,}")
    return table


def presets(found: Mapping[str, str]) -> Table:
    table = Table(show_header=False, box=None)
    for name, text in found.items():
        table.add_row(name, text)
    return table


def search(found: Mapping[str, Mapping[str, Any]], tried: Mapping[str, int]) -> Table:
    """What a search chose for each method."""
    table = house_table("chosen by local validation data", "method", "points", "local_val", "settings")
    table.columns[-1].justify = "left"
    for method, best in found.items():
        settings = ", ".join(f"{key} = {value}" for key, value in best["settings"].items())
        table.add_row(method, str(tried[method]), f"{best['local_val']:.2f}", settings)
    return table
