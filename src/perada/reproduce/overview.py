"""How far an experiment is, and what is left of it in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import resolve
from .plans import Experiment, Trial, experiments
from .results import Result, read
from .running import state_of


def overview(experiment: Experiment, root: Path, out: Path) -> dict[str, Any]:
    """One line of `perada reproduce list`.

    Minutes are of the machine: runs that were trained together share theirs. What is left is measured where all the
    methods that are left have runs behind them (on any machine), else estimated.
    """
    state = state_of(experiment, root)
    known = measured(root)
    left = [experiment.trial(name) for name in state.left]
    rates = [known.get((experiment.preset, _method(t))) for t in left]
    seconds = [
        _rounds(experiment, t) * (rate if rate is not None else estimate(experiment, t))
        for t, rate in zip(left, rates, strict=True)
    ]
    begun = [t.name for t in left if (out / experiment.name / t.name / "config.toml").is_file()]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "runs": len(experiment.trials),
        "done": len(state.found),
        "left": len(left),
        "begun": len(begun),
        "other_settings": sorted(state.stale),
        "minutes_done": sum(r["seconds"] / r["together"] for r in state.found.values()) / 60,
        "minutes_left": sum(seconds) / 60,
        "measured": all(rate is not None for rate in rates),
    }


def measured(root: Path) -> dict[tuple[str, str], float]:
    """(preset, method) -> seconds of a round, the mean over the runs there are results of."""
    held: dict[tuple[str, str], list[Result]] = {}
    for name, one in experiments().items():
        for result in read(root, name).values():
            held.setdefault((one.preset, result["method"]), []).append(result)
    return {
        key: sum(r["seconds"] / r["together"] for r in found) / sum(r["rounds"] for r in found)
        for key, found in held.items()
    }


def estimate(experiment: Experiment, trial: Trial) -> float:
    """Seconds of a round; merged runs take less."""
    return experiment.seconds.get(_method(trial), experiment.seconds[""])


def _method(trial: Trial) -> str:
    return str(trial.settings.get("method.name", "perada"))


def _rounds(experiment: Experiment, trial: Trial) -> int:
    settings = {**experiment.settings, **trial.settings}
    return int(settings.get("train.rounds") or resolve(experiment.preset, {}).train.rounds)
