"""Experiments small enough to repeat: a run of them is about half a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from small import SMALL

from experiments.running import Place
from experiments.trials import Choice, Experiment, Trial

# Validation data for scores that differ, and a server that holds a third of the training data.
TINY: dict[str, Any] = {**SMALL, "data.val": 0.2, "data.server_val": 0.5, "train.batch": 16}


def trial(name: str, group: str = "all", **settings: Any) -> Trial:
    return Trial(name, group, {k.replace("__", "."): v for k, v in settings.items()})


def experiment(*trials: Trial, choices: tuple[Choice, ...] = (), **settings: Any) -> Experiment:
    """Named like a real one, for its title; `train__lr=1` is train.lr = 1."""
    both = {**TINY, **{k.replace("__", "."): v for k, v in settings.items()}}
    return Experiment("digits", "digits", both, trials, choices, needs_weights=False, seconds={"": 1.0})


def two(**settings: Any) -> Experiment:
    return experiment(trial("perada-0", method__name="perada"), trial("fedavg-0", method__name="fedavg"), **settings)


def staged() -> Experiment:
    """A study of two stages, one run that is the reference and one that is tested with what was settled."""

    def point(name: str, group: str, follows: str = "", **settings: Any) -> Trial:
        held = {"method.name": "perada", **{k.replace("__", "."): v for k, v in settings.items()}}
        return Trial(name, group, held, follows, tested=False)

    trials = (
        Trial("no-kd", "first", {"method.name": "perada-no-kd"}, tested=False),
        point("slow", "first", distill__lr=1e-4),
        point("fast", "first", distill__lr=0.05),
        point("long", "second", "first", distill__steps=12),
        point("pulled", "second", "first", distill__pull=10.0),
        Trial("end", "third", {"method.name": "perada", "train.rounds": 3}, follows="second"),
    )
    choices = (
        Choice("first", ("slow", "fast"), "study", "", "no-kd"),
        Choice("second", ("long", "pulled"), "study", "first", "no-kd"),
    )
    return experiment(*trials, choices=choices, distill__guard="none")


def settling() -> Experiment:
    """A study by the rule `settle`: no distillation four times, two candidates and a control with two seeds."""
    variants = {
        "no-kd": {"method.name": "perada-no-kd"},
        "slow": {"method.name": "perada", "distill.lr": 1e-4},
        "hard": {"method.name": "perada", "distill.lr": 0.05},
        "wide": {"method.name": "perada-no-kd", "model.adapter_std": 6e-3},
    }
    runs = [(variant, seed, "") for variant in variants for seed in (0, 1)] + [("no-kd", 0, "b"), ("no-kd", 0, "c")]
    trials = [
        Trial(f"{variant}-{seed}{which}", "all", {**variants[variant], "run.seed": seed}, tested=False, variant=variant)
        for variant, seed, which in runs
    ]
    choice = Choice("which", ("slow", "hard"), "settle", "", "no-kd", ("wide",))
    return experiment(*trials, choices=(choice,), distill__guard="none")


def place(home: Path, **more: Any) -> Place:
    return Place(home / "runs", home / "results", **more)


def result(experiment: str, run: str, method: str, seed: int, last: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A made-up result, as a file would hold it."""
    return {
        "experiment": experiment,
        "run": run,
        "group": "all",
        "method": method,
        "seed": seed,
        "settings": {},
        "digest": "",
        "rounds": 1,
        "validation": {"local_val": None, "server_val": None},
        "guard": {"kind": None, "distilled": 0, "accepted": 0},
        "rows": [],
        "last": dict(last),
        "seconds": 60.0,
        "date": "2026-11-15",
        "versions": {"torch": "0"},
        "device": "none",
        "together": 1,
        **more,
    }
