"""The paper's tables from finished runs, one row per method: as Markdown, CSV, LaTeX or JSON."""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from ..client.cost import RoundCost
from ..methods import REGISTRY
from ..runs.moment import Evaluation
from . import costs
from .choices import Choices, Part
from .facts import mean_and_std
from .svg import millions

Place = Literal["best", "next", ""]
# Mean; std over clients (its mean over seeds; None for the global model); std over seeds (None for one seed).
Number = tuple[float, float | None, float | None] | None
STATISTICS = ("mean", "std_clients", "std_seeds")  # a Number's names in files
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
    over: str = ""  # over how many clients the means are, where it is not all
    costs: Mapping[str, RoundCost] = field(default_factory=dict)  # of a client's round, by method
    choices: Choices | None = None  # the last round beside the one that validation data choose

    @property
    def seeds(self) -> int:
        return max((r.seeds for r in self.rows), default=0)

    def about(self) -> str:
        seeds = f", mean of {self.seeds} seeds" if self.seeds > 1 else ""
        over = f" (over {self.over} clients)" if self.over else ""
        return f"{self.data}: {self.unit} in %, mean ± std over the clients' personal models{over}{seeds}"


def standings(summaries: Sequence[Mapping[str, Any]]) -> Standings:
    """Returns rows in the paper's order, then methods of other packages; runs of one method are its seeds."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for s in summaries:
        groups.setdefault(s["method"], []).append(s)
    order = [*(n for n in REGISTRY if n in groups), *(n for n in groups if n not in REGISTRY)]
    return Standings(
        data=summaries[0]["data"],
        unit="AUC" if summaries[0]["metric"] == "auc" else "accuracy",
        rows=tuple(_row(name, groups[name]) for name in order),
        over=" or ".join(_over(summaries)),
    )


def _over(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the numbers of clients that the means are over, where they are not over all."""
    scores = [s for row in map(Evaluation.read, summaries) for name, s in row.scores.items() if name in PERSONAL]
    return list(dict.fromkeys(s.over for s in scores if s.over))


def _row(method: str, seeds: Sequence[Mapping[str, Any]]) -> Row:
    last, sizes = [Evaluation.read(s) for s in seeds], seeds[0]["parameters"]
    return Row(
        method=method,
        seeds=len(seeds),
        trained=sizes["trained"],
        communicated=sizes["communicated"],
        personal={split: _number([mean_and_std(row, split) for row in last]) for split in PERSONAL},
        server={
            "global_test": _number([(row.global_model, None) for row in last]),
            "shifted": _number([(row.global_shifted, None) for row in last]),
        },
    )


def _number(scores: Sequence[tuple[float | None, float | None]]) -> Number:
    """Returns the mean over seeds; None if a seed has no value, since a mean of fewer seeds would not compare."""
    means = [mean for mean, _ in scores if mean is not None]
    if len(means) < len(scores):
        return None
    deviations = [std for _, std in scores if std is not None]
    over_seeds = float(np.std(means, ddof=1)) if len(means) > 1 else None
    return float(np.mean(means)), float(np.mean(deviations)) if deviations else None, over_seeds


def places(values: Sequence[float | None]) -> list[Place]:
    """Returns best and runner-up of the values as they are shown (two decimals); a single value has no mark."""
    shown = [None if v is None else round(v, 2) for v in values]
    order = sorted({v for v in shown if v is not None}, reverse=True)
    if sum(v is not None for v in shown) < 2:
        return [""] * len(values)
    first: dict[float, Place] = dict(zip(order, ("best", "next"), strict=False))
    return ["" if v is None else first.get(v, "") for v in shown]


def parts(table: Standings, marks: Mapping[Place, str]) -> list[Part]:
    """Returns head and rows of the personal models' table and, where there are global models, of theirs.

    `marks` says how a best value, a runner-up and another value are written.
    """
    sizes = [[r.method, millions(r.trained), millions(r.communicated)] for r in table.rows]
    personal = ["method", "trained", "sent"], sizes
    _add_columns(personal, PERSONAL, [r.personal for r in table.rows], marks, spread=1)
    with_server = [r for r in table.rows if any(r.server.values())]
    server = ["global model of"], [[r.method] for r in with_server]
    _add_columns(server, GLOBAL, [r.server for r in with_server], marks, spread=2 if table.seeds > 1 else 0)
    return [personal, server] if with_server else [personal]


