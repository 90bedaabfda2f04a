"""`perada flower ...`: parse, call, print."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..cli import tables
from ..cli.console import INTERRUPTED, SAID
from ..config import parse_setting
from ..errors import InputError
from ..runs.run import load
from . import certs as keys
from . import collect as shelf
from .address import PORT, Address
from .control import Control
from .launch import join, known_site, plan_site, serve
from .processes import Stop, stoppable
from .project import Project, init
from .settings import checked_name

app = typer.Typer(no_args_is_help=True, help="Real federations: the same methods over Flower (docs/deploy.md).")
out = Console(markup=False)
err = Console(stderr=True, markup=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the project's folder")]
Names = Annotated[str, typer.Option("--sites", metavar="A,B,C", help="names of the sites")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no encryption and no keys: for trials on one machine")]
Knows = Annotated[bool, typer.Option("--i-know-this-is-not-encrypted", help="--insecure beyond this machine, too")]
RunName = Annotated[str | None, typer.Option("--name", help="the run's name")]
SiteName = Annotated[str | None, typer.Option("--name", help="of this site")]
SiteFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="the folder with site.toml")]
SiteRun = Annotated[str, typer.Option("--run", help="a run's name; default the newest")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def _say(text: str) -> None:
    err.print(text, highlight=False, soft_wrap=True)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _until_stopped(work: Callable[[], None]) -> None:
    """Run a service: SIGTERM ends it with code 0, Ctrl-C with 130, everything it started with it."""
    try:
        with stoppable():
            work()
    except Stop as stop:
        _say("stopped")
        raise typer.Exit(SAID if stop.code == INTERRUPTED else stop.code) from stop


@contextmanager
def _private() -> Iterator[None]:
    """What is written meanwhile is for its owner alone: models, databases, logs."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@app.command("init")
def init_command(
    folder: Folder,
    sites: Names = "north,south,west",
    name: Annotated[str, typer.Option(help="of the federation")] = "federation",
    server: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="what sites dial")] = f"127.0.0.1:{PORT}",
    preset: Annotated[str, typer.Option(help="see `perada presets`")] = "digits",
    classes: Annotated[str, typer.Option(metavar="A,B,C", help="of all sites together; digits has its own")] = "",
    method: Annotated[str | None, typer.Option(help="see `perada methods`")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="section.key=value")] = None,
) -> None:
    """Write a project folder: the app, server.toml, site.toml, a script for certificates."""
    settings = dict(parse_setting(s) for s in sets or [])
    made = init(folder, name, _split(sites), Address.parse(server), preset, _split(classes), method, settings)
    for path in made:
        out.print(str(path), highlight=False, soft_wrap=True)
    dialled, first = Address.parse(server), f"{folder / 'certs.sh'}, then"
    if not dialled.loopback:  # a private key travels nowhere
        first = f"perada flower certs {folder / 'certs'} --server-name {dialled.host},"
        first += " each site's own key by --keys-only (docs/deploy.md), then"
    _say(f"next: {first} perada flower server {folder}")


@app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of certificates, such as PROJECT/certs")],
    server_name: Annotated[
        list[str] | None, typer.Option("--server-name", metavar="HOST", help="a name or address sites dial, repeatable")
    ] = None,
    sites: Annotated[str, typer.Option("--sites", metavar="A,B,C", help="a key pair for each")] = "",
    keys_only: Annotated[bool, typer.Option("--keys-only", help="at a site: its own key pair, no more")] = False,
    add: Annotated[str | None, typer.Option("--add", metavar="NAME", help="a key pair for one more site")] = None,
    renew: Annotated[str | None, typer.Option("--renew", metavar="server | NAME", help="replace one")] = None,
) -> None:
    """A certificate authority, the server's certificate, one key pair for each site."""
    if sum(map(bool, (keys_only, add, renew))) > 1:
        raise InputError("--keys-only, --add and --renew: choose one")
    if add:
        made = keys.site_keys(folder, add)
    elif renew:
        server = renew == "server"
        made = keys.renew_server(folder, server_name or []) if server else keys.renew_site(folder, renew)
    elif keys_only:
        made = [path for site in keys.check_sites(_split(sites)) for path in keys.site_keys(folder, site)]
    else:
        made = keys.make(folder, server_name or [], _split(sites))
    for path in made:
        out.print(str(path), highlight=False, soft_wrap=True)


@app.command("server")
def server_command(
    folder: Folder,
    host: Annotated[str, typer.Option(help="where to listen; 0.0.0.0 for all addresses")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="default: the one in site.toml")] = None,
    insecure: Insecure = False,
    knows: Knows = False,
) -> None:
    """Run the federation's server (a Flower SuperLink) until Ctrl-C or SIGTERM."""
    project = Project.open(folder)
    address = Address(host.removeprefix("[").removesuffix("]"), port or project.port())
    with _private():
        _until_stopped(lambda: serve(project, address, insecure, knows, _say))


