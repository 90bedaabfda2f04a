"""`python -m experiments ...`: parse, call, print. Each experiment has its own command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from perada.cli.console import AsJson, out, print_json, say, show, tell
from perada.cli.tables import house_table
from perada.cli.watch import watched
from perada.errors import InputError
from perada.runs.files import write_output
from perada.runs.names import not_empty
from perada.runs.run import load

from .document import over_seeds, variants_of, write_document
from .drift import document, protocol, read
from .drift_constants import constants
from .overview import corrections, overview, words
from .plans import experiments
from .results import METRICS, Result, value
from .running import Clock, Place, State, lay_over, run_experiment, state_of
from .study import settled, validation_of
from .trials import NAMES, REPORTED, TITLES

app = typer.Typer(no_args_is_help=True, help="The paper's experiments, run by run; `list` shows what is left.")

Data = Annotated[
    str | None, typer.Option("--data", metavar="FOLDER", help="folder of the data sets; default: the preset's")
]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="the pretrained backbone")]
Statistics = Annotated[
    Path | None, typer.Option(metavar="FILE", help="running statistics to lay over the weights (other image sizes)")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="run folders")]
Results = Annotated[Path, typer.Option("--results", metavar="DIR", help="one small JSON file per run")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda; default auto")]
Minutes = Annotated[float | None, typer.Option(metavar="N", help="save and stop before this many minutes are over")]
Together = Annotated[int, typer.Option(min=0, help="runs at once; 0: the device decides")]
Only = Annotated[str | None, typer.Option(metavar="A,B", help="only these runs, or groups of runs; default all")]
RUNS, RESULTS = Path("runs/run_experiment"), Path("results")


def _command(name: str) -> Callable[..., None]:
    """Returns the command of one experiment."""

    def command(
        data: Data = None,
        weights: Weights = None,
        statistics: Statistics = None,
        out_dir: Out = RUNS,
        results: Results = RESULTS,
        device: Device = None,
        minutes: Minutes = None,
        together: Together = 0,
        only: Only = None,
        as_json: AsJson = False,
    ) -> None:
        if minutes is not None and not minutes > 0:
            raise InputError(f"--minutes must be above 0, not {minutes:g}")
        not_empty("--data", data)
        not_empty("--only", only if only is None else only.replace(",", ""))
        clock = Clock(minutes)
        if statistics is not None:
            if weights is None:
                raise InputError("--statistics changes the file of --weights: give both")
            weights = lay_over(weights, statistics, out_dir)
        some = [n.strip() for n in (only or "").split(",") if n.strip()]
        place = Place(out_dir, results, data, None if weights is None else str(weights), device)
        with watched() as watch:
            state = run_experiment(experiments()[name], place, clock, together, some, watch.run, watch.round, say)
        if name == "drift" and not clock.stopped:
            _measured([out_dir / name / run for run in state.found], results, data, device)
        stands = overview(experiments()[name], results, out_dir, corrections(results))
        chosen = _settled(name, results)
        if as_json:
            found = {"runs_done": list(state.found), "runs_left": state.left, "stopped": clock.stopped}
            print_json({**stands, **found, "settled": chosen, "scores": _numbers(state)})
            return
        if state.found:
            table, about = _scores(state)
            out.print(table)
            where = "" if results == RESULTS else f" --results {shlex.quote(str(results))}"
            more = f"\nwith the paper's numbers and figures: python -m experiments document{where}"
            tell(about + (more if name in REPORTED else ""))
        tell(words(stands))
        if chosen:
            tell(f"chosen on validation data: {chosen}")

    command.__doc__ = f"{TITLES[name]}."
    return command


SHOWN = {"Local": "Local", "Global": "Global", "corruptions": "shifted", "global model": "server"}  # in 80 columns


def _lines(state: State) -> dict[str, list[Result]]:
    """Returns what was tested: one line per method where there are several seeds, else one per run."""
    tested = [t.name for t in state.experiment.trials if t.tested and t.name in state.found]
    several = len({state.found[name]["seed"] for name in tested}) > 1
    return variants_of(state) if several else {name: [state.found[name]] for name in tested}


def _numbers(state: State) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Returns the scores for a program: line -> metric -> mean, half of its interval, seeds."""
    held = {name: {m: over_seeds(several, m) for m in METRICS} for name, several in _lines(state).items()}
    return {
        name: {m: {"mean": v.mean, "half": v.half, "seeds": v.seeds} for m, v in found.items() if v is not None}
        for name, found in held.items()
    }


