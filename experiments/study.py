"""The rules that choose between runs, and the numbers they read.

The rules of the first study and of tuning, written down before any run:

1. No rule reads a test number. A candidate is evaluated on validation data alone, and its test data are never touched.
   A rule reads `Validation`, below, and nothing else of a result.
2. A rule reads two validation numbers. *Local* is the mean over clients of a personal model's accuracy on the client's
   own validation data. Clients hold no validation data for Global-test, because none has images of the others. So the
   server holds back a labelled part of the training data (`data.server_val`), on which no client trains. *server* is
   the mean over clients of the personal models' accuracy on it. In a federation the server would send these images to
   the clients, and each would return one number; no personal model would move.
3. `local` tunes a method: the greatest Local wins, the first of equals. This is the paper's own rule.
4. `study` chooses the distillation. A candidate qualifies if its Local is at most 0.3 points below that of the run
   without distillation. The greatest server score among these wins, the first of equals; the winner of the stage before
   comes first. If none qualifies, that winner stays (in the first stage: the run that the study begins with).
5. `guard=server` is shown and never chosen. It picks its students by the labels that score it here, and it needs
   labelled data at the server, which the paper's setting does not have. `guard=clients` uses the clients' validation
   data in training, which flatters its Local a little, but not its server score.

The rule `settle` of the second study, written down on 18 November 2026 before any of its runs:

6. *Local* and *server* of a run are means over its evaluations in the second half: rounds 26 to 50, every second round.
   Those of a variant are means over its seeds; equal runs (same variant, same seed) are averaged first.
7. *Noise* is the standard deviation of server between equal runs in different processes: the run without distillation,
   three times with seed 0 and twice with seed 1, pooled. Two means over two seeds differ by chance with the same
   standard deviation, so twice the noise is two standard deviations of what is compared.
8. A candidate counts if its server score exceeds the reference's by more than twice the noise and its Local is at most
   0.3 points below. The greatest server score among those that count wins. If none counts, the reference wins.
9. A choice waits until all its runs and all equal runs are done.
10. Controls and diagnoses are shown, never chosen. `wide` has no distillation and adapters that begin as large as one
    hard step makes them: a winner that does not beat `wide` by more than twice the noise owes its gain to the size of
    the weights, not to distilled knowledge. `authors` selects with labels at the server, which is item 5.
11. λ and the learning rate are searched alike for no distillation, the preset's distillation and Ditto: the candidates
    are λ = 2, λ = 4 and half the rate; the reference is the same method with λ = 1 and the preset's rate.
12. If no distillation wins the choice `distillation`, the preset keeps its recipe, and the document says that no gain
    beyond the noise was found.
13. Otherwise the winner becomes the preset `cifar10`, whatever its test says. `main` then tests it for 200 rounds with
    3 seeds, beside no distillation, the first study's recipe, the control `wide` and the other methods. This test
    decides nothing. (Written on 18 November 2026, after the choice and before any of these runs.)
14. A method for which λ or the rate was chosen by item 11 is tested in `main` with that setting too. (The same day,
    after the choice for no distillation, λ = 2, and before the run.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .results import later
from .trials import Choice, Experiment, Trial

TOLERANCE = 0.3  # points of Local that distillation may cost
NOT_HANDED_ON = ("train.rounds", "run.seed")  # what a candidate does not pass to the runs that follow it


@dataclass(frozen=True)
class Validation:
    """All that a rule reads of a result."""

    local: float | None  # after the last round
    server: float | None
    guard: str | None = None
    later_local: float | None = None  # over the evaluations of the second half
    later_server: float | None = None


def validation_of(result: Mapping[str, Any]) -> Validation:
    """Returns what a rule may read of a result."""
    held, both = result["validation"], (later(dict(result), split) for split in ("local_val", "server_val"))
    return Validation(held["local_val"], held["server_val"], result["guard"]["kind"], *both)


def elected(choice: Choice, standing: Mapping[str, Validation], reference: Validation | None) -> str:
    """Returns the winner among `standing`; its first stays if none qualifies."""
    if choice.rule == "local":
        known = {name: v.local for name, v in standing.items() if v.local is not None}
        return max(known, key=lambda name: known[name]) if known else next(iter(standing))
    fit = {name: v.server for name, v in standing.items() if v.server is not None and fits(v, reference)}
    return max(fit, key=lambda name: fit[name]) if fit else next(iter(standing))


def fits(one: Validation, reference: Validation | None) -> bool:
    """Returns whether the rule `study` may choose it."""
    if one.server is None or one.local is None or one.guard == "server":
        return False
    return reference is None or reference.local is None or one.local >= reference.local - TOLERANCE


def winner(experiment: Experiment, name: str, found: Mapping[str, Validation]) -> str | None:
    """Returns the run (rule "settle": the variant) that a choice settled on; None while one of its runs is not done."""
    choice = experiment.choice(name)
    if choice.rule == "settle":
        return _settle_winner(experiment, choice, found)
    before = winner(experiment, choice.before, found) if choice.before else None
    needed = [*([choice.reference] if choice.reference else []), *choice.among]
    if (choice.before and before is None) or any(run not in found for run in needed):
        return None
    standing = {run: found[run] for run in ([before] if before else []) + list(choice.among)}
    return elected(choice, standing, found.get(choice.reference))


@dataclass(frozen=True)
class Scores:
    """Means over the second half: of a variant over its seeds, or the noise of both."""

    local: float
    server: float


def scores_of(experiment: Experiment, variant: str, found: Mapping[str, Validation]) -> Scores | None:
    """Returns a variant's scores over its seeds; None while a seed has no run that is done."""
    seeds = {experiment.trial(run).settings["run.seed"] for run in experiment.runs_of(variant)}
    means = seeds_of(experiment, variant, found)
    return _mean(list(means.values())) if means and means.keys() == seeds else None


