"""Writes docs/results.md from the files in `results/` alone: the same files make the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from perada.errors import InputError
from perada.runs.files import write_atomic

from . import drawings, paper
from .cells import MISSING, accepted, changed, number, pipes
from .document_private import private_section
from .document_studies import settle_section, study_section
from .overview import overview
from .plans import experiments
from .results import METRICS, Interval, Result, interval, later, paired, value
from .running import State, state_of
from .study import TOLERANCE
from .trials import REPORTED, Experiment

COMMAND = "python -m experiments {name} --data FOLDER{weights}"


def document(root: Path, folder: str = "results") -> dict[str, str]:
    """Returns `""` -> the text and file name -> figure. The text links to figures in `folder`."""
    states = {name: state_of(experiments()[name], root) for name in REPORTED}
    figures: dict[str, str] = {}
    parts = [
        _head(states["main"]),
        *(_section(state, figures) for state in states.values()),
        _missing(list(states.values()), root),
    ]
    reading = root / "reading.md"
    if reading.is_file():
        try:
            parts.append("## Reading\n\n" + reading.read_text("utf8").strip() + "\n")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {reading}: it has to be text in UTF-8") from error
    return {"": "\n".join(parts).replace("](results/", f"]({quote(folder)}/"), **figures}


def _head(main: State) -> str:
    """Returns the introduction, with the main table's answer first."""
    title, _, rest = Path(__file__).with_name("head.md").read_text("utf8").partition("\n\n")
    return "\n".join([title, "", *answer(main), rest])


ANSWERED = ("Local", "Global", "corruptions")  # the metrics of personal models


def answer(main: State) -> list[str]:
    """Returns whether PerAda beats the other methods, and by how much."""
    runs = variants_of(main)
    ours, metrics = runs.get("perada", []), [m for m in _measured(runs) if m in ANSWERED]
    rows, behind = [], dict[str, list[str]]()
    for other, theirs in runs.items():
        if (other.startswith("perada") and not other.startswith("perada-no-kd")) or not ours:
            continue
        row = [other]
        for metric, papers in zip(metrics, _papers("main", metrics, "perada", other), strict=True):
            found = paired(by_seed(ours, metric), by_seed(theirs, metric))
            row += [_signed(found) + _verdict(found), papers]
            if _verdict(found) == " behind":
                behind.setdefault(other, []).append(metric)
        rows.append(row)
    if not rows:
        return ["Whether PerAda beats the other methods is open: the main table was not run yet.", ""]
    rounds, seeds = max(r["rounds"] for r in ours), len({r["seed"] for r in ours})
    lines = [
        "**Does PerAda beat Ditto, FedAvg+FT, Standalone and PerAda without distillation, and by how much?** Here is",
        f"PerAda's accuracy minus theirs, in points: test data of CIFAR-10, {rounds} rounds, {seeds} seeds, personal",
        "models, with its 95% interval, beside the paper's difference. *Ahead* or *behind* means that the whole",
        "interval is. *Local*: a client's own mix of classes; *Global*: all classes alike.",
        "",
    ]
    lines += pipes(["PerAda minus", *(word for metric in metrics for word in (metric, "paper"))], rows)
    words = "; ".join(f"{other} on {' and '.join(held)}" for other, held in behind.items())
    return [*lines, f"PerAda is behind {words or 'none of them'}.", ""]


def _verdict(found: Interval | None) -> str:
    if found is None or found.half is None:
        return ""
    return " ahead" if found.mean > found.half else " behind" if found.mean < -found.half else ""


def write_document(root: Path, out: Path) -> list[Path]:
    """Writes the text to `out` and the figures to a folder of the same name beside it; removes its old figures."""
    if out.suffix != ".md" or out.is_dir():
        raise InputError(f"--out {out}: give a file whose name ends in .md; its figures go into a folder beside it")
    folder = out.with_suffix("")
    made = document(root, folder.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in (p for name in REPORTED for p in folder.glob(f"{name}-*.svg")):  # never a file of another name
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
        "distill-study": study_section,
        "settle": settle_section,
        "others": _others,
        "ablations": _ablations,
        "dp-lite0": private_section,
        "dp-vit": private_section,
    }
    return "\n".join([*lines, *bodies.get(experiment.name, _main)(state, figures)])