def further_parts(table: Standings, seconds: bool = False) -> list[tuple[str, Part]]:
    """Returns what each further table is about, its head and its rows: by round and size, and what a round costs.

    seconds: with the seconds of a round. Files are written without them, so that equal runs have equal tables.
    """
    found: list[tuple[str, Part]] = []
    if table.choices is not None and table.choices.rows:
        found.append((table.choices.about, table.choices.part))
    if table.costs:
        most = None if seconds else -1
        rows = [[name, *costs.cells(cost)[:most]] for name, cost in table.costs.items()]
        found.append((costs.about(table.costs, seconds), (["a round of", *costs.HEAD[:most]], rows)))
    return found


def _add_columns(
    part: Part,
    titles: Mapping[str, str],
    numbers: Sequence[Mapping[str, Number]],
    marks: Mapping[Place, str],
    spread: int,
) -> None:
    """Adds a column per split that any run measured. `spread`: the place of a deviation in a Number, 0 for none."""
    head, rows = part
    for split, title in titles.items():
        column = [of[split] for of in numbers]
        if not any(column):
            continue
        head.append(title)
        for row, number, place in zip(rows, column, places([n and n[0] for n in column]), strict=True):
            deviation = f" ± {number[spread]:.2f}" if number and spread and number[spread] is not None else ""
            row.append("n/a" if number is None else marks[place].format(f"{number[0]:.2f}") + deviation)


def markdown(table: Standings) -> str:
    shown = parts(table, {"best": "**{}**", "next": "<u>{}</u>", "": "{}"})
    head = table.about() + ". Best in bold, runner-up underlined."
    further = [
        text for about, part in further_parts(table) for text in (f"{_capital(about)}.", "\n".join(pipes(*part)))
    ]
    return "\n\n".join([head, *("\n".join(pipes(*part)) for part in shown), *further]) + "\n"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def pipes(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(r) + " |" for r in rows)]


def latex(table: Standings) -> str:
    shown = parts(table, {"best": r"\textbf{{{}}}", "next": r"\underline{{{}}}", "": "{}"})
    further = [f"% {about}\n" + "\n".join(_tabular(*part)) for about, part in further_parts(table)]
    body = [*("\n".join(_tabular(*part)) for part in shown), *further]
    return f"% {table.about()}; needs booktabs\n" + "\n\n".join(body) + "\n"


TEX = str.maketrans({"±": r"$\pm$", "≥": r"$\ge$", "–": "--", "_": r"\_", "%": r"\%"})


def _tabular(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(c.translate(TEX) for c in cells) + r" \\"

    top = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", line(head), r"\midrule"]
    return [*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"]


def comma_separated(table: Standings) -> str:
    """Returns every number, unrounded; std_clients is the mean over seeds of the deviation over clients."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    columns = [*PERSONAL, *(f"global_model_{split}" for split in GLOBAL)]
    names = [f"{column}_{statistic}" for column in columns for statistic in STATISTICS]
    write.writerow(["method", "seeds", "trained", "communicated", *names])
    for r in table.rows:
        numbers = [number or (None, None, None) for number in (*r.personal.values(), *r.server.values())]
        write.writerow([r.method, r.seeds, r.trained, r.communicated, *itertools.chain(*numbers)])
    return out.getvalue()


def as_json(table: Standings) -> dict[str, Any]:
    def numbers(of: dict[str, Number]) -> dict[str, Any]:
        return {split: dict(zip(STATISTICS, number, strict=True)) if number else None for split, number in of.items()}

    rounds = table.choices.as_dict() if table.choices else {}
    rows = [
        {
            "name": r.method,
            "seeds": r.seeds,
            "trained": r.trained,
            "communicated": r.communicated,
            **numbers(r.personal),
            "global_model": numbers(r.server) if any(r.server.values()) else None,
            **({"cost": asdict(table.costs[r.method])} if r.method in table.costs else {}),
            **({"rounds": rounds[r.method]} if r.method in rounds else {}),
        }
        for r in table.rows
    ]
    return {"data": table.data, "metric": table.unit, "methods": rows}
