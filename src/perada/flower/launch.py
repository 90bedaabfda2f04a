"""`perada flower server` and `perada flower site`: Flower's own processes, watched until they are told to stop."""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import InputError, RunError
from ..runs.files import locked, write_atomic
from . import certs, guards
from .address import Address, NoAnswer, check_free, check_plain, free_port, probe
from .control import Control
from .processes import Child, environment, marked, program
from .project import Project
from .settings import ServerSettings, SiteSettings

Say = Callable[[str], None]
UP_S = 60.0  # the longest that a SuperLink may take to listen
STILL_ONLINE_S = 120.0  # after a crash, the server may count us as connected for so long
_REFUSED = r"\[code: 2004\]"


def _start(which: str, words: list[str], log: Path, on_line: Say, **env: str) -> Child:
    """Starts one of Flower's processes, guarded, in the log's folder; -P keeps names there out of its imports."""
    command = [sys.executable, "-P", guards.__file__, which, *words]
    return Child(command, environment(log.parent, **env), log, on_line)


# The server


def serve(project: Project, address: Address, insecure: bool, confirmed: bool, say: Say) -> None:
    """Runs the SuperLink until a signal comes (`processes.Stop`) or it ends."""
    check_plain(address, insecure, confirmed)
    program("flower-superexec")
    settings = project.settings()
    check_free(address)
    home = certs.make_folder(project.flower())
    if not insecure:
        _check_certificates(project, address, say)
    elif not address.loopback:
        say(f"warning: the sites' connections to {address} are not encrypted, and anybody can take part")
    busy = InputError(f"a server of {project.folder} runs already (in {home}): stop that one first")
    with locked(home, busy=busy):
        _serve(project, settings, address, insecure, home, say)


def _serve(project: Project, settings: ServerSettings, address: Address, insecure: bool, home: Path, say: Say) -> None:
    ca = None if insecure else project.certs / "ca.crt"
    control = Control.write(home, address, ca)
    words = ["--host", address.host, "--port", str(address.port), "--database", str(home / "superlink.db")]
    words += ["--disable-runtime-dependency-installation", *_security(project, insecure)]
    ready = home / "ready"
    ready.unlink(missing_ok=True)
    env = {"PERADA_FLOWER_SERVER": str(project.server_toml), "PERADA_FLOWER_READY": str(ready)}
    if not insecure:
        env |= {"PERADA_FLOWER_NODES": str(control.nodes_file), "PERADA_FLOWER_KEYS": str(project.certs / "sites")}
    link = _start("superlink", words, home / "superlink.log", lambda line: _show_marked(line, say), **env)
    try:
        _wait_until_up(link, address, ca)
        admission = None if insecure else Admission(control, project.certs, settings.federation.sites, say)
        if admission:
            admission.admit(certs.read_keys(project.certs))
        ready.touch()
        say(f"ready: {settings.federation.name} at {'http' if insecure else 'https'}://{address}, log {link.log}")
        while link.code is None:
            time.sleep(0.5)
            if admission:
                admission.update()
        raise RunError(f"the SuperLink ended by itself (code {link.code}): see {link.log}", "start it again")
    finally:
        link.stop()
        ready.unlink(missing_ok=True)
        control.server_file.unlink(missing_ok=True)


def _show_marked(line: str, say: Say) -> None:
    if (text := marked(line)) is not None:
        say(text)


def _security(project: Project, insecure: bool) -> list[str]:
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
    names, host = certs.names_of(project.certs / "server.crt"), address.local.host
    if host.lower() not in names:
        renew = f"perada flower certs {project.certs} --renew server --server-name {host} --server-name ..."
        raise InputError(
            f"{project.certs / 'server.crt'} is for {', '.join(names)} and not for {host}: listen on --host 0.0.0.0, "
            f"or renew the certificate with all its names: {renew}"
        )


