"""`perada flower server` and `site`: Flower's own processes with the right flags, kept in order until told to stop."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ..config import toml_value
from ..errors import InputError, RunError
from ..runs.folder import locked, write_atomic
from . import certs, wrapped
from .address import Address, NoAnswer, check_free, check_plain, free_port, probe
from .control import Control
from .processes import Child, environment, marked, program
from .project import Project, check_federation
from .settings import ServerSettings, SiteSettings
from .warm import stub

Say = Callable[[str], None]
UP_S = 60.0  # the most that a SuperLink takes to listen
STILL_ONLINE_S = 120.0  # how long to ask again after a crash, before the server has forgotten us
_REFUSED = r"\[code: 2004\]"


def _command(which: str, words: list[str]) -> list[str]:
    """-P: the wrapper's folder must not come before the standard library (it has a site.py)."""
    return [sys.executable, "-P", str(Path(wrapped.__file__)), which, *words]


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


@contextmanager
def _alone(home: Path, what: str) -> Iterator[None]:
    """Two of a kind in one folder would take each other's files."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(home))
        except InputError as error:
            raise InputError(f"{what} runs already (in {home}): stop that one first") from error
        yield


# The server.


def serve(project: Project, address: Address, insecure: bool, knows: bool, say: Say) -> None:
    """Run the SuperLink until a signal comes (`processes.Stop`) or it ends."""
    check_plain(address, insecure, knows)
    program("flower-superexec")
    settings = project.settings()
    check_federation(settings.federation.name)
    check_free(address)
    home = _make(project.flower())
    if not insecure:
        _check_certificates(project, address, say)
    elif not address.loopback:
        say(f"warning: nothing between the sites and {address} is encrypted, and anybody who reaches it may take part")
    with _alone(home, f"a server of {project.folder}"):
        _serve(project, settings, address, insecure, home, say)


def _serve(project: Project, settings: ServerSettings, address: Address, insecure: bool, home: Path, say: Say) -> None:
    control = Control.write(home, address, None if insecure else project.certs / "ca.crt")
    words = ["--host", address.host, "--port", str(address.port), "--database", str(home / "superlink.db")]
    words += ["--disable-runtime-dependency-installation", *_link_security(project, insecure)]
    ready = home / "ready"
    ready.unlink(missing_ok=True)
    env = environment(home, PERADA_FLOWER_SERVER=str(project.server_toml), PERADA_FLOWER_READY=str(ready))
    if not insecure:
        env["PERADA_FLOWER_NODES"] = str(control.nodes_file)
    link = Child(_command("superlink", words), env, home / "superlink.log", lambda line: _tell(line, say), home)
    try:
        _wait_up(link, address, None if insecure else project.certs / "ca.crt")
        door = None if insecure else Door(control, project.certs, settings.federation.sites, say)
        if door:
            door.admit(certs.read_keys(project.certs))
        ready.touch()
        say(f"ready: {settings.federation.name} at {'http' if insecure else 'https'}://{address}, log {link.log}")
        while link.code is None:
            time.sleep(0.5)
            if door:
                door.look()
        raise RunError(f"the SuperLink ended by itself (code {link.code}): see {link.log}; start it again")
    finally:
        link.stop()
        ready.unlink(missing_ok=True)
        control.gone()


def _tell(line: str, say: Say) -> None:
    words = marked(line)
    if words is not None:
        say(words)


def _link_security(project: Project, insecure: bool) -> list[str]:
    if insecure:
        return ["--insecure"]
    flags = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
    paths = [word for flag, file in flags.items() for word in (flag, str(project.certs / file))]
    return [*paths, "--enable-supernode-auth"]


def _check_certificates(project: Project, address: Address, say: Say) -> None:
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (project.certs / name).is_file():
            raise InputError(f"no {project.certs / name}: run {project.folder / 'certs.sh'} first")
    for name in ("ca.crt", "server.crt"):
        left = certs.expires(project.certs / name) - datetime.now(UTC)
        if left < timedelta(0):
            raise InputError(f"{project.certs / name} has expired: perada flower certs {project.certs} --renew server")
        if left < timedelta(days=30):
            say(f"warning: {project.certs / name} expires in {left.days} days: renew it")
    names, host = certs.names(project.certs / "server.crt"), address.from_here.host
    if host.lower() not in names:
        renew = f"perada flower certs {project.certs} --renew server --server-name {host} --server-name ..."
        raise InputError(
            f"{project.certs / 'server.crt'} is for {', '.join(names)} and not for {host}: listen on --host 0.0.0.0, "
            f"or give the certificate all its names anew: {renew}"
        )


def _wait_up(link: Child, address: Address, ca: Path | None) -> None:
    end = time.monotonic() + UP_S
    while time.monotonic() < end:
        if link.code is not None:
            break
        try:
            probe(address.from_here, ca, 2, starting=True)
            return
        except NoAnswer:
            time.sleep(0.1)
    why = link.said(r"\S") or "it said nothing"
    raise RunError(f"the SuperLink did not come up: {why}; see {link.log}")


class Door:
    """The keys in certs/sites of the sites in server.toml are let in, and no others, also those that come later."""

    def __init__(self, control: Control, folder: Path, sites: tuple[str, ...], say: Say) -> None:
        self.control, self.folder, self.sites, self.say = control, folder, sites, say
        self.known: dict[str, bytes] = {}
        self.seen: dict[str, bytes] = {}  # at the last look: a file that is being copied changes once more
        self.told: list[str] = []
        self.trouble = ""

    def admit(self, keys: dict[str, bytes]) -> None:
        self.known = self.seen = keys
        good, wrong = certs.good_keys({name: data for name, data in keys.items() if name in self.sites})
        strange = sorted(keys.keys() - set(self.sites))
        wrong += [f"{name} is not one of the sites in server.toml: its key is not let in" for name in strange]
        missing = [name for name in self.sites if name not in keys]
        wrong += [f"no key of {name} in {self.folder / 'sites'}: it is not let in" for name in missing]
        for line in wrong:
            if line not in self.told:
                self.say(f"warning: {line}")
        self.told = wrong
        for line in self.control.admit(good, [name for name in keys if name in self.sites and name not in good]):
            self.say(line)

    def look(self) -> None:
        """Act on a change once the files have kept still; what does not work is said once and tried again."""
        now = certs.read_keys(self.folder)
        still, self.seen = now == self.seen, now
        if not still or (now == self.known and not self.trouble):
            return
        try:
            self.admit(now)
            self.trouble = ""
        except (InputError, RunError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            if why != self.trouble:
                self.say(f"warning: the sites' keys could not be brought up to date ({why}): trying again")
            self.trouble = why


# A site.


@dataclass(frozen=True)
class SitePlan:
    """What `perada flower site` needs to know, all checked."""

    settings: SiteSettings
    file: Path  # the resolved site.toml
    home: Path
    server: Address
    ca: Path | None
    key: Path | None


def plan_site(
    folder: Path, name: str | None, data: Path | None, server: str | None, insecure: bool, knows: bool
) -> SitePlan:
    """site.toml of the folder with what was typed laid over it, written where the ClientApp will read it."""
    folder = folder.expanduser().absolute()
    table = _site_table(folder / "site.toml")
    told = {"name": name, "data": str(data.expanduser().absolute()) if data else None, "server": server}
    table |= {k: v for k, v in told.items() if v}
    for need, hint in (("name", "--name NAME"), ("data", "--data FOLDER"), ("server", "--server HOST:PORT")):
        if not table.get(need):
            raise InputError(f"{folder / 'site.toml'} has no {need}: give {hint}, or fill it in there")
    address = Address.parse(str(table.pop("server")))
    check_plain(address, insecure, knows)
    for path in ("data", "state", "test"):
        if table.get(path):
            table[path] = str(folder / Path(str(table[path])).expanduser())
    if not Path(table["data"]).exists():
        raise InputError(f"no data at {table['data']}: give --data FOLDER with class/image files")
    name = certs.check_site(str(table["name"]))
    state = Path(str(table.setdefault("state", str(folder / "state"))))
    ca, key = (None, None) if insecure else (folder / "certs" / "ca.crt", folder / "certs" / "sites" / f"{name}.key")
    for file in (ca, key):
        if file is not None and not file.is_file():
            raise InputError(f"no {file}: the server's people send it, or perada flower certs makes it")
    home = _make(state / "flower" / name)
    file = home / "site.toml"
    text = "[site]\n" + "".join(f"{k} = {toml_value(v)}\n" for k, v in table.items())
    with _alone(home, f"site {name}"):
        write_atomic(file, text.encode())
    return SitePlan(SiteSettings.read(file), file, home, address, ca, key)


def _site_table(file: Path) -> dict[str, Any]:
    """The [site] section as it is; a folder without the file may still say everything by options."""
    try:
        found = tomllib.loads(file.read_text("utf8")).get("site", {})
    except FileNotFoundError as error:
        what = "copy site.toml from the project that `perada flower init` made, or give --dir"
        raise InputError(f"no {file}: {what}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not valid TOML: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: [site] must be a section")
    return dict(found)


def known_site(folder: Path, name: str | None) -> SiteSettings:
    """A site that `perada flower site` has run as before."""
    folder = folder.expanduser().absolute()
    table = _site_table(folder / "site.toml")
    chosen = certs.check_site(name or str(table.get("name") or "?"))
    file = folder / Path(str(table.get("state") or "state")).expanduser() / "flower" / chosen / "site.toml"
    if not file.is_file():
        raise InputError(f"{chosen} has not taken part from {folder} yet: see `perada flower site`")
    return SiteSettings.read(file)


def join(plan: SitePlan, say: Say) -> None:
    """Keep a SuperNode connected until a signal comes: wait for a server that is away, come back after a crash."""
    check_federation(plan.settings.federation)
    with _alone(plan.home, f"site {plan.settings.name}"):
        _join(plan, say)


def _join(plan: SitePlan, say: Say) -> None:
    seen = plan.home / "connected"  # names the key that the server has let in before
    mark = str(plan.key)
    refused_since: float | None = None
    if plan.ca is None and not plan.server.loopback:
        say(f"warning: nothing between here and {plan.server} is encrypted")
    while True:
        _await_server(plan, say)
        socket = _socket(plan.home / "socket")
        warm, node = _warm(plan, socket, say), _node(plan, socket, say)
        try:
            while node.code is None:
                time.sleep(0.2)
                if refused_since is not None and node.said("SuperNode ID"):
                    refused_since = None
                if not seen.exists() and node.said("SuperNode ID"):
                    seen.write_text(mark)
        finally:
            node.stop()
            warm.stop()
            shutil.rmtree(socket.parent, ignore_errors=True)
        if node.said(_REFUSED):
            before = seen.exists() and seen.read_text() == mark
            refused_since = refused_since or time.monotonic()
            if not before or time.monotonic() - refused_since > STILL_ONLINE_S:
                raise InputError(
                    f"refused: {plan.server} does not know this site's key: the server's people need "
                    f"{plan.settings.name}.pub in certs/sites and {plan.settings.name} in server.toml"
                )
            say("not let in: for a while after a crash the server counts a site as connected, or its key was removed")
            time.sleep(5)
            continue
        _explain(node, plan)
        say(f"the SuperNode ended (code {node.code}; see {node.log}): starting it again")
        time.sleep(2)


def _explain(node: Child, plan: SitePlan) -> None:
    """Raise where starting again is no use."""
    if node.said("CERTIFICATE_VERIFY_FAILED"):
        raise InputError(f"refused: the certificate of {plan.server} is not one that {plan.ca} vouches for")
    if node.said(r"\[code: 2001\]"):
        raise InputError(f"refused: {plan.server} lets in sites with keys only: leave out --insecure")
    if node.code == 78:
        raise RunError(marked(node.said("guarded") or "") or f"flwr does not fit: see {node.log}")


def _await_server(plan: SitePlan, say: Say) -> None:
    told = False
    while True:
        try:
            probe(plan.server, plan.ca)
            return
        except NoAnswer as why:
            if not told:
                say(f"no server at {plan.server} yet ({why}): waiting for it")
            told = True
            time.sleep(2)


def _socket(note: Path) -> Path:
    """A place for a socket: its path must be short. Its folder is noted, to be removed next time after a power cut."""
    if note.is_file() and (old := Path(note.read_text())).name.startswith("perada-"):
        shutil.rmtree(old, ignore_errors=True)
    folder = mkdtemp(prefix="perada-")
    note.write_text(folder)
    return Path(folder) / "warm"


def _warm(plan: SitePlan, socket: Path, say: Say) -> Child:
    """The process that ClientApps are forked from. Should it end, Flower starts them by itself, only slower."""
    words = [sys.executable, "-m", "perada.flower.warm", str(socket)]
    env = environment(plan.home, PERADA_FLOWER_SITE=str(plan.file))
    return Child(words, env, plan.home / "site.log", _Story(plan, say), plan.home)


def _node(plan: SitePlan, socket: Path, say: Say) -> Child:
    words = ["--superlink", str(plan.server), "--host", "127.0.0.1", "--port", str(free_port())]
    if plan.ca is None or plan.key is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(plan.ca), "--auth-supernode-private-key", str(plan.key)]
    env = environment(plan.home, PERADA_FLOWER_SITE=str(plan.file), PERADA_FLOWER_WARM=str(socket))
    env["PATH"] = f"{stub(plan.home / 'bin')}{os.pathsep}{env['PATH']}"
    return Child(_command("supernode", words), env, plan.home / "site.log", _Story(plan, say), plan.home)


class _Story:
    """A SuperNode's log in a few words."""

    def __init__(self, plan: SitePlan, say: Say) -> None:
        self.plan, self.say, self.round = plan, say, ""

    def __call__(self, line: str) -> None:
        words = marked(line)
        if words is not None:
            self.say(words)
        elif "SuperNode ID" in line:
            self.say(f"connected to {self.plan.server}")
        elif found := re.search(r"\[RUN \d+, ROUND (\S+)\]", line):
            self.round = found[1]
        elif found := re.search(r"Receiving: (\S+) message", line):
            self.say(f"round {self.round}: {found[1]}" if self.round else found[1])
        elif re.search(r"ERROR\s*:", line) or "raised an exception" in line:
            self.say(f"error in {self.plan.home / 'site.log'}: {line.split(':', 1)[-1].strip()}")
