"""`perada flower ...`: parse, call, print."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import parse_setting
from ..config.settings import given
from ..errors import InputError
from ..flower import certs
from ..flower.address import PORT, Address
from ..flower.control import Control, Follower, follow
from ..flower.launch import join, plan_site, serve, site_with_data
from ..flower.newcomer import joined
from ..flower.personal import known_site, personal_model, personal_predictor, site_page
from ..flower.processes import Stop, stoppable
from ..flower.project import Project, init
from ..flower.settings import check_sites, checked_name
from ..predict.personal import aware_predictions
from ..runs.run import load
from . import tables
from .console import SAID, AsJson, out, print_json, say, show, tell
from .drift import Aware, DriftSets, predicting, report_drift

app = typer.Typer(no_args_is_help=True, help="Real federations: the same methods over Flower (docs/deploy.md).")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the project's folder")]
Names = Annotated[str, typer.Option("--sites", metavar="A,B,C", help="names of the sites")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no encryption and no keys: for trials on one machine")]
Confirmed = Annotated[bool, typer.Option("--i-know-this-is-not-encrypted", help="--insecure beyond this machine")]
RunName = Annotated[str | None, typer.Option("--name", help="the run's name")]
SiteName = Annotated[str | None, typer.Option("--name", help="the site's name, as in server.toml")]
SiteFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="the folder with site.toml and certs")]
SiteRun = Annotated[str, typer.Option("--run", help="a run's name; default the newest")]


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@contextmanager
def private() -> Iterator[None]:
    """Makes what is written readable for its owner alone: models, databases, logs, images."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _service() -> Iterator[None]:
    """Runs a service: SIGTERM ends it with code 0 and Ctrl-C with 130. Only its owner can read what it writes."""
    try:
        with private(), stoppable():
            yield
    except Stop as stop:
        say("stopped")
        raise typer.Exit(SAID if stop.interrupted else 0) from stop


@app.command("init")
def init_command(
    folder: Folder,
    sites: Names = "north,south,west",
    name: Annotated[str, typer.Option(help="the federation's name")] = "federation",
    server: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="what sites dial")] = f"127.0.0.1:{PORT}",
    preset: Annotated[str, typer.Option(help="see `perada presets`")] = "digits",
    classes: Annotated[str, typer.Option(metavar="A,B,C", help="of all sites together; digits has its own")] = "",
    method: Annotated[str | None, typer.Option(help="see `perada methods`")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="section.key=value")] = None,
) -> None:
    """Write a project folder: the app, server.toml, site.toml, a script for certificates."""
    settings = given(dict(parse_setting(s) for s in sets or []), method=method or None)
    address = Address.parse(server)
    for path in init(folder, name, _split(sites), address, preset, _split(classes), settings):
        tell(str(path))
    keys = "each site's own key by perada flower certs certs --keys-only (docs/deploy.md)"
    say(f"next: {folder / 'certs.sh'}, {keys}, then perada flower server {folder}")


@app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of certificates, such as PROJECT/certs")],
    server_name: Annotated[
        list[str] | None, typer.Option("--server-name", metavar="HOST", help="a name or address sites dial, repeatable")
    ] = None,
    sites: Annotated[str, typer.Option("--sites", metavar="A,B,C", help="make a key pair for each")] = "",
    keys_only: Annotated[bool, typer.Option("--keys-only", help="make the sites' key pairs and nothing else")] = False,
    renew: Annotated[str | None, typer.Option("--renew", metavar="server | NAME", help="replace one")] = None,
) -> None:
    """Make a certificate authority, the server's certificate, and a key pair per site."""
    if keys_only and renew:
        raise InputError("--keys-only and --renew: choose one")
    if renew == "server":
        files = certs.renew_server(folder, server_name or [])
    elif renew:
        files = certs.renew_site(folder, renew)
    elif keys_only:
        files = [path for site in check_sites(_split(sites)) for path in certs.site_keys(folder, site)]
    else:
        files = certs.make(folder, server_name or [], _split(sites))
    for path in files:
        tell(str(path))


@app.command("server")
def server_command(
    folder: Folder,
    host: Annotated[str, typer.Option(help="where to listen; 0.0.0.0 for all addresses")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="default: the one in site.toml")] = None,
    insecure: Insecure = False,
    confirmed: Confirmed = False,
) -> None:
    """Run the federation's server (a Flower SuperLink) until Ctrl-C or SIGTERM."""
    project = Project.open(folder)
    address = Address(host.removeprefix("[").removesuffix("]"), port or project.port())
    with _service():
        serve(project, address, insecure, confirmed, say)


@app.command("site")
def site_command(
    name: SiteName = None,
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="class/image files, a manifest or .npz")] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="default: the one in site.toml")] = None,
    folder: SiteFolder = Path(),
    insecure: Insecure = False,
    confirmed: Confirmed = False,
) -> None:
    """Take part as a site (a Flower SuperNode) until Ctrl-C or SIGTERM. The data stay where they are."""
    site = plan_site(folder, name, data, server, insecure, confirmed)
    with _service():
        join(site, lambda text: say(f"{site.settings.name}: {text}"))


