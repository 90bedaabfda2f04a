"""The `perada` command: parse, call, print."""

import io
import re
import shlex
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
from ..models import BACKBONES, count_groups, network_of
from ..report import standings, write_partition, write_report
from ..report.facts import worth_of
from ..report.tensorboard import write_events
from ..runs.join import join
from ..runs.names import chosen_source
from ..runs.run import load
from ..runs.train import train
from ..sweep.compare import compare
from ..sweep.tune import tune
from ..theory import DELTA, IMAGES, bounds
from . import tables
from . import theory as bounds_tables
from .console import INTERRUPTED, SAID, AsJson, say, show, tell
from .data import app as data_app
from .drift import Aware, DriftSets, predicting, report_drift
from .watch import watched

typer.core.HAS_RICH = False  # the help is plain; typer 0.20, which flwr needs, would write "\[required]" in it
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
if find_spec("flwr"):
    from .flower import app as flower_app

    app.add_typer(flower_app, name="flower")
else:

    @app.command("flower", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def no_flower() -> None:
        """Real federations over a network; needs pip install 'perada[flower]'."""
        raise InputError("perada flower needs Flower: pip install 'perada[flower]'")


def _out(default: str) -> Any:
    return typer.Option("--out", metavar="DIR", help=f"default {default}")


SOURCE_HELP = "a preset's name or a TOML file; default digits, or folder with --data"
BACKBONE_HELP = f"{', '.join(BACKBONES)}, torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable"
DATA_HELP = "your own: site/class/image.png, .npz or .csv"
Source = Annotated[str | None, typer.Argument(metavar="PRESET | FILE.toml", help=SOURCE_HELP)]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]
Classes = Annotated[int, typer.Option(min=1, help="outputs of the head")]
Client = Annotated[str, typer.Option(help="whose personal model")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="section.key=value, repeatable")]
Methods = Annotated[str | None, typer.Option(metavar="A,B,C | all", help="default all")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
NewDevice = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda; default auto")]
Lanes = Annotated[str | None, typer.Option(metavar="auto | N", help="most lanes at once; auto: as many as fit")]
DataPath = Annotated[str | None, typer.Option("--data", metavar="PATH", help=DATA_HELP)]


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
    out_dir: Annotated[Path | None, _out("runs/PRESET-METHOD-SEED")] = None,
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
    out_dir: Annotated[Path | None, _out("runs/compare-PRESET")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue, method by method; adds what is new")] = False,
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
            jobs=jobs,
            on_run=watch.run,
            callbacks=[watch],
            say=say,
        )
    table, path = comparison.standings(), comparison.path
    files = f"tables   {path}/table.md, .csv, .tex\nreport   {path / 'report.html'}, with an interval per client"
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
    out_dir: Annotated[Path | None, _out("runs/tune-PRESET")] = None,
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
def evaluate(
    run: RunPath,
    on: Annotated[
        str | None,
        typer.Option(help="local, val, global, shifted, fog, fog:3, cifar10.1, cifar10-c, ...; default local,global"),
    ] = None,
    data: DataPath = None,
    drift: Aware = False,
    sets: DriftSets = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Test every client's personal model. With --drift also when it notices drift, by default on `mixed` too."""
    opened = load(run, data=data, set=predicting(sets), device=device, say=say)
    names = [s.strip() for s in (on or ("local,global,mixed" if drift else "local,global")).split(",") if s.strip()]
    if not names:
        raise InputError("--on: name at least one test set, such as local,global")
    if drift:
        with watched() as watch:
            found = opened.drift_scores(names, watch.copies)
        show(as_json, {"run": str(run), **found.as_dict()}, tables.drift_scores(found))
        return
    with watched() as watch:
        scores = opened.evaluate(names, watch.copies)
    try:
        if opened.note(scores):
            say(f"noted in {run}: perada report {shlex.quote(str(run))} shows it")
    except OSError as error:
        say(f"warning: cannot write to {run} ({error.strerror}): its report will not show these scores")
    show(as_json, {"run": str(run), **{k: v.as_dict() for k, v in scores.items()}}, tables.scores(scores))


@app.command("bounds")
def bounds_command(
    run: RunPath,
    images: Annotated[int, typer.Option(min=0, help="most images of 32×32 pixels per measurement; 0: all")] = IMAGES,
    delta: Annotated[float, typer.Option(help="probability that a confidence statement fails")] = DELTA,
    data: DataPath = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the terms of the paper's theorems on a finished run, and say what to do about them."""
    measured = bounds(load(run, data=data, device=device, say=say), images, delta)
    show(as_json, measured.as_dict(), *bounds_tables.pages(measured))


@app.command()
def predict(
    run: RunPath,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="pictures of any size, or folders of them")],
    client: Client,
    data: DataPath = None,
    drift: Aware = False,
    sets: DriftSets = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict what images show, with one client's personal model."""
    opened = load(run, data=data, set=predicting(sets), device=device, say=say)
    predictions = opened.predict(client, images, drift)
    show(as_json, predictions, tables.predictions(predictions))


@app.command("drift")
def drift_command(
    run: RunPath,
    images: Annotated[list[Path], typer.Argument(metavar="FOLDER | IMAGE...", help="pictures of any size")],
    client: Client,
    data: DataPath = None,
    sets: DriftSets = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Say whether images look like a client's own. The exit code is 0 if they do, and 3 if they have drifted."""
    opened = load(run, data=data, set=predicting(sets), device=device, say=say)
    report_drift(opened.predictor(client).check(images), as_json)


@app.command()
def export(
    run: RunPath,
    client: Client,
    out_file: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help=".safetensors: weights; .pt2, .onnx: the whole network; a folder: LoRA for PEFT",
        ),
    ],
    merged: Annotated[bool, typer.Option("--merged", help="the whole network, adapters merged into it")] = False,
    data: DataPath = None,
) -> None:
    """Write a client's personal adapter (or merged model) to one file; .onnx needs pip install 'perada[onnx]'."""
    load(run, data=data, say=say).export(client, out_file, merged)
    tell(f"wrote {out_file}")


@app.command("join")
def join_command(
    run: RunPath,
    data: Annotated[str, typer.Option("--data", metavar="FOLDER", help="class/image files, a manifest or .npz")],
    name: Annotated[str, typer.Option("--name", help="the new client's name")],
    rounds: Annotated[int | None, typer.Option(help="of training; default as often as a client took part")] = None,
    out_dir: Annotated[Path | None, _out("RUN-NAME")] = None,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing run")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a new client a personal model from a finished run; nobody else changes."""
    made = join(run, data=data, name=name, rounds=rounds, out=out_dir, device=device, overwrite=overwrite, say=say)
    page = made.path / "report.html"
    document = {"run": str(made.path), "report": str(page), "client": name, **made.summary["joined"]}
    show(as_json, document, tables.joined(made), f"run      {made.path}\nreport   {page}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders; several are compared")],
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="default RUN/report.html")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="also files there for tensorboard --logdir FOLDER")
    ] = None,
    theory: Annotated[bool, typer.Option("--theory", help="measure what `perada bounds` does, too")] = False,
    sites: Annotated[bool, typer.Option("--sites", help="say per site whether joining is worth it")] = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    opened = [load(r, say=say) for r in runs]
    if tensorboard is not None:
        write_events([(r.path.resolve().name, r.folder.evaluations()) for r in opened], tensorboard)
        tell(f"wrote {tensorboard}")
    path = out_file or opened[0].path / "report.html"
    write_report(opened, path, theory, sites)
    tell(f"wrote {path}")


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
    cost: Annotated[bool, typer.Option("--cost", help="measure what a round costs a client on this machine")] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, with the parameters that a client trains and sends per round."""
    made = network_of(backbone, classes)  # refuses an unknown backbone; a method that does not fit is only left out
    sizes, costs = {}, {}
    for name in REGISTRY:
        try:
            sizes[name] = method_sizes(name, backbone, classes)
        except InputError as error:
            say(f"{name} cannot train {backbone}: {error}")
            continue
        if cost:
            costs[name] = round_cost(make_method(name, {}), made, classes)
    rows = [{"name": n, **size, **({"cost": asdict(costs[n])} if cost else {})} for n, size in sizes.items()]
    show(as_json, rows, tables.methods(sizes, backbone, classes, costs))


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
