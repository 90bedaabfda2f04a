"""docs/results.md, from the files in `results/` alone: the same files make the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from perada.errors import InputError
from perada.runs.folder import write_atomic
from perada.sweep.standings import pipes as table

from . import drawings, paper
from .overview import overview
from .plans import REPORTED, Choice, Experiment, experiments
from .results import METRICS, Interval, Result, interval, later, paired, value
from .running import State, state_of
from .study import (
    TOLERANCE,
    Scores,
    Validation,
    counts,
    fits,
    noise_of,
    scores_of,
    settled,
    validation_of,
    winner,
)

COMMAND = "python -m experiments {name} --data FOLDER --weights FILE"
MISSING = "–"
Rows = list[list[str]]


def document(root: Path, folder: str = "results") -> dict[str, str]:
    """`""` -> the text, and file name -> figure; `folder` is where the text finds those."""
    states = {name: state_of(experiments()[name], root) for name in REPORTED}
    figures: dict[str, str] = {}
    parts = [_head(), *(_section(state, figures) for state in states.values()), _missing(list(states.values()), root)]
    reading = root / "reading.md"
    if reading.is_file():
        try:
            parts.append("## Reading\n\n" + reading.read_text("utf8").strip() + "\n")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {reading}: it has to be text in UTF-8") from error
    return {"": "\n".join(parts).replace("](results/", f"]({quote(folder)}/"), **figures}


def _head() -> str:
    """What is said before any number."""
    return Path(__file__).with_name("head.md").read_text("utf8")


def write_document(root: Path, out: Path) -> list[Path]:
    """The text at `out` and its figures in a folder beside it, of the same name; figures of before are taken away."""
    if out.suffix != ".md" or out.is_dir():
        raise InputError(f"--out {out}: give a file whose name ends in .md; its figures go into a folder beside it")
    folder = out.with_suffix("")
    made = document(root, folder.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in (p for name in REPORTED for p in folder.glob(f"{name}-*.svg")):  # of ours, not of anybody's
            if old.name not in made:
                old.unlink()
        files = {out if not name else folder / name: content for name, content in made.items()}
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content.encode())
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    return list(files)


def _section(state: State, figures: dict[str, str]) -> str:
    experiment = state.experiment
    lines = [f"## {experiment.name}", "", f"{experiment.title}.", "", f"`{_command(experiment)}`", ""]
    if not state.found:
        return "\n".join([*lines, "Nothing was run yet.", ""])
    lines += [_where(state), ""]
    bodies: dict[str, Callable[[State, dict[str, str]], list[str]]] = {
        "distill-study": _study,
        "settle": _settle,
        "others": _others,
        "ablations": _ablations,
    }
    return "\n".join([*lines, *bodies.get(experiment.name, _main)(state, figures)])


def _command(experiment: Experiment) -> str:
    """At 64 pixels the backbone has other running statistics."""
    return COMMAND.format(name=experiment.name) + (" --statistics FILE" if experiment.file else "")


def _where(state: State) -> str:
    """Hardware, dates, minutes."""
    found = list(state.found.values())
    devices, dates = sorted({r["device"] for r in found}), sorted({r["date"] for r in found})
    torches = sorted({r["versions"]["torch"] for r in found})
    minutes = sum(r["seconds"] / r["together"] for r in found) / 60
    beside = sum(bool(r.get("shared_gpu")) for r in found)
    most, words = ("at most ", f" ({beside} of the runs had others beside them on the GPU)") if beside else ("", "")
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    tiny = any("tinyimagenet" in (r.get("weights") or {}).get("file", "") for r in found)
    return (
        f"{len(found)} of {len(state.experiment.trials)} runs, {most}{minutes:.1f} minutes in all{words}, {days}, "
        f"{' and '.join(devices)}, torch {' and '.join(torches)}{', Tiny-ImageNet-pretrained' if tiny else ''}."
    )


def pipes(head: Sequence[str], rows: Rows) -> list[str]:
    """A table, and the empty line after it."""
    return [*table(head, rows), ""]


def _number(found: float | None) -> str:
    return MISSING if found is None else f"{found:.2f}"


def accepted(several: Sequence[Result]) -> str:
    """How often the guard kept what was distilled, over all rounds of the runs."""
    distilled = sum(r["guard"]["distilled"] for r in several)
    if not distilled:
        return MISSING
    if any(r["guard"]["accepted"] is None for r in several):
        return "no guard"
    kept = sum(r["guard"]["accepted"] for r in several)
    return f"{kept} of {distilled} ({kept / distilled:.0%})"


# the main tables


def variants_of(state: State) -> dict[str, list[Result]]:
    """`perada-guard-none-2` is the run of variant `perada-guard-none` with seed 2."""
    out: dict[str, list[Result]] = {}
    for trial in state.experiment.trials:
        if trial.name in state.found:
            out.setdefault(trial.name.rpartition("-")[0], []).append(state.found[trial.name])
    return out


Value = Callable[[Result, str], float | None]


def by_seed(several: Sequence[Result], metric: str, of: Value = value) -> dict[int, float | None]:
    return {r["seed"]: of(r, metric) for r in several}


def half(result: Result, metric: str) -> float | None:
    """One of METRICS over the second half of the rounds; corruptions are tested at the end alone."""
    section, key = METRICS[metric]
    return later(result, section, key) if key != "shifted" else None


def over_seeds(several: Sequence[Result], metric: str) -> Interval | None:
    """None where one of the runs has no such number: a mean of fewer would not compare."""
    values = [value(r, metric) for r in several]
    known = [v for v in values if v is not None]
    return interval(known) if len(known) == len(values) else None


def _measured(several: Mapping[str, Sequence[Result]]) -> list[str]:
    return [m for m in METRICS if any(value(r, m) is not None for runs in several.values() for r in runs)]


def _main(state: State, figures: dict[str, str]) -> list[str]:
    name, runs = state.experiment.name, variants_of(state)
    metrics = _measured(runs)
    unit = "AUC" if any(r["last"].get("metric") == "auc" for several in runs.values() for r in several) else "Accuracy"
    lines = [f"{unit} in %, personal models: mean over clients, then over seeds ± half of the 95% interval.", ""]
    head = ["method", "seeds"]
    for metric in metrics:
        head += [metric, "paper"]
    rows = []
    for variant, several in runs.items():
        row = [variant, str(len(several))]
        for metric in metrics:
            found = over_seeds(several, metric)
            row += [MISSING if found is None else found.text(), _number(paper.of(name, metric, variant))]
        rows.append([*row, accepted(several)])
    lines += pipes([*head, "guard accepted"], rows)
    lines += [*_differences(name, runs, metrics), *_against(name, runs, metrics), *_orders(name, runs, metrics)]
    return [*lines, *_over_rounds(name, runs, figures), ""]


def _over_rounds(name: str, runs: Mapping[str, Sequence[Result]], figures: dict[str, str]) -> list[str]:
    """Convergence, personal models and global ones."""
    last = [variant for variant, several in runs.items() if any(map(drawings.late, several))]
    words = "Personal models only after a last stage, so a dot and no line:"
    lines = [f"{words} {', '.join(last)}.", ""] if last else []
    for metric in ("Global", "Local", "global model"):
        section, key = METRICS[metric]
        held = {v: several for v, several in runs.items() if any(value(r, metric) is not None for r in several)}
        if held:
            file, title = f"{name}-{section}.svg", f"{name}: {metric}"
            figures[file] = drawings.convergence(held, title, section, key)
            lines += [f"![{metric} over rounds](results/{file})"]
    return lines


def _orders(name: str, runs: Mapping[str, Sequence[Result]], metrics: Sequence[str]) -> list[str]:
    """Whether the methods come in the paper's order, best first."""
    few = {v: len(several) for v, several in runs.items() if len(several) < max(map(len, runs.values()))}
    fewer = "".join(f"; {v}: {n} seed{'s'[: n > 1]}" for v, n in few.items())
    alone = f"The order of methods by their means alone, also where intervals overlap{fewer}."
    lines = [alone, "Best first, ours and the paper's:", ""]
    for metric in metrics:
        means = {variant: over_seeds(several, metric) for variant, several in runs.items()}
        both = {v: (m.mean, p) for v, m in means.items() if m and (p := paper.of(name, metric, v)) is not None}
        if len(both) < 3:  # of two, one pair would agree or not
            continue
        ours, theirs = (sorted(both, key=lambda v, i=i: -both[v][i]) for i in (0, 1))  # type: ignore[misc]
        pairs = list(itertools.combinations(theirs, 2))
        same = sum(ours.index(a) < ours.index(b) for a, b in pairs)
        shown = " > ".join(ours), " > ".join(theirs)
        lines.append(f"- {metric}: {shown[0]}; the paper: {shown[1]}. {same} of {len(pairs)} pairs agree.")
    return [*lines, ""] if len(lines) > 3 else []


