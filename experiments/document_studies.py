"""The document's sections about the two studies of distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perada.config import resolve

from . import drawings
from .cells import MISSING, Rows, accepted, changed, number, pipes
from .overview import expected
from .results import Result, later
from .running import State
from .study import (
    TOLERANCE,
    Scores,
    Validation,
    counts,
    fits,
    noise_of,
    scores_of,
    seeds_of,
    settled,
    validation_of,
    winner,
)
from .trials import Choice, Experiment


def study_section(state: State, figures: dict[str, str]) -> list[str]:
    experiment, found = state.experiment, state.found
    seen = {n: validation_of(r) for n, r in found.items()}
    won = {c.name: winner(experiment, c.name, seen) for c in experiment.choices}
    rows = []
    for trial in experiment.trials:
        if trial.name in found:
            result, v = found[trial.name], seen[trial.name]
            stages = [c.name + _how(c, trial.name, seen) for c in experiment.choices if won[c.name] == trial.name]
            settings = changed(experiment, result)
            late = [number(later(result, split)) for split in ("local_val", "server_val")]
            rows.append([trial.name, trial.group, settings, number(v.local), number(v.server), *late])
            rows[-1] += [accepted([result]), ", ".join(stages)]
    lines = [
        "Validation data only, means over the personal models. *Local*: the clients' own validation data. *server*:",
        "labelled images that the server holds back. The rule chose by the last round; nothing was chosen by the",
        "evaluations from the middle round on (*2nd half*). Settings are the differences from where the study begins.",
        "*won* names the stage that a run won; *stayed* means that no candidate of that stage qualified.",
        "",
    ]
    numbers = ["Local", "server", "Local, 2nd half", "server, 2nd half"]
    lines += pipes(["run", "stage", "settings", *numbers, "guard accepted", "won"], rows)
    for choice in experiment.choices:
        group = [t.name for t in experiment.trials if t.group == choice.name and t.name in found]
        drawn = [n for n in dict.fromkeys([choice.reference, won.get(choice.before) or "", *group]) if n in found]
        for split, word in (("server_val", "server"), ("local_val", "Local")) if group else ():
            file, title = f"{experiment.name}-{choice.name}-{split}.svg", f"Stage {choice.name}: {word}"
            figures[file] = drawings.convergence({n: [found[n]] for n in drawn}, title, split)
            lines += [f"![{title} over rounds](results/{file})"]
    lines.append("")
    chosen = settled(experiment, seen)
    if chosen is None:
        return [*lines, "Not settled yet: a stage is not complete.", ""]
    words = ", ".join(f"`{k} = {v}`" for k, v in sorted(chosen.items()))
    return [*lines, f"Chosen for the preset `{experiment.preset}`: {words}.", ""]


def settle_section(state: State, figures: dict[str, str]) -> list[str]:
    """The study by the rule "settle": the noise of equal runs, then each choice with its candidates."""
    experiment = state.experiment
    seen = {name: validation_of(result) for name, result in state.found.items()}
    noise = noise_of(experiment, seen)
    lines = [
        "Validation data only, personal models, means over rounds 26 to 50 and then over the seeds. *Local*: the",
        "clients' own validation data. *server*: labelled images that the server holds back. Differences are to the",
        "first row, in points; *by seed* is that of server for seeds 0 and 1. A candidate counts if its server score",
        f"is higher by more than twice the noise and its Local is lower by at most {TOLERANCE} points.",
        "",
    ]
    if noise is None:
        lines += ["Noise: not measured yet, because no two equal runs are done.", ""]
    else:
        lines += [
            f"Noise, the standard deviation between equal runs: server {noise.server:.2f}, Local {noise.local:.2f}.",
            f"So a gain counts above {2 * noise.server:.2f} points of server.",
            "",
        ]
    for choice in experiment.choices:
        lines += [f"### {choice.name}", "", *_contest(state, choice, seen, noise)]
    drawn = {v: runs for v in ("no-kd", *experiment.choices[0].among) if (runs := _runs_of(state, v))}
    for split, word in (("server_val", "server"), ("local_val", "Local")):
        if drawn:
            file, title = f"{experiment.name}-{split}.svg", f"{experiment.name}: {word}"
            figures[file] = drawings.convergence(drawn, title, split)
            lines += [f"![{title} over rounds](results/{file})"]
    return [*lines, ""]


def _runs_of(state: State, variant: str) -> list[Result]:
    return [state.found[run] for run in state.experiment.runs_of(variant) if run in state.found]


CONTEST = ["variant", "settings", "runs", "Local", "server", "Local −", "server −", "by seed", "in noise", "counts"]


def _contest(state: State, choice: Choice, seen: Mapping[str, Validation], noise: Scores | None) -> list[str]:
    """Returns one choice's table and its outcome."""
    experiment, rows = state.experiment, Rows()
    reference, won = scores_of(experiment, choice.reference, seen), winner(experiment, choice.name, seen)
    for variant in (choice.reference, *choice.among, *choice.shown):
        several = _runs_of(state, variant)
        if not several:
            continue
        own = scores_of(experiment, variant, seen)
        row = [variant, changed(experiment, several[0]), str(len(several))]
        row += [MISSING, MISSING] if own is None else [number(own.local), number(own.server)]
        gains, verdict = [MISSING] * 4, MISSING
        if own and reference and variant != choice.reference:
            gain = own.server - reference.server
            gains = [f"{own.local - reference.local:+.2f}", f"{gain:+.2f}"]
            gains += [_by_seed(experiment, variant, choice.reference, seen)]
            gains += [f"{gain / noise.server:+.1f}" if noise and noise.server else MISSING]
            if noise and variant not in choice.shown:
                verdict = "yes" if counts(own, reference, noise) else "no"
        rows.append([*row, *gains, verdict + (" (won)" if variant == won else ""), accepted(several)])
    if not rows:
        return ["Nothing was run yet.", ""]
    outcome = [_outcome(state, choice, won)]
    if won and won != choice.reference and choice.control:
        outcome += _beyond(experiment, won, choice.control, seen, noise)
    if choice == experiment.choices[0] and (chosen := settled(experiment, seen)):
        outcome += [_in_preset(experiment, chosen)]
    return [*pipes([*CONTEST, "guard accepted"], rows), *outcome, ""]