def seeds_of(experiment: Experiment, variant: str, found: Mapping[str, Validation]) -> dict[int, Scores]:
    """Returns seed -> the mean of a variant's equal runs that are done, in the order of the seeds."""
    equal = _equal_runs(experiment, found)
    return {seed: _mean(runs) for (of, seed), runs in sorted(equal.items()) if of == variant}


def noise_of(experiment: Experiment, found: Mapping[str, Validation]) -> Scores | None:
    """Returns the standard deviation between equal runs, pooled; None while no two equal runs are done."""
    several = [runs for runs in _equal_runs(experiment, found).values() if len(runs) > 1]
    free = sum(len(runs) - 1 for runs in several)
    if not free:
        return None
    local = sum((run.local - _mean(runs).local) ** 2 for runs in several for run in runs)
    server = sum((run.server - _mean(runs).server) ** 2 for runs in several for run in runs)
    return Scores((local / free) ** 0.5, (server / free) ** 0.5)


def counts(one: Scores, reference: Scores, noise: Scores) -> bool:
    """Returns whether a candidate's gain is beyond the noise and its Local is kept: item 8 of the rule."""
    return one.server - reference.server > 2 * noise.server and one.local >= reference.local - TOLERANCE


def _equal_runs(experiment: Experiment, found: Mapping[str, Validation]) -> dict[tuple[str, int], list[Scores]]:
    """Returns (variant, seed) -> the scores of its runs that are done."""
    equal: dict[tuple[str, int], list[Scores]] = {}
    for trial in experiment.trials:
        seen = found.get(trial.name)
        if trial.variant and seen and seen.later_local is not None and seen.later_server is not None:
            scores = Scores(seen.later_local, seen.later_server)
            equal.setdefault((trial.variant, trial.settings["run.seed"]), []).append(scores)
    return equal


def _mean(several: Sequence[Scores]) -> Scores:
    return Scores(*(sum(values) / len(several) for values in zip(*((s.local, s.server) for s in several), strict=True)))


def _settle_winner(experiment: Experiment, choice: Choice, found: Mapping[str, Validation]) -> str | None:
    """Returns the variant that the rule "settle" chooses; None while a run that it needs is not done."""
    repeated = {t.variant for t in experiment.trials if len(_repeats(experiment, t)) > 1}
    needed = [run for v in {*choice.among, choice.reference, *repeated} for run in experiment.runs_of(v)]
    reference, noise = scores_of(experiment, choice.reference, found), noise_of(experiment, found)
    if any(run not in found for run in needed) or reference is None or noise is None:
        return None
    guarded = {t.variant for t in experiment.trials if t.name in found and found[t.name].guard == "server"}
    standing = {v: scores_of(experiment, v, found) for v in choice.among if v not in guarded}
    fit = {v: s.server for v, s in standing.items() if s is not None and counts(s, reference, noise)}
    return max(fit, key=lambda v: fit[v]) if fit else choice.reference


def _repeats(experiment: Experiment, trial: Trial) -> list[Trial]:
    """Returns the runs that equal this one, itself included."""
    seed = trial.settings.get("run.seed")
    return [t for t in experiment.trials if t.variant and t.variant == trial.variant and t.settings["run.seed"] == seed]


def settings_of(experiment: Experiment, trial: Trial, found: Mapping[str, Validation]) -> dict[str, Any] | None:
    """Returns how a run's settings differ from its preset; None while the choice that it follows is open."""
    handed: dict[str, Any] = {}
    if trial.follows:
        best = winner(experiment, trial.follows, found)
        if best is None:
            return None
        held = settings_of(experiment, experiment.trial(best), found) or {}
        handed = {k: v for k, v in held.items() if k not in NOT_HANDED_ON}
    return {**experiment.settings, **handed, **trial.settings}


def settled(experiment: Experiment, found: Mapping[str, Validation]) -> dict[str, Any] | None:
    """Returns the distillation that a study came to, which the preset is to have; None while it is not settled.

    A study of stages settles it with its last choice, one by the rule "settle" with its first: item 12 says what
    happens where no distillation wins.
    """
    if not experiment.choices:
        return None
    if experiment.choices[0].rule == "settle":
        first = experiment.choices[0]
        best = winner(experiment, first.name, found)
        if best is None or best == first.reference:
            return None
        whole = {**experiment.settings, **experiment.trial(experiment.runs_of(best)[0]).settings}
        return {k: v for k, v in whole.items() if k.startswith("distill.")}
    best = winner(experiment, experiment.choices[-1].name, found)
    if best is None:
        return None
    whole = settings_of(experiment, experiment.trial(best), found) or {}
    return {k: v for k, v in whole.items() if k.startswith("distill.")}