def _differences(name: str, runs: Mapping[str, Sequence[Result]], metrics: Sequence[str]) -> list[str]:
    """PerAda, guarded and not, against PerAda w/o KD, seed by seed, and against its target."""
    base = runs.get("perada-no-kd")
    others = [v for v in ("perada", "perada-guard-none") if v in runs]
    if base is None or not others:
        return []

    def over(variant: str, metric: str, of: Value = value) -> Interval | None:
        return paired(by_seed(runs[variant], metric, of), by_seed(base, metric, of))

    rows = []
    for words, of in (("", value), (", second half", half)):
        for variant in others:
            shown = [_signed(over(variant, metric, of)) for metric in metrics]
            rows.append([f"{variant} − perada-no-kd{words}", *shown])
    rows.append(["the paper's", *_papers(name, metrics, "perada", "perada-no-kd")])
    lines = ["What distillation gives, in points, with its 95% interval: after the last round, and, as one evaluation"]
    lines += ["is noisy, as the mean over those from the middle round on (*second half*).", ""]
    lines += pipes(["difference", *metrics], rows)
    if name != "main" or "perada" not in runs:
        return lines
    return [*lines, *_target(over("perada", "Global"), over("perada", "Local"))]


def _signed(found: Interval | None) -> str:
    return MISSING if found is None else found.text(sign=True)


