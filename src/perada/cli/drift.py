"""What the commands about drift share: their options, and how they print and end."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..config import parse_setting, resolve
from ..errors import InputError
from ..predict.predictor import Check
from . import tables
from .console import show

DRIFTED = 3  # exit code of a command that has found drift
Aware = Annotated[bool, typer.Option("--drift", help="notice drift, by the settings of [drift]")]
DriftSets = Annotated[
    list[str] | None, typer.Option("--set", metavar="drift.KEY=VALUE", help="a setting of [drift], repeatable")
]


def predicting(sets: Sequence[str] | None) -> dict[str, Any]:
    """Returns the settings of predictions; refuses those that belong to a training."""
    found = dict(parse_setting(s) for s in sets or [])
    for key in found:
        if not key.startswith("drift."):
            raise InputError(f"--set {key}: a trained run takes settings of [drift] only")
    resolve(overrides=found)  # refuses an unknown key or value
    return found


def report_drift(found: Check, as_json: bool) -> None:
    """Prints what was found about images; ends the command with code 3 if they have drifted."""
    show(as_json, found.as_dict(), tables.drift_check(found), found.sentence)
    if found.drifted:
        raise typer.Exit(DRIFTED)