def _in_preset(experiment: Experiment, chosen: Mapping[str, Any]) -> str:
    own = resolve(experiment.preset, {}).flat()
    if all(own[k] == (tuple(v) if isinstance(v, list) else v) for k, v in chosen.items()):
        return f"The preset `{experiment.preset}` has it."
    return (
        f"The preset `{experiment.preset}` does not have it yet: it keeps its recipe until the winner is tested over "
        "200 rounds and 3 seeds."
    )


def _by_seed(experiment: Experiment, one: str, other: str, seen: Mapping[str, Validation]) -> str:
    """Returns the difference of two variants' server scores, seed by seed."""
    ours, theirs = (seeds_of(experiment, variant, seen) for variant in (one, other))
    return ", ".join(f"{ours[seed].server - theirs[seed].server:+.2f}" for seed in sorted(ours.keys() & theirs.keys()))


def _outcome(state: State, choice: Choice, won: str | None) -> str:
    experiment = state.experiment
    if won is None:
        needed = [run for v in (choice.reference, *choice.among) for run in experiment.runs_of(v)]
        missing = [run for run in needed if run not in state.found]
        minutes = sum(expected(experiment, state.configs[run]) for run in missing) / 60
        names = f": {', '.join(missing)} (about {minutes:.0f} minutes)" if missing else " of the equal runs"
        return f"Not settled yet. Missing{names}."
    if won == choice.reference:
        return f"No candidate counts: `{won}` stays."
    return f"Chosen: `{won}`."


def _beyond(
    experiment: Experiment, won: str, control: str, seen: Mapping[str, Validation], noise: Scores | None
) -> list[str]:
    """Returns what the control says about the winner: item 10 of the rule."""
    ours, theirs = scores_of(experiment, won, seen), scores_of(experiment, control, seen)
    if ours is None or theirs is None or noise is None:
        return [f"The control `{control}` is not complete."]
    gain, by_seed = ours.server - theirs.server, _by_seed(experiment, won, control, seen)
    if gain > 2 * noise.server:
        words = "more than twice the noise, so the gain is not owed to the size of the weights alone"
    else:
        words = "not more than twice the noise, so the gain is owed to the size of the weights"
    return [f"Its server score minus that of the control `{control}`: {gain:+.2f} ({by_seed} by seed), {words}."]


def _how(choice: Choice, name: str, seen: Mapping[str, Validation]) -> str:
    """Returns a remark for a run that won because no candidate qualified."""
    return "" if fits(seen[name], seen.get(choice.reference)) else " (stayed)"