def _papers(name: str, metrics: Sequence[str], one: str, other: str) -> list[str]:
    both = [(paper.of(name, m, one), paper.of(name, m, other)) for m in metrics]
    return [MISSING if a is None or b is None else f"{a - b:+.2f}" for a, b in both]


def _against(name: str, runs: Mapping[str, Sequence[Result]], metrics: Sequence[str]) -> list[str]:
    """PerAda against the methods that are not it, seed by seed."""
    ours, rows = runs.get("perada", []), []
    for other, theirs in runs.items():
        if ours and not other.startswith("perada"):
            found = [_signed(paired(by_seed(ours, m), by_seed(theirs, m))) for m in metrics]
            rows += [[f"perada − {other}", *found], ["the paper's", *_papers(name, metrics, "perada", other)]]
    words = "PerAda beside the other methods after the last round, in points; 95% intervals where there are seeds."
    return [words, "", *pipes(["difference", *metrics], rows)] if rows else []


def _target(on_global: Interval | None, on_local: Interval | None) -> list[str]:
    if on_global is None or on_local is None or on_global.low is None:
        wanted = f"Global above zero with its whole interval, Local not below −{TOLERANCE}"
        return [f"The target ({wanted}) needs more seeds.", ""]
    words = [
        f"Global above zero with its whole interval: **{'yes' if on_global.low > 0 else 'no'}**",
        f"Local not below −{TOLERANCE}: **{'yes' if on_local.mean >= -TOLERANCE else 'no'}**",
    ]
    return [f"The target over {on_global.seeds} seeds, after the last round: {'; '.join(words)}.", ""]


