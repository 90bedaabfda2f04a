"""The `perada` command: parse, call, print."""

import io
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from PIL import Image

from .. import __version__
from ..client.cost import round_cost
from ..config import in_keys, parse_grid, parse_setting, presets, resolve
from ..config.objects import about_data
from ..config.settings import given
from ..data import build_federation
from ..errors import InputError, RunError
from ..inputs import printable
from ..lanes.machine import device_of, keep_memory
from ..methods import REGISTRY, make_method, method_sizes
from ..models import count_groups, network_of
from ..report import standings, write_partition
from ..report.facts import worth_of
from ..runs.names import chosen_source
from ..runs.train import train
from ..sweep.compare import compare
from ..sweep.tune import tune
from . import tables
from .console import INTERRUPTED, SAID, AsJson, say, show
from .data import app as data_app
from .options import BACKBONE_HELP, Classes, DataPath, Lanes, Methods, NewDevice, Sets, Source, out_option
from .runs import app as runs_app
from .watch import watched

typer.core.HAS_RICH = False  # the help is plain; typer 0.20, which flwr needs, would write "\[required]" in it
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(runs_app)
app.add_typer(data_app, name="data")
if find_spec("flwr"):
    from .flower import app as flower_app

    app.add_typer(flower_app, name="flower")
