"""Cells and tables that the sections of the document share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perada.report.standings import pipes as table

from .results import Result
from .trials import Experiment

MISSING = "–"
Rows = list[list[str]]


def pipes(head: Sequence[str], rows: Rows) -> list[str]:
    """Returns a table and the empty line after it."""
    return [*table(head, rows), ""]


def number(found: float | None) -> str:
    return MISSING if found is None else f"{found:.2f}"


def accepted(several: Sequence[Result]) -> str:
    """Returns how often the guard accepted a student, over all rounds of the runs."""
    distilled = sum(r["guard"]["distilled"] for r in several)
    if not distilled:
        return MISSING
    if any(r["guard"]["accepted"] is None for r in several):
        return "no guard"
    kept = sum(r["guard"]["accepted"] for r in several)
    return f"{kept} of {distilled} ({kept / distilled:.0%})"


def changed(experiment: Experiment, result: Result) -> str:
    hidden = {"method.name", "run.seed", "run.checkpoint_every", "train.rounds"}
    kept = {k: v for k, v in result["settings"].items() if k not in hidden and experiment.settings.get(k, MISSING) != v}
    shown = ", ".join(f"{k.partition('.')[2]} {_brief(v)}" for k, v in kept.items())
    return shown or ("no distillation" if result["method"] == "perada-no-kd" else "as it begins")


def _brief(value: Any) -> Any:
    """Returns a setting, and a long list by its ends."""
    long = isinstance(value, list) and len(value) > 6
    return f"{value[0]} to {value[-1]} ({len(value)} values)" if long else value