# the study


def _study(state: State, figures: dict[str, str]) -> list[str]:
    experiment, found = state.experiment, state.found
    seen = {n: validation_of(r) for n, r in found.items()}
    won = {c.name: winner(experiment, c.name, seen) for c in experiment.choices}
    rows = []
    for trial in experiment.trials:
        if trial.name in found:
            result, v = found[trial.name], seen[trial.name]
            stages = [c.name + _how(c, trial.name, seen) for c in experiment.choices if won[c.name] == trial.name]
            changed = _changed(experiment, result)
            late = [_number(later(result, split)) for split in ("local_val", "server_val")]
            rows.append([trial.name, trial.group, changed, _number(v.local), _number(v.server), *late])
            rows[-1] += [accepted([result]), ", ".join(stages)]
    lines = [
        "Validation data only: *Local* at the clients, *server* on labelled images the server holds back, both means",
        "over the personal models: after the last round, by which the rule chose, and over the evaluations from the",
        "middle round on (*2nd half*), by which nothing was chosen. Settings are beside those the study begins with; a",
        "winner stands for its stage; where nobody qualified, the one before *stayed*.",
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
    return [*lines, f"Settled, and what the preset `{experiment.preset}` has: {words}.", ""]


def _settle(state: State, figures: dict[str, str]) -> list[str]:
    """The study by the rule "settle": the noise of equal runs, then each choice with its candidates."""
    experiment = state.experiment
    seen = {name: validation_of(result) for name, result in state.found.items()}
    noise = noise_of(experiment, seen)
    lines = [
        "Validation data only, personal models, means over rounds 26 to 50 and then over the seeds. *Local*: the",
        "clients' own validation data. *server*: labelled images that the server holds back. A candidate counts if its",
        "server score exceeds the reference's by more than twice the noise and its Local falls by at most",
        f"{TOLERANCE} points.",
        "",
    ]
    if noise is None:
        lines += ["Noise: not measured yet, because no two equal runs are done.", ""]
    else:
        lines += [
            f"Noise, the standard deviation between equal runs: server {noise.server:.2f}, Local {noise.local:.2f}."
        ]
        lines += [f"So a gain counts above {2 * noise.server:.2f} points of server.", ""]
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


def _contest(state: State, choice: Choice, seen: Mapping[str, Validation], noise: Scores | None) -> list[str]:
    """Returns one choice's table and its outcome."""
    experiment, rows = state.experiment, Rows()
    reference, won = scores_of(experiment, choice.reference, seen), winner(experiment, choice.name, seen)
    for variant in (choice.reference, *choice.among, *choice.shown):
        several = _runs_of(state, variant)
        if not several:
            continue
        own = scores_of(experiment, variant, seen)
        row = [variant, _changed(experiment, several[0]), str(len(several))]
        row += [MISSING, MISSING] if own is None else [_number(own.local), _number(own.server)]
        gain, verdict = MISSING, MISSING
        if own and reference and variant != choice.reference:
            gain = f"{own.server - reference.server:+.2f}"
            if noise and variant not in choice.shown:
                verdict = "yes" if counts(own, reference, noise) else "no"
        row.append(gain)
        rows.append([*row, verdict + (" (won)" if variant == won else ""), accepted(several)])
    head = ["variant", "settings", "runs", "Local", "server", "server − reference", "counts", "guard accepted"]
    if not rows:
        return ["Nothing was run yet.", ""]
    if won is None:
        outcome = "Not settled yet: some of its runs are missing."
    elif won == choice.reference:
        outcome = f"No candidate counts: `{won}` stays."
    else:
        outcome = f"Chosen: `{won}`."
    return [*pipes(head, rows), outcome, ""]


def _how(choice: Choice, name: str, seen: Mapping[str, Validation]) -> str:
    """A run can win though it does not qualify, where nobody does."""
    return "" if fits(seen[name], seen.get(choice.reference)) else " (stayed)"


def _changed(experiment: Experiment, result: Result) -> str:
    hidden = {"method.name", "run.seed", "run.checkpoint_every", "train.rounds"}
    kept = {k: v for k, v in result["settings"].items() if k not in hidden and experiment.settings.get(k, MISSING) != v}
    shown = ", ".join(f"{k.partition('.')[2]} {v}" for k, v in kept.items())
    return shown or ("no distillation" if result["method"] == "perada-no-kd" else "as it begins")


# the other methods, the ablations


def _others(state: State, figures: dict[str, str]) -> list[str]:
    tested = {t.name: [state.found[t.name]] for t in state.experiment.trials if t.tested and t.name in state.found}
    if not tested:
        return ["Only points of the searches are done.", ""]
    metrics, rows = _measured(tested), []
    for name, (result,) in tested.items():
        row = [name, _changed(state.experiment, result).replace("as it begins", "the preset's")]
        for metric in metrics:
            row += [_number(value(result, metric)), _number(paper.of("others", metric, name))]
        rows.append(row)
    head = ["method", "tuned", *(word for metric in metrics for word in (metric, "paper"))]
    lines = ["One seed: differences of a point mean little. The paper has 200 rounds. FedDF distils with the preset's"]
    lines += ["settings, which were settled for PerAda, but for its rate.", "", *pipes(head, rows)]
    return [*lines, *_orders("others", tested, metrics)]


ABLATIONS = {
    "text": "The paper's text, read literally",
    "statistics": "Only the public images' running statistics: no guard, and a rate of 1e-12, at which no weight moves",
    "steps": "Distillation steps a round (the recipe's own: perada)",
    "images": "Public images of CIFAR-100 (all 50,000 are perada)",
    "sets": "Other public images: CIFAR-10's own validation data, PACS, X-rays",
    "lam": "λ (1 is perada)",
    "start": "Initialisation (Tiny-ImageNet-pretrained is perada)",
}


def _ablations(state: State, figures: dict[str, str]) -> list[str]:
    found, lines = state.found, ["Convergence over rounds is drawn with the main table.", ""]
    names = [t for t in state.experiment.trials if t.name in found]
    for group, title in ABLATIONS.items():
        beside = ("base", "images") if group == "sets" else ("base",)
        if not any(t.group == group for t in names):
            continue
        held = {t.name: found[t.name] for t in names if t.group in (*beside, group)}
        metrics = [
            m for m in ("Local", "Global", "global model") if any(value(r, m) is not None for r in held.values())
        ]
        rows = [[n, *(_number(value(r, m)) for m in metrics), accepted([r])] for n, r in held.items()]
        file = f"ablations-{group}.svg"
        figures[file] = drawings.variants(held, metrics, title)
        lines += [f"### {title}", "", *pipes(["run", *metrics, "guard accepted"], rows)]
        lines += [f"![{title}](results/{file})", ""]
    return lines


def _missing(states: Sequence[State], root: Path) -> str:
    """What was planned and is not there; silence would be a claim."""
    lines = ["## What is missing", ""]
    for state in states:
        name, trials = state.experiment.name, [t for t in state.experiment.trials if t.name not in state.found]
        if not trials:
            continue
        tested = [t.name for t in trials if t.tested and t.name not in state.stale]
        points = [t.name for t in trials if not t.tested and t.name not in state.stale]
        names = tested + ([f"{len(points)} points of searches"] if tested and points else points)
        old = [f"made with other settings than planned now: {', '.join(state.stale)}"] if state.stale else []
        minutes = overview(state.experiment, root, None, {})["minutes_left"]
        many = f"{len(trials)} of {len(state.experiment.trials)} runs, about {minutes:.0f} minutes of an H200"
        lines.append(f"- **{name}**, {many}: {'; '.join([*([', '.join(names)] if names else []), *old])}.")
    lines += ["- Not to be had here: STL-10 (as public images), CIFAR-10.1."]
    return "\n".join([*lines, ""])