def _wait_until_up(link: Child, address: Address, ca: Path | None) -> None:
    end = time.monotonic() + UP_S
    while link.code is None and time.monotonic() < end:
        try:
            probe(address.local, ca, 2, starting=True)
            return
        except NoAnswer:
            time.sleep(0.1)
    why = link.last_line(r"\S") or "it printed nothing"
    raise RunError(f"the SuperLink did not start: {why}; see {link.log}")


class Admission:
    """Admits the keys in certs/sites of the sites in server.toml and no others, also while the server runs."""

    def __init__(self, control: Control, folder: Path, sites: tuple[str, ...], say: Say) -> None:
        self.control, self.folder, self.sites, self.say = control, folder, sites, say
        self.admitted: dict[str, bytes] = {}
        self.seen: dict[str, bytes] = {}  # at the last look
        self.warned: list[str] = []
        self.failure = ""

    def admit(self, keys: dict[str, bytes]) -> None:
        self.admitted = self.seen = keys
        good, problems = certs.good_keys({name: data for name, data in keys.items() if name in self.sites})
        problems += [f"{name} is not a site in server.toml: not admitted" for name in keys if name not in self.sites]
        missing = [name for name in self.sites if name not in keys]
        problems += [f"no key of {name} in {self.folder / 'sites'}: {name} is not admitted" for name in missing]
        for problem in problems:
            if problem not in self.warned:
                self.say(f"warning: {problem}")
        self.warned = problems
        unreadable = [name for name in keys if name in self.sites and name not in good]
        for line in self.control.admit(good, unreadable):
            self.say(line)

    def update(self) -> None:
        """Admits changed keys when two looks see the same files: before that they may still be being copied.

        Reports a failure once, and tries again at the next look.
        """
        keys = certs.read_keys(self.folder)
        unchanged, self.seen = keys == self.seen, keys
        if not unchanged or (keys == self.admitted and not self.failure):
            return
        try:
            self.admit(keys)
            self.failure = ""
        except (InputError, RunError, OSError, ValueError) as error:
            failure = str(error) or type(error).__name__
            if failure != self.failure:
                self.say(f"warning: cannot update the sites' keys ({failure}): trying again")
            self.failure = failure


# A site


@dataclass(frozen=True)
class SiteService:
    """What `perada flower site` runs with, checked."""

    settings: SiteSettings
    server: Address
    ca: Path | None  # None: no encryption and no key
    key: Path | None

    @property
    def site_toml(self) -> Path:
        return self.settings.flower / "site.toml"

    @property
    def log(self) -> Path:
        return self.settings.flower / "site.log"


def plan_site(
    folder: Path, name: str | None, data: Path | None, server: str | None, insecure: bool, confirmed: bool
) -> SiteService:
    """Reads the folder's site.toml, in which the given values replace its own, and checks everything."""
    folder = folder.expanduser().absolute()
    settings = site_with_data(folder, name, data, server)
    if not settings.server:
        raise InputError(f"{folder / 'site.toml'} has no server: fill it in, or give --server HOST:PORT")
    address = Address.parse(settings.server)
    check_plain(address, insecure, confirmed)
    if insecure:
        return SiteService(settings, address, None, None)
    ca, private = folder / "certs" / "ca.crt", folder / "certs" / "sites" / f"{settings.name}.key"
    sources = {ca: "the server's people send it", private: "perada flower certs --keys-only makes it"}
    for file, source in sources.items():
        if not file.is_file():
            raise InputError(f"no {file}: {source}")
    return SiteService(settings, address, ca, private)


def site_with_data(folder: Path, name: str | None, data: Path | None, server: str | None = None) -> SiteSettings:
    """Reads the folder's site.toml, in which the given values replace its own; refuses one whose data are not there."""
    file = folder.expanduser().absolute() / "site.toml"
    given = {"name": name, "data": str(data.expanduser().absolute()) if data else None, "server": server}
    settings = SiteSettings.read(file, **given)
    if not settings.data:
        raise InputError(f"{file} has no data: fill it in, or give --data FOLDER")
    path = Path(settings.data)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"no data at {settings.data}: give --data FOLDER with class/image files")
    return settings