def _command(experiment: Experiment) -> str:
    """Returns an experiment's command; at 64 pixels the backbone has other running statistics."""
    weights = " --weights FILE" if experiment.needs_weights else ""
    return COMMAND.format(name=experiment.name, weights=weights) + (" --statistics FILE" if experiment.file else "")


def _where(state: State) -> str:
    """Returns hardware, dates and minutes of an experiment's runs."""
    found = list(state.found.values())
    devices, dates = sorted({r["device"] for r in found}), sorted({r["date"] for r in found})
    torches = sorted({r["versions"]["torch"] for r in found})
    minutes = sum(r["seconds"] / r["together"] for r in found) / 60
    beside = sum(bool(r.get("shared_gpu")) for r in found)
    most, words = ("at most ", f" ({beside} of the runs shared the GPU with other processes)") if beside else ("", "")
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    tiny = any("tinyimagenet" in (r.get("weights") or {}).get("file", "") for r in found)
    return (
        f"{len(found)} of {len(state.experiment.trials)} runs, {most}{minutes:.1f} minutes in all{words}, {days}, "
        f"{' and '.join(devices)}, torch {' and '.join(torches)}{', Tiny-ImageNet-pretrained' if tiny else ''}."
    )


# the main tables


def variants_of(state: State) -> dict[str, list[Result]]:
    """Returns variant -> runs: `perada-unguarded-2` is the variant `perada-unguarded` with seed 2."""
    out: dict[str, list[Result]] = {}
    for trial in state.experiment.trials:
        if trial.name in state.found:
            out.setdefault(trial.name.rpartition("-")[0], []).append(state.found[trial.name])
    return out


Value = Callable[[Result, str], float | None]


def by_seed(several: Sequence[Result], metric: str, of: Value = value) -> dict[int, float | None]:
    return {r["seed"]: of(r, metric) for r in several}


def half(result: Result, metric: str) -> float | None:
    """Returns one of METRICS over the second half of the rounds; corruptions are tested at the end only."""
    section, key = METRICS[metric]
    return later(result, section, key) if key != "shifted" else None


def over_seeds(several: Sequence[Result], metric: str) -> Interval | None:
    """Returns a metric over seeds; None where a run lacks it, because a mean over fewer does not compare."""
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
            row += [MISSING if found is None else found.text(), number(paper.of(name, metric, variant))]
        rows.append([*row, accepted(several)])
    lines += pipes([*head, "guard accepted"], rows)
    lines += [*_differences(name, runs, metrics), *_against(name, runs, metrics), *_orders(name, runs, metrics)]
    return [*lines, *_over_rounds(name, runs, figures), ""]


def _over_rounds(name: str, runs: Mapping[str, Sequence[Result]], figures: dict[str, str]) -> list[str]:
    """Returns the figures over rounds, of personal and global models."""
    last = [variant for variant, several in runs.items() if any(map(drawings.late, several))]
    words = "These have personal models only after their last stage, so they are dots:"
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
    """Returns whether the methods come in the paper's order, best first."""
    few = {v: len(several) for v, several in runs.items() if len(several) < max(map(len, runs.values()))}
    fewer = "".join(f"; {v}: {n} seed{'s'[: n > 1]}" for v, n in few.items())
    alone = f"The order of methods by means alone, also where intervals overlap{fewer}."
    lines = [alone, "Best first, ours and the paper's:", ""]
    for metric in metrics:
        means = {variant: over_seeds(several, metric) for variant, several in runs.items()}
        both = {v: (m.mean, p) for v, m in means.items() if m and (p := paper.of(name, metric, v)) is not None}
        if len(both) < 3:  # one pair says too little
            continue
        ours, theirs = (sorted(both, key=lambda v, i=i: -both[v][i]) for i in (0, 1))  # type: ignore[misc]
        pairs = list(itertools.combinations(theirs, 2))
        same = sum(ours.index(a) < ours.index(b) for a, b in pairs)
        shown = " > ".join(ours), " > ".join(theirs)
        lines.append(f"- {metric}: {shown[0]}; the paper: {shown[1]}. {same} of {len(pairs)} pairs agree.")
    return [*lines, ""] if len(lines) > 3 else []