else:

    @app.command("flower", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def no_flower() -> None:
        """Real federations over a network; needs pip install 'perada[flower]'."""
        raise InputError("perada flower needs Flower: pip install 'perada[flower]'")


def _overrides(sets: Sequence[str] | None, lanes: str | None = None, data: str | None = None) -> dict[str, Any]:
    if lanes not in (None, "auto") and not (lanes.isdecimal() and int(lanes)):
        raise InputError(f"--lanes {lanes}: auto, or a number from 1")
    most = None if lanes is None else 0 if lanes == "auto" else int(lanes)
    return given(dict(parse_setting(s) for s in sets or []), data=data, lanes=most)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """PerAda: parameter-efficient personalised federated learning."""
    if version:
        print(f"perada {__version__}")
        raise typer.Exit


@app.command("train")
def train_command(
    source: Source = None,
    method: Annotated[str | None, typer.Option(help="see `perada methods`")] = None,
    data: DataPath = None,
    sets: Sets = None,
    seed: Annotated[int | None, typer.Option(help="of the training; data.seed is the split's")] = None,
    out_dir: Annotated[Path | None, out_option("runs/PRESET-METHOD-SEED")] = None,
    device: NewDevice = None,
    lanes: Lanes = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an unfinished run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing run")] = False,
    as_json: AsJson = False,
) -> None:
    """Train one method: a personalised model for every client."""
    if resume and overwrite:
        raise InputError("--resume continues a run and --overwrite replaces it: choose one")
    with watched("train") as watch:
        run = train(
            source,
            method=method,
            data=data,
            set=_overrides(sets, lanes),
            seed=seed,
            device=device,
            out=out_dir,
            resume=resume,
            overwrite=overwrite,
            callbacks=[watch],
            say=say,
        )
    page = run.path / "report.html"
    document = {"run": str(run.path), "report": str(page), **run.summary}
    show(as_json, document, tables.results([run]), f"run      {run.path}\nreport   {page}")


@app.command("compare")
def compare_command(
    source: Source = None,
    methods: Methods = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="trainings of each method, on one split; default 1")] = None,
    data: DataPath = None,
    sets: Sets = None,
    device: NewDevice = None,
    lanes: Lanes = None,
    out_dir: Annotated[Path | None, out_option("runs/compare-PRESET")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue, method by method; adds what is new")] = False,
    baseline: Annotated[bool, typer.Option(help="add standalone: what each client reaches alone")] = True,
    jobs: Annotated[int, typer.Option(min=0, help="runs at once, a thread each; 0: as many as is sensible")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make the paper's table on your data: methods times seeds on one split."""
    with watched("compare") as watch:
        comparison = compare(
            source,
            methods=methods,
            seeds=seeds,
            data=data,
            set=_overrides(sets, lanes),
            device=device,
            out=out_dir,
            resume=resume,
            baseline=baseline,
            jobs=jobs,
            on_run=watch.run,
            callbacks=[watch],
            say=say,
        )
    table, path = comparison.standings(), comparison.path
    files = f"tables   {path}/table.md, .csv, .tex, rounds.csv\n"
    files += f"report   {path / 'report.html'}, with an interval per client"
    files = "\n".join([*worth_of(comparison.runs[0]).lines[:1], files])
    show(as_json, {"path": str(path), **standings.as_json(table)}, *tables.standings(table), files)


@app.command("tune")
def tune_command(
    source: Source = None,
    methods: Methods = None,
    data: DataPath = None,
    sets: Sets = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=A,B,...", help="values to try instead, repeatable")
    ] = None,
    device: NewDevice = None,
    out_dir: Annotated[Path | None, out_option("runs/tune-PRESET")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue, point by point")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose learning rates and the methods' own settings by the clients' validation data, never by test data."""
    with watched("tune") as watch:
        search = tune(
            source,
            methods=methods,
            data=data,
            set=_overrides(sets),
            grid=dict(parse_grid(text) for text in grid or []),
            device=device,
            out=out_dir,
            resume=resume,
            on_run=watch.run,
            callbacks=[watch],
            say=say,
        )
    best, path = search.best(), search.path / "tuned.toml"
    use = f"wrote {path}; use it with: perada compare {path} --methods {','.join(best)}"
    document = {"path": str(path), "chosen": best, "results": search.results()}
    show(as_json, document, tables.search(search.table()), use)


@app.command()
def partition(
    source: Source = None,
    data: DataPath = None,
    sets: Sets = None,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="a picture of it")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which client has which data, and how unlike the clients are."""
    config = resolve(chosen_source(source, data), _overrides(sets, data=data))
    federation = build_federation(config.data, device_of("cpu"))
    for line in about_data(federation):
        say(line)
    if out_file is not None:
        write_partition(federation, out_file)
    wrote = [] if out_file is None else [f"wrote {out_file}"]
    show(as_json, tables.partition_json(federation), tables.partition(federation), *wrote)


@app.command()
def params(
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help=BACKBONE_HELP)],
    classes: Classes = 10,
    as_json: AsJson = False,
) -> None:
    """Count a backbone's parameters, adapters and buffers (running statistics), group by group."""
    groups = count_groups(backbone, classes)
    counts = {name: group["parameters"] for name, group in groups.items()}
    buffers = {name: group["buffers"] for name, group in groups.items()}
    document = {"backbone": backbone, "classes": classes, **counts, "buffers": buffers}
    show(as_json, document, tables.groups(backbone, classes, groups))


@app.command()
def methods(
    backbone: Annotated[str, typer.Option(metavar="BACKBONE", help=BACKBONE_HELP)] = "resnet18",
    classes: Classes = 10,
    adapt_from: Annotated[
        str, typer.Option(metavar="STAGE", help="the first stage that is adapted; '' for all, auto: the backbone's own")
    ] = "auto",
    cost: Annotated[bool, typer.Option("--cost", help="measure what a round costs a client on this machine")] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, with the parameters that a client trains and sends per round."""
    made = network_of(backbone, classes)  # refuses an unknown backbone; a method that does not fit is only left out
    start = made.first_adapted(adapt_from)
    method_sizes("fedavg", backbone, classes, adapt_from=adapt_from)  # refuses an unknown stage
    sizes, costs = {}, {}
    for name in REGISTRY:
        try:
            sizes[name] = method_sizes(name, backbone, classes, adapt_from=adapt_from)
        except InputError as error:
            say(f"{name} cannot train {backbone}: {error}")
            continue
        if cost:
            costs[name] = round_cost(make_method(name, {}), made, classes, adapt_from=start)
    rows = [{"name": n, **size, **({"cost": asdict(costs[n])} if cost else {})} for n, size in sizes.items()]
    title = f"{backbone}{f' from {start} on' if start else ''}"
    show(as_json, rows, tables.methods(sizes, title, classes, costs))


@app.command("presets")
def presets_command(as_json: AsJson = False) -> None:
    """List the settings that come with the package."""
    show(as_json, [{"name": name, "description": text} for name, text in presets().items()], tables.presets(presets()))


# Newer versions of typer have their own copy of click: take the class from what typer exports.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None, app: typer.Typer = app) -> int:
    """Runs one command. Returns 0 if it is done, 1 if it failed, 2 for bad input and 130 if it was interrupted.

    `perada drift` returns 3 if it has found drift.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # ? for ± where a terminal cannot show it
    try:
        code = app(args=words, standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return INTERRUPTED if code == SAID else code if isinstance(code, int) else 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one
            print(error.format_message(), file=sys.stderr)
            return 2
        return _complain(_as_setting(error, words) or _with_one_hint(error.format_message()), 2)
    except (InputError, RunError) as error:
        return _complain(str(error), 2 if isinstance(error, InputError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


_LINE = 4000  # characters of an error, which may have what the user wrote


def _complain(text: str, code: int) -> int:
    line = printable(in_keys(" ".join(text.split())))
    print(f"error: {line if len(line) < _LINE else f'{line[:_LINE]}…'}", file=sys.stderr)
    return code


def _with_one_hint(text: str) -> str:
    """Returns a message without its second `Did you mean`: typer adds one, and so does click."""
    return " ".join(dict.fromkeys(re.split(r"\s+(?=Did you mean)", text)))


def _as_setting(error: Any, words: Sequence[str]) -> str:
    """Returns how to give an unknown option as a setting; empty if no key has its name."""
    if type(error).__name__ != "NoSuchOption" or not any(p.name == "sets" for p in error.ctx.command.params):
        return ""
    option = error.option_name
    keys = [key for key in resolve().flat() if key.partition(".")[2] == option.strip("-").replace("-", "_")]
    value = " ".join(words).partition(option)[2].lstrip(" =").partition(" ")[0] or "VALUE"
    ways = " or ".join(f"--set {key}={value}" for key in keys)
    return f"no option {option}: settings are given by {ways}" if ways else ""


def run() -> int:
    """Runs the command in a process of its own; returns its exit code."""
    keep_memory()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such an image is refused in a line of our own
    return main()