def join(site: SiteService, say: Say) -> None:
    """Keeps a SuperNode connected until a signal comes: waits for the server, and restarts after a crash."""
    home = certs.make_folder(site.settings.flower)
    busy = InputError(f"site {site.settings.name} runs already (in {home}): stop that one first")
    with locked(home, busy=busy):
        write_atomic(site.site_toml, site.settings.toml().encode())
        _join(site, say)


def _join(site: SiteService, say: Say) -> None:
    admitted = site.settings.flower / "connected"  # holds the path of the key that the server has admitted
    refused_at: float | None = None
    if site.ca is None and not site.server.loopback:
        say(f"warning: the connection to {site.server} is not encrypted")
    while True:
        _wait_for_server(site, say)
        node, connected = _start_node(site, say), False
        try:
            while node.code is None:
                time.sleep(0.2)
                if not connected and node.last_line("SuperNode ID"):
                    connected, refused_at = True, None
                    admitted.write_text(str(site.key))
        finally:
            node.stop()
        if node.last_line(_REFUSED):
            known = admitted.exists() and admitted.read_text() == str(site.key)
            refused_at = refused_at or time.monotonic()
            if not known or time.monotonic() - refused_at > STILL_ONLINE_S:
                raise InputError(
                    f"refused: {site.server} does not know this site's key: the server's people need "
                    f"{site.settings.name}.pub in certs/sites and {site.settings.name} in server.toml"
                )
            say("not admitted: the server counts a site as connected for a while after a crash, or its key was removed")
            time.sleep(5)
            continue
        _check_end(node, site)
        say(f"the SuperNode ended (code {node.code}; see {node.log}): starting it again")
        time.sleep(2)


def _check_end(node: Child, site: SiteService) -> None:
    """Raises an error if starting the SuperNode again is useless."""
    if node.last_line("CERTIFICATE_VERIFY_FAILED"):
        raise InputError(f"refused: {site.ca} does not vouch for the certificate of {site.server}")
    if node.last_line(r"\[code: 2001\]"):
        raise InputError(f"refused: {site.server} admits sites with keys only: leave out --insecure")
    if node.code == 78:
        raise RunError(marked(node.last_line("guarded") or "") or f"flwr does not fit: see {node.log}")


def _wait_for_server(site: SiteService, say: Say) -> None:
    waiting = False
    while True:
        try:
            probe(site.server, site.ca)
            return
        except NoAnswer as why:
            if not waiting:
                say(f"no server at {site.server} yet ({why}): waiting for it")
            waiting = True
            time.sleep(2)


def _start_node(site: SiteService, say: Say) -> Child:
    words = ["--superlink", str(site.server), "--host", "127.0.0.1", "--port", str(free_port())]
    if site.ca is None or site.key is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(site.ca), "--auth-supernode-private-key", str(site.key)]
    return _start("supernode", words, site.log, _LogSummary(site, say), PERADA_FLOWER_SITE=str(site.site_toml))


class _LogSummary:
    """Shows the user what matters in a SuperNode's log."""

    def __init__(self, site: SiteService, say: Say) -> None:
        self.site, self.say, self.error = site, say, ""

    def __call__(self, line: str) -> None:
        if (text := marked(line)) is not None:
            self.say(text)
        elif "SuperNode ID" in line:
            self.say(f"connected to {self.site.server}")
        elif match := re.match(r"site \S+: ((?:round|after|before) .*)", line):
            self.say(match[1])
        elif match := re.match(r"site \S+: (error: .*)", line):
            if match[1] != self.error:  # the server asks again every few seconds
                self.error = match[1]
                self.say(self.error)
        elif re.search(r"ERROR\s*:", line) or "raised an exception" in line:
            self.say(f"error in {self.site.log}: {line.split(':', 1)[-1].strip()}")