@app.command("run")
def run_command(
    folder: Folder,
    name: RunName = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run that ended early")] = False,
    after: Annotated[str, typer.Option("--continue-from", metavar="RUN", help="start from where that run ended")] = "",
    back: Annotated[
        int | None, typer.Option("--from-round", min=0, metavar="N", help="undo a run's rounds after N, and go on")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="do not wait for the end")] = False,
    as_json: AsJson = False,
) -> None:
    """Train: start a run at this machine's server and follow it. Ctrl-C stops it; --resume continues it."""
    project = Project.open(folder)
    if back is not None and (resume or after):
        raise InputError("--from-round continues a run by itself: leave out --resume and --continue-from")
    resume = resume or back is not None
    settings = project.settings()
    if name is not None:
        checked_name("--name", name)
    if after:
        project.run(after)  # refuses an unknown run
    control = Control.open(project.flower())
    chosen = name or (project.run(None).name if resume else project.free_name())
    if not resume and (settings.runs() / chosen).exists():
        raise InputError(f"there is a run {chosen} already: --resume continues it, --name NAME starts another")
    follower = Follower(settings.runs() / chosen, say, back)
    if settings.random_backbone:
        say("warning: the frozen backbone is random: name a pretrained file as ModelOptions.weights in server.toml")
    if back is not None:
        project.run(chosen)  # refuses an unknown run
        project.renew_app()
    number = control.start(project.app, chosen, resume, after, back)
    say(f"started {chosen} (Flower's number {number})")
    if detach:
        return
    words = ["perada", "flower", "run", str(folder), "--resume", "--name", chosen]
    again = shlex.join([*words, "--continue-from", after] if after else words)
    try:
        with stoppable():
            path = follow(control, number, follower, again)
    except Stop as stop:
        control.stop(number)
        say(f"stopped; rounds are saved. Continue with: {again}")
        raise typer.Exit(SAID) from stop
    run = load(path)
    if as_json:
        print_json({"run": str(path), **run.summary})
        return
    out.print(tables.results([run]))
    tell(f"run      {path}\nreport   {path / 'report.html'}")


@app.command("status")
def status_command(folder: Folder, as_json: AsJson = False) -> None:
    """Show which sites are connected, and how far the runs are."""
    project = Project.open(folder)
    status: dict[str, Any] = {"server": None, "sites": {}, "runs": project.runs()}
    try:
        control = Control.open(project.flower())
        status["server"] = str(control.address)
        status["sites"] = _site_states(control, project.settings().federation.sites)
    except InputError:  # no server runs
        pass
    if as_json:
        print_json(status)
        return
    tell(f"server   {status['server'] or 'not running'}")
    for site, state in status["sites"].items():
        tell(f"site     {site}: {state}")
    for run, about in status["runs"].items():
        why = f": {about['error']}" if about.get("error") else ""
        tell(f"run      {run}: {about['status']}, round {about['round']} of {about['rounds']}{why}")
        for site in about["in_quarantine"]:
            tell(f"         {site} is in quarantine (events.jsonl says why)")


def _site_states(control: Control, sites: tuple[str, ...]) -> dict[str, str]:
    """Returns the state of each site; without keys, of each connected node."""
    names = control.sites()
    states = {names.get(node, node): str(about["status"]) for node, about in control.nodes().items()}
    return {site: states.get(site, "no key") for site in sites} if names else states


@app.command("collect")
def collect_command(
    folder: Folder,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="the run folder to make")],
    name: RunName = None,
) -> None:
    """Copy metrics and the global adapter to a run folder, for `perada report` and the rest."""
    Project.open(folder).collect(name, out_dir)
    tell(f"wrote {out_dir}")


@app.command("predict")
def predict_command(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="pictures of any size, or folders of them")],
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    drift: Aware = False,
    sets: DriftSets = None,
    as_json: AsJson = False,
) -> None:
    """At a site: predict with its own model. Needs no server; --drift and several labels need its data once."""
    settings, known = predicting(sets), known_site(folder, site)
    if drift:
        predictions = aware_predictions(replace(personal_predictor(known, run, settings), say=say), images)
    else:
        predictions = personal_model(known, run, say).predict(images)
    show(as_json, predictions, tables.predictions(predictions))


@app.command("drift")
def drift_command(
    images: Annotated[list[Path], typer.Argument(metavar="FOLDER | IMAGE...", help="pictures of any size")],
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    sets: DriftSets = None,
    as_json: AsJson = False,
) -> None:
    """At a site: say whether images look like its own. The exit code is 0 if they do, and 3 if they have drifted."""
    predictor = personal_predictor(known_site(folder, site), run, predicting(sets))
    report_drift(replace(predictor, say=say).check(images), as_json)


@app.command("report")
def report_command(
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="the page")] = Path("site.html"),
) -> None:
    """At a site: write a page about its own model, from its own disk. Needs no server; nothing leaves."""
    settings = known_site(folder, site)
    with private():
        site_page(settings, run).write(out_file)
    tell(f"wrote {out_file}: it has images of {settings.name}, so keep it there")


@app.command("join")
def join_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="what `perada flower collect` made, from the server")],
    name: SiteName = None,
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="class/image files, a manifest or .npz")] = None,
    folder: SiteFolder = Path(),
    rounds: Annotated[int | None, typer.Option(help="of training; default as often as a site took part")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="default STATE/joined/RUN-NAME")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing run")] = False,
    as_json: AsJson = False,
) -> None:
    """At a new site: train its own model from a finished run's global one. Needs no server; nothing leaves."""
    settings = site_with_data(folder, name, data)
    with private():
        made = joined(settings, run, rounds, out_dir, overwrite, say)
    page = made.path / "report.html"
    document = {"run": str(made.path), "report": str(page), "client": settings.name, **made.summary["joined"]}
    show(as_json, document, tables.joined(made), f"run      {made.path}\nreport   {page}")


@app.command("export")
def export_command(
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE", help="FILE.safetensors, FILE.pt2 or FILE.onnx")],
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    merged: Annotated[bool, typer.Option("--merged", help="the whole network, adapters merged into it")] = False,
) -> None:
    """At a site: write its own model to one file. Needs no server; thresholds of labels need the site's data once."""
    personal_model(known_site(folder, site), run, say).export(out_file, merged)
    tell(f"wrote {out_file}")