def _scores(state: State) -> tuple[Table, str]:
    """Returns a table of scores and its caption; validation data where no run is tested. The document has more."""
    lines = _lines(state)
    if not lines:
        table = house_table(None, "run", "Local", "server")
        for trial in (t.name for t in state.experiment.trials if t.name in state.found):
            seen = validation_of(state.found[trial])
            table.add_row(trial, *("" if v is None else f"{v:.2f}" for v in (seen.local, seen.server)))
        return table, "validation data in %, personal models: the clients' own, and images that the server holds back"
    metrics = [m for m in SHOWN if any(value(r, m) is not None for several in lines.values() for r in several)]
    table, wide = house_table(None, "run", "seeds", *(SHOWN[m] for m in metrics)), out.width >= 80
    for name, several in lines.items():
        found = [over_seeds(several, m) for m in metrics]
        shown = ["" if v is None else v.text() if wide else f"{v.mean:.2f}" for v in found]
        table.add_row(name, str(len(several)), *shown)
    half = " ± half of the 95% interval" if wide else ""
    return table, f"%, mean over clients, then seeds{half}; server: the global model"


def _settled(name: str, results: Path) -> dict[str, Any] | None:
    """Returns the distillation that a study settled; None for other experiments."""
    experiment = experiments()[name]
    if not any(c.rule in ("study", "settle") for c in experiment.choices):
        return None
    return settled(experiment, {n: validation_of(r) for n, r in state_of(experiment, results).found.items()})


for _name in NAMES:
    app.command(_name)(_command(_name))


def _measured(folders: Sequence[Path], results: Path, data: str | None, device: str | None) -> None:
    """Measures by the protocol of drift the run folders that are there and were not measured since they changed."""
    known = {(one["run"], one["checkpoint"]) for one in read(results)}
    for folder in folders:
        if not (folder / "summary.json").is_file():
            say(f"{folder} is not here: it is not measured")
            continue
        run = load(folder, device=device or "auto", data=data, say=say)
        if (folder.name, run.folder.checkpoint_digest(run.experiment.now.round)) not in known:
            say(f"{folder.name}: measuring")
            protocol(run, results)


@app.command("drift-protocol")
def drift_protocol_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="finished run folders")],
    data: Data = None,
    results: Results = RESULTS,
    device: Device = None,
) -> None:
    """Measure predictions that notice drift, and their rivals, on finished run folders."""
    _measured(folders, results, data, device)
    tell("\n".join(document(read(results))))


@app.command("drift-table")
def drift_table_command(results: Results = RESULTS, as_json: AsJson = False) -> None:
    """Show what the protocol of drift has measured, as Markdown."""
    several = read(results)
    if not several:
        raise InputError(f"{results} has no measurements: run drift-protocol first")
    show(as_json, several, "\n".join(document(several)))


@app.command("drift-constants")
def drift_constants_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="finished run folders: seeds of one run")],
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="all candidates")] = None,
    device: Device = None,
) -> None:
    """Choose the constants of [drift] on validation data alone, by the rule in docs/drift.md."""
    found = constants([load(folder, device=device or "auto", say=say) for folder in folders])
    if out_file is not None:
        write_output(out_file, (json.dumps(found, indent=1) + "\n").encode())
    show(False, found, *(f"drift.{key} = {value:g}" for key, value in found["chosen"].items()))


@app.command("list")
def list_command(results: Results = RESULTS, out_dir: Out = RUNS, as_json: AsJson = False) -> None:
    """Show the experiments: runs done and left, and their minutes."""
    if results.exists() and not results.is_dir():
        raise InputError(f"{results} is not a folder: --results names the one that `python -m experiments NAME` writes")
    known = corrections(results)
    found = [overview(e, results, out_dir, known) for e in experiments().values()]
    show(as_json, found, _table(found))


def _table(found: list[dict[str, Any]]) -> Table:
    table = house_table(None, "experiment", "runs", "done", "begun", "min done", "min left", "what")
    table.columns[-1].justify = "left"
    table.caption = "minutes left: from measured runs of the same method (=), or estimated (~)"
    for one in found:
        mark = "" if not one["minutes_left"] else "=" if one["measured"] else "~"
        table.add_row(
            one["experiment"],
            str(one["runs"]),
            str(one["done"]),
            str(len(one["begun"])),
            f"{'≤' if one['at_most'] else ''}{one['minutes_done']:.1f}",
            f"{mark}{one['minutes_left']:.0f}",
            one["title"].partition(":")[0],
        )
    return table


@app.command("document")
def document_command(
    results: Results = RESULTS,
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.md")] = Path("docs/results.md"),
) -> None:
    """Write docs/results.md and its figures from the results alone."""
    if not results.is_dir():
        raise InputError(
            f"no such folder: {results}: `python -m experiments NAME` writes results, --results says where"
        )
    files = write_document(results, out_file)
    tell(f"wrote {out_file} and {len(files) - 1} figures")
