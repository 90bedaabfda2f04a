"""What is chosen between runs, and by which numbers.

The rule, written down before any of it was run:

1. Nothing here sees a test number. A run that stands for election is evaluated on validation data alone (its test
   data are never touched), and of its result the choice reads `Validation`, below, and nothing else.
2. Two validation numbers are legitimate. *Local*: the mean over clients of a personal model's accuracy on that
   client's own validation data. Global-test has no such twin at the clients: no client holds validation data of the
   others. So for the study the server holds back a labelled part of the training data (`data.server_val`) that no
   client trains on, and *server* is the mean over clients of the personal models' accuracy on it. In a federation the
   server would send these images to the clients and get one number back from each; no personal model moves.
3. `local` (tuning of a method): the greatest Local, the first of equals. The paper's own rule.
4. `study` (which distillation): among those whose Local is at most 0.3 points below that of the run without
   distillation, the greatest server score; the first of equals, where the winner of the stage before comes first. If
   nobody qualifies, that one stays (in the first stage: the one the study begins with).
5. `guard=server` is shown and not elected. It chose among its candidates by the very labels that score it here, and
   it needs labelled data at the server, which the paper's setting does not have. `guard=clients` asks the clients'
   validation data in training, so its Local is a little flattered; its server score is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plans import Choice, Experiment, Trial

TOLERANCE = 0.3  # points of Local that distillation may cost: the target of the study
NOT_HANDED_ON = ("train.rounds", "run.seed")  # a screening's own


@dataclass(frozen=True)
class Validation:
    """All that a choice sees of a result."""

    local: float | None
    server: float | None
    guard: str | None = None


def validation_of(result: Mapping[str, Any]) -> Validation:
    held = result["validation"]
    return Validation(held["local_val"], held["server_val"], result["guard"]["kind"])


def elected(choice: Choice, standing: Mapping[str, Validation], reference: Validation | None) -> str:
    """The winner among `standing`, whose first is the one that stays if nobody qualifies."""
    if choice.rule == "local":
        known = {name: v.local for name, v in standing.items() if v.local is not None}
        return max(known, key=lambda name: known[name]) if known else next(iter(standing))
    fit = {name: v.server for name, v in standing.items() if v.server is not None and fits(v, reference)}
    return max(fit, key=lambda name: fit[name]) if fit else next(iter(standing))


def fits(one: Validation, reference: Validation | None) -> bool:
    """Whether it may be elected by the rule `study`."""
    if one.server is None or one.local is None or one.guard == "server":
        return False
    return reference is None or reference.local is None or one.local >= reference.local - TOLERANCE


def winner(experiment: Experiment, name: str, found: Mapping[str, Validation]) -> str | None:
    """The run that a choice settled on; None while one of those that stand for election is not done."""
    choice = experiment.choice(name)
    before = winner(experiment, choice.before, found) if choice.before else None
    needed = [*([choice.reference] if choice.reference else []), *choice.among]
    if (choice.before and before is None) or any(run not in found for run in needed):
        return None
    standing = {run: found[run] for run in ([before] if before else []) + list(choice.among)}
    return elected(choice, standing, found.get(choice.reference))


def settings_of(experiment: Experiment, trial: Trial, found: Mapping[str, Validation]) -> dict[str, Any] | None:
    """What a run differs in from its preset; None while a choice it follows is not settled."""
    handed: dict[str, Any] = {}
    if trial.follows:
        best = winner(experiment, trial.follows, found)
        if best is None:
            return None
        held = settings_of(experiment, experiment.trial(best), found) or {}
        handed = {k: v for k, v in held.items() if k not in NOT_HANDED_ON}
    return {**experiment.settings, **handed, **trial.settings}


def settled(experiment: Experiment, found: Mapping[str, Validation]) -> dict[str, Any] | None:
    """The whole recipe that the last choice of a staged experiment came to: what the preset is to have."""
    if not experiment.choices:
        return None
    best = winner(experiment, experiment.choices[-1].name, found)
    if best is None:
        return None
    whole = settings_of(experiment, experiment.trial(best), found) or {}
    return {k: v for k, v in whole.items() if k.startswith("distill.")}
