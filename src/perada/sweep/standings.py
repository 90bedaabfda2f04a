"""The paper's tables from finished runs: one row a method, as Markdown, CSV, LaTeX, JSON or for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from ..cli.tables import house_table, millions
from ..methods import REGISTRY

Place = Literal["best", "next", ""]
# Mean; std over clients (mean over seeds), None of one model; std over seeds, None of one.
Number = tuple[float, float | None, float | None] | None
PERSONAL = {"local_test": "Local-test", "global_test": "Global-test", "shifted": "shifted"}
GLOBAL = {"global_test": "Global-test", "shifted": "shifted"}


@dataclass(frozen=True)
class Row:
    method: str
    seeds: int
    trained: int
    communicated: int
    personal: dict[str, Number]  # the clients' personal models
    server: dict[str, Number]  # the global model, where there is one


@dataclass(frozen=True)
class Standings:
    data: str
    unit: str  # accuracy or AUC
    rows: tuple[Row, ...]

    @property
    def seeds(self) -> int:
        return max((r.seeds for r in self.rows), default=0)

    @property
    def columns(self) -> list[str]:
        """What was measured at all."""
        return [key for key in PERSONAL if any(r.personal[key] for r in self.rows)]

    @property
    def server_columns(self) -> list[str]:
        return [key for key in GLOBAL if any(r.server[key] for r in self.rows)]

    def heads(self) -> tuple[list[str], list[str]]:
        first = ["method", "trained", "sent", *(PERSONAL[key] for key in self.columns)]
        return first, ["global model of", *(GLOBAL[key] for key in self.server_columns)]

    def about(self) -> str:
        over = f", mean of {self.seeds} seeds" if self.seeds > 1 else ""
        return f"{self.data}: {self.unit} in %, mean ± std over the clients' personal models{over}"


def standings(summaries: Sequence[dict[str, Any]]) -> Standings:
    """Rows in the paper's order; runs of one method are its seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for s in summaries:
        groups.setdefault(s["method"], []).append(s)
    order = sorted(groups, key=list(REGISTRY).index)
    return Standings(
        data=summaries[0]["data"],
        unit="AUC" if summaries[0]["metric"] == "auc" else "accuracy",
        rows=tuple(
            Row(
                method=name,
                seeds=len(runs := groups[name]),
                trained=runs[0]["parameters"]["trained"],
                communicated=runs[0]["parameters"]["communicated"],
                personal={key: _number([s.get(key) for s in runs]) for key in PERSONAL},
                server={key: _number([_server(s, key) for s in runs]) for key in GLOBAL},
            )
            for name in order
        ),
    )


def _server(summary: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = (summary["global_model"] or {}).get(key)
    return None if value is None else {"mean": value, "std": None}


def _number(found: Sequence[dict[str, Any] | None]) -> Number:
    """None where any of the seeds has no value: a mean of fewer seeds would not compare."""
    if any(f is None or f["mean"] is None for f in found):
        return None
    means = np.array([f["mean"] for f in found if f])
    spreads = [f["std"] for f in found if f and f["std"] is not None]
    over_seeds = float(means.std(ddof=1)) if len(means) > 1 else None
    return float(means.mean()), float(np.mean(spreads)) if spreads else None, over_seeds


def places(values: Sequence[float | None]) -> list[Place]:
    """Best and runner-up of the values as they are shown (two decimals); alone nobody is best."""
    shown = [None if v is None else round(v, 2) for v in values]
    order = sorted({v for v in shown if v is not None}, reverse=True)
    if sum(v is not None for v in shown) < 2:
        return [""] * len(values)
    first: dict[float, Place] = dict(zip(order, ("best", "next"), strict=False))
    return ["" if v is None else first.get(v, "") for v in shown]


Cell = Callable[[str, Place], str]


def _cells(found: Standings, cell: Cell) -> tuple[list[list[str]], list[list[str]]]:
    """Both tables as text: the personal models, and the global models of the methods that have one."""
    personal = [[r.method, millions(r.trained), millions(r.communicated)] for r in found.rows]
    for key in found.columns:
        _add(personal, [r.personal[key] for r in found.rows], cell, spread=1)
    with_server = [r for r in found.rows if any(r.server.values())]
    server = [[r.method] for r in with_server]
    for key in found.server_columns:
        _add(server, [r.server[key] for r in with_server], cell, spread=2 if found.seeds > 1 else 0)
    return personal, server


def _add(table: list[list[str]], numbers: list[Number], cell: Cell, spread: int) -> None:
    """One more column; `spread` says which of the two standard deviations stands behind a mean, 0 for none."""
    for row, number, place in zip(table, numbers, places([n and n[0] for n in numbers]), strict=True):
        behind = f" ± {number[spread]:.2f}" if number and spread and number[spread] is not None else ""
        row.append("n/a" if number is None else cell(f"{number[0]:.2f}", place) + behind)


def markdown(found: Standings) -> str:
    marks = {"best": "**{}**", "next": "<u>{}</u>", "": "{}"}
    personal, server = _cells(found, lambda text, place: marks[place].format(text))
    head, server_head = found.heads()
    lines = [found.about() + ". Best in bold, runner-up underlined.", "", *pipes(head, personal)]
    return "\n".join([*lines, "", *pipes(server_head, server)] if server else lines) + "\n"


def pipes(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(r) + " |" for r in rows)]