def _differences(name: str, runs: Mapping[str, Sequence[Result]], metrics: Sequence[str]) -> list[str]:
    """Returns all variants of PerAda against PerAda w/o KD, paired by seed, and PerAda against the target."""
    base = runs.get("perada-no-kd")
    others = [v for v in runs if v.startswith("perada") and v != "perada-no-kd"]
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
    lines = [
        "What distillation gives, in points, with its 95% interval: after the last round, and as the mean over the"
    ]
    lines += ["evaluations from the middle round on (*second half*), because a single evaluation is noisy.", ""]
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
    """Returns PerAda against the other methods, paired by seed."""
    ours, rows = runs.get("perada", []), []
    for other, theirs in runs.items():
        if ours and not other.startswith("perada"):
            found = [_signed(paired(by_seed(ours, m), by_seed(theirs, m))) for m in metrics]
            rows += [[f"perada − {other}", *found], ["the paper's", *_papers(name, metrics, "perada", other)]]
    words = "PerAda minus the other methods after the last round, in points, with 95% intervals over seeds."
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


# the other methods, the ablations


def _others(state: State, figures: dict[str, str]) -> list[str]:
    tested = {t.name: [state.found[t.name]] for t in state.experiment.trials if t.tested and t.name in state.found}
    if not tested:
        return ["Only the searches have results so far.", ""]
    metrics, rows = _measured(tested), []
    for name, (result,) in tested.items():
        row = [name, changed(state.experiment, result).replace("as it begins", "the preset's")]
        for metric in metrics:
            row += [number(value(result, metric)), number(paper.of("others", metric, name))]
        rows.append(row)
    head = ["method", "tuned", *(word for metric in metrics for word in (metric, "paper"))]
    lines = [
        "One seed: differences of a point mean little. The paper has 200 rounds. FedDF uses the preset's distillation"
    ]
    lines += ["settings, which were chosen for PerAda, except for its rate.", "", *pipes(head, rows)]
    return [*lines, *_orders("others", tested, metrics)]


ABLATIONS = {
    "text": "The paper's text, read literally",
    "statistics": "Only the public images' running statistics: no guard, and a rate of 1e-12, which moves no weight",
    "steps": "Distillation steps per round (perada has the preset's)",
    "images": "Public images of CIFAR-100 (all 50,000 are perada)",
    "sets": "Other public images: CIFAR-10's own validation data, PACS, X-rays",
    "lam": "λ (1 is perada)",
    "start": "Initialisation (Tiny-ImageNet-pretrained is perada)",
}


def _ablations(state: State, figures: dict[str, str]) -> list[str]:
    found, lines = state.found, ["The main table has the figures over rounds.", ""]
    names = [t for t in state.experiment.trials if t.name in found]
    for group, title in ABLATIONS.items():
        beside = ("base", "images") if group == "sets" else ("base",)
        if not any(t.group == group for t in names):
            continue
        held = {t.name: found[t.name] for t in names if t.group in (*beside, group)}
        metrics = [
            m for m in ("Local", "Global", "global model") if any(value(r, m) is not None for r in held.values())
        ]
        rows = [[n, *(number(value(r, m)) for m in metrics), accepted([r])] for n, r in held.items()]
        file = f"ablations-{group}.svg"
        figures[file] = drawings.variants(held, metrics, title)
        lines += [f"### {title}", "", *pipes(["run", *metrics, "guard accepted"], rows)]
        lines += [f"![{title}](results/{file})", ""]
    return lines


def _missing(states: Sequence[State], root: Path) -> str:
    """Returns what was planned and is missing."""
    lines = ["## What is missing", ""]
    for state in states:
        name, trials = state.experiment.name, [t for t in state.experiment.trials if t.name not in state.found]
        if not trials:
            continue
        tested = [t.name for t in trials if t.tested and t.name not in state.stale]
        points = [t.name for t in trials if not t.tested and t.name not in state.stale]
        names = tested + ([f"{len(points)} runs of searches"] if tested and points else points)
        old = [f"have other settings than the plan: {', '.join(state.stale)}"] if state.stale else []
        minutes = overview(state.experiment, root, None, {})["minutes_left"]
        many = f"{len(trials)} of {len(state.experiment.trials)} runs, about {minutes:.0f} minutes of an H200"
        lines.append(f"- **{name}**, {many}: {'; '.join([*([', '.join(names)] if names else []), *old])}.")
    lines += ["- Not available: STL-10 (as public images), CIFAR-10.1."]
    return "\n".join([*lines, ""])
