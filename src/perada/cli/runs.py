"""The commands about finished runs: what their models predict, what that is worth, and who joins later."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..report import write_report
from ..report.costs import measured_costs
from ..report.tensorboard import write_events
from ..runs.join import join
from ..runs.run import load
from ..theory import DELTA, IMAGES, bounds
from . import tables
from . import theory as bounds_tables
from .console import AsJson, say, show, tell
from .drift import Aware, DriftSets, predicting, report_drift
from .options import Client, DataPath, Device, RunPath, out_option
from .watch import watched

app = typer.Typer()


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
    out_dir: Annotated[Path | None, out_option("RUN-NAME")] = None,
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
    sites: Annotated[
        bool, typer.Option("--sites", help="say per site whether joining is worth it, and whether to trust its numbers")
    ] = False,
    cost: Annotated[bool, typer.Option("--cost", help="measure what a round costs a client on this machine")] = False,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="also each figure there as SVG, PDF and PNG")
    ] = None,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    opened = [load(r, say=say) for r in runs]
    if tensorboard is not None:
        write_events([(r.path.resolve().name, r.folder.evaluations()) for r in opened], tensorboard)
        tell(f"wrote {tensorboard}")
    path = out_file or opened[0].path / "report.html"
    write_report(opened, path, theory, sites, measured_costs(opened) if cost else None, figures)
    tell(f"wrote {path}")
    if figures is not None:
        tell(f"wrote {figures}")