def latex(found: Standings) -> str:
    marks = {"best": r"\textbf{{{}}}", "next": r"\underline{{{}}}", "": "{}"}
    personal, server = _cells(found, lambda text, place: marks[place].format(text))
    head, server_head = found.heads()
    parts = [f"% {found.about()}; needs booktabs", *_tabular(head, personal)]
    return "\n".join([*parts, "", *_tabular(server_head, server)] if server else parts) + "\n"


def _tabular(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(c.replace("±", r"$\pm$").replace("_", r"\_").replace("%", r"\%") for c in cells) + r" \\"

    top = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", line(head), r"\midrule"]
    return [*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"]


def comma_separated(found: Standings) -> str:
    """Every number, unrounded; std_clients is the mean over seeds of the deviation over clients."""
    out = io.StringIO()
    columns = [*((f"{k}", "personal", k) for k in PERSONAL), *((f"global_model_{k}", "server", k) for k in GLOBAL)]
    names = [f"{c}_{part}" for c, _, _ in columns for part in ("mean", "std_clients", "std_seeds")]
    write = csv.writer(out, lineterminator="\n")
    write.writerow(["method", "seeds", "trained", "communicated", *names])
    for r in found.rows:
        numbers = [getattr(r, which)[key] or (None, None, None) for _, which, key in columns]
        write.writerow([r.method, r.seeds, r.trained, r.communicated, *(x for n in numbers for x in n)])
    return out.getvalue()


def as_json(found: Standings) -> dict[str, Any]:
    def numbers(of: dict[str, Number]) -> dict[str, Any]:
        names = ("mean", "std_clients", "std_seeds")
        return {key: dict(zip(names, n, strict=True)) if n else None for key, n in of.items()}

    return {
        "data": found.data,
        "metric": found.unit,
        "methods": [
            {
                "name": r.method,
                "seeds": r.seeds,
                "trained": r.trained,
                "communicated": r.communicated,
                **numbers(r.personal),
                "global_model": numbers(r.server) if any(r.server.values()) else None,
            }
            for r in found.rows
        ],
    }


def terminal(found: Standings) -> list[Table]:
    marks = {"best": "[bold]{}[/]", "next": "[underline]{}[/]", "": "{}"}
    personal, server = _cells(found, lambda text, place: marks[place].format(text))
    head, server_head = found.heads()
    first = house_table(found.about(), *head)
    first.caption = "best in bold, runner-up underlined; trained and sent: parameters of a client, a round"
    second = house_table(None, *server_head)
    second.caption = "± std over seeds" if found.seeds > 1 else None
    for table, rows in ((first, personal), (second, server)):
        for name, *rest in rows:
            table.add_row(name, *map(Text.from_markup, rest))
    return [first, second] if server else [first]