@app.command("site")
def site_command(
    name: Annotated[str | None, typer.Option(help="of this site, as in server.toml")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="class/image files, a manifest or .npz")] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="default: the one in site.toml")] = None,
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="the folder with site.toml and certs")] = Path(),
    insecure: Insecure = False,
    knows: Knows = False,
) -> None:
    """Take part as a site (a Flower SuperNode) until Ctrl-C or SIGTERM. The data stay where they are."""
    with _private():
        plan = plan_site(folder, name, data, server, insecure, knows)
        _until_stopped(lambda: join(plan, lambda text: _say(f"{plan.settings.name}: {text}")))


@app.command("run")
def run_command(
    folder: Folder,
    name: RunName = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a run that ended early")] = False,
    after: Annotated[str, typer.Option("--continue-from", metavar="RUN", help="start from where that run ended")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="do not wait for the end")] = False,
    as_json: AsJson = False,
) -> None:
    """Train: start a run at this machine's server and follow it. Ctrl-C stops it; --resume goes on."""
    project = Project.open(folder)
    try:
        _ = name is None or checked_name("--name", name)
    except ValueError as error:
        raise InputError(str(error)) from error
    if after:
        shelf.pick(project, after)  # says now that there is none
    control = Control.open(project.flower())
    chosen = name or (shelf.pick(project, None).name if resume else shelf.free_name(project))
    if not resume and (project.settings().runs() / chosen).exists():
        raise InputError(f"there is a run {chosen} already: --resume goes on with it, --name NAME starts another")
    follower = shelf.Follower(project.settings().runs() / chosen, _say)
    follower.skip()
    if project.settings().untrained:
        _say("warning: the frozen backbone is random: name a pretrained file as model.weights in server.toml")
    number = control.start(project.app, chosen, resume, after)
    _say(f"started {chosen} (Flower's number {number})")
    if detach:
        return
    again = f"perada flower run {shlex.quote(str(folder))} --resume --name {chosen}"
    again += f" --continue-from {shlex.quote(after)}" if after else ""
    try:
        with stoppable():
            path = shelf.follow(control, number, follower, again)
    except Stop as stop:
        control.stop(number)
        _say(f"stopped; rounds are saved. Go on with: {again}")
        raise typer.Exit(SAID) from stop
    finished = load(path)
    if as_json:
        print(json.dumps({"run": str(path), **finished.summary}, indent=1))
        return
    out.print(tables.results([finished]))
    out.print(f"run      {path}\nreport   {path / 'report.html'}", highlight=False, soft_wrap=True)


@app.command("status")
def status_command(folder: Folder, as_json: AsJson = False) -> None:
    """Which sites are connected, and how far the runs are."""
    project = Project.open(folder)
    found: dict[str, Any] = {"server": None, "sites": {}, "runs": shelf.runs(project)}
    try:
        control = Control.open(project.flower())
        found["server"] = str(control.address)
        names, nodes = control.sites(), control.nodes()
        states = {names.get(node, node): str(about["status"]) for node, about in nodes.items()}
        sites = project.settings().federation.sites
        found["sites"] = {s: states.get(s, "no key") for s in sites} if names else states
    except InputError:  # no server: the runs are still there
        pass
    if as_json:
        print(json.dumps(found, indent=1))
        return
    out.print(f"server   {found['server'] or 'not running'}", highlight=False)
    for site, state in found["sites"].items():
        out.print(f"site     {site}: {state}", highlight=False)
    for run, about in found["runs"].items():
        why = f": {about['error']}" if about.get("error") else ""
        said = f"{about['status']}, round {about['round']} of {about['rounds']}{why}"
        out.print(f"run      {run}: {said}", highlight=False, soft_wrap=True)


@app.command("collect")
def collect_command(
    folder: Folder,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="the run folder to make")],
    name: RunName = None,
) -> None:
    """Metrics and the global adapter as a run folder, for `perada report` and the rest."""
    path = shelf.collect(Project.open(folder), name, out_dir)
    out.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("predict")
def predict_command(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="pictures of any size")],
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    as_json: AsJson = False,
) -> None:
    """At a site: what its own model sees in images. Needs no server and no data."""
    from .export import predict

    found = predict(known_site(folder, site), images, run)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    out.print(tables.predictions(found))


@app.command("export")
def export_command(
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE", help="FILE.safetensors, FILE.pt2 or FILE.onnx")],
    site: SiteName = None,
    folder: SiteFolder = Path(),
    run: SiteRun = "",
    merged: Annotated[bool, typer.Option("--merged", help="the whole network instead of the personal part")] = False,
) -> None:
    """At a site: its own model as one file. Needs no server and no data."""
    from .export import export

    export(known_site(folder, site), out_file, merged, run)
    out.print(f"wrote {out_file}", highlight=False, soft_wrap=True)
