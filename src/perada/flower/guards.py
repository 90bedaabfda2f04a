"""Flower's own SuperLink and SuperNode, with what Flower 1.41 leaves open:

    python -P guards.py superlink ARGUMENTS    as `flower-superlink ARGUMENTS`
    python -P guards.py supernode ARGUMENTS    as `flower-supernode ARGUMENTS`

- One port serves both the sites' messages and the commands (start a run, register a key), which need no signature. So
  commands are accepted from this machine only (`LocalOnly`).
- A site would run any code that the server sends, and the server any app that a local user gives it. Here both accept
  only an app without code that names PerAda's own two components (`problem_of`).
- A request's body may have any size, and all of it is read. Here it is bounded.
- A node looks for messages every 3 seconds, sends a heartbeat every 30, and waits up to 20 before it tries a lost
  server again. Here all of that is faster, so that rounds are short and sites are back soon.
- A node starts a process per message, which loads torch each time. Here `superexec` forks one.

Both processes end with the process that started them. Lines for the user begin with `MARK`. This file is run by path,
so that these two processes, which never compute, do not load torch.
"""

import ctypes
import importlib
import io
import ipaddress
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MARK = "perada: "
FLEET = "/v1/fleet/"
COMPONENTS = {"serverapp": "perada.flower.app:server_app", "clientapp": "perada.flower.app:client_app"}
OBJECT, REQUEST = 8_000_000, 1_000_000  # bytes: a part of an array (Flower's are 5 MiB), and any other request
FILES = {"pyproject.toml", ".info/CONTENT", "README.md"}
MAX_BYTES = 1_000_000  # of an app's pyproject.toml
POLL = 0.5  # seconds between two looks for messages while messages come,
BUSY = 120.0  # and for this many seconds after the last one; then Flower's own 3 seconds
RETRY = 5  # seconds at most between two tries to reach a lost server
HEARTBEAT = 10  # seconds between two heartbeats: the least that a SuperLink allows, which waits for two
_PR_SET_PDEATHSIG = 1


def say(text: str) -> None:
    """Prints a line for the user; the process that started us shows it. A stranger may have chosen its words."""
    print(MARK + "".join(c if c.isprintable() else " " for c in text), flush=True)


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine: from loopback, or from the address that it was sent to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(str(client[0]).split("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or bool(server and str(server[0]) == str(client[0]))


class LocalOnly:
    """ASGI middleware: other machines reach the sites' part of the SuperLink and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.ready = app, False

    def _keys_registered(self) -> bool:
        """Whether $PERADA_FLOWER_READY exists. Before that a site would be refused as a stranger."""
        self.ready = self.ready or os.path.exists(os.environ.get("PERADA_FLOWER_READY", "/"))
        return self.ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        if scope["type"] != "lifespan" and not path.startswith(FLEET) and not is_local(scope):
            say(f"refused {path} from {_sender(scope)}: commands are accepted from this machine only")
            if scope["type"] == "http":
                await _answer(send, 403, b"commands are accepted from the server itself only\n")
            return  # no answer closes a websocket
        if path.startswith(FLEET):
            if not self._keys_registered():
                await _answer(send, 503, b"the server is starting\n")
                return
            if not _small(scope):
                say(f"refused {path} from {_sender(scope)}: its body is too large, or does not say how large it is")
                await _answer(send, 413, b"too large\n")
                return
            if path.endswith(("/activate-node", "/deactivate-node", "/register-node")):
                send = _reporting(send, scope, path.rsplit("/", 1)[1])
        await self.app(scope, receive, send)


def _small(scope: Scope) -> bool:
    """Whether a site's request says that its body fits. Flower would read any body, before it asks who sent it."""
    headers = dict(scope.get("headers", ()))
    length = headers.get(b"content-length", b"0")
    most = OBJECT if str(scope["path"]).endswith("/push-object") else REQUEST
    return b"transfer-encoding" not in headers and length.isdigit() and len(length) < 20 and int(length) <= most


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def _sender(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "nowhere"


def _reporting(send: Send, scope: Scope, request: str) -> Send:
    """Wraps `send`: tells the user which sites connect, leave and are refused."""
    good = {"activate-node": "connected from", "deactivate-node": "left from"}

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            if int(message["status"]) >= 400:
                why = "its key is not registered, or the site is already connected"
                say(f"refused a site from {_sender(scope)}: {why}")
            elif request in good:
                say(f"{_site(scope)} {good[request]} {_sender(scope)}")
        await send(message)

    return tell


def _site(scope: Scope) -> str:
    """Returns whose key a request was signed with, by the .pub files in $PERADA_FLOWER_KEYS: `site north`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    key = dict(scope.get("headers", ())).get(b"flwr-public-key", b"")
    for file in sorted(Path(os.environ.get("PERADA_FLOWER_KEYS") or "/nowhere").glob("*.pub")):
        try:
            known = load_ssh_public_key(file.read_bytes())
            if b64encode(known.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)) == key:
                return f"site {file.stem}"
        except (OSError, ValueError, UnsupportedAlgorithm):
            continue
    return "a site"


def problem_of(fab: bytes) -> str | None:
    """Returns what is wrong with an app; None if it has no code and names PerAda's own components."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            names = archive.namelist()
            extra = sorted(set(names) - FILES)
            if extra or len(names) != len(set(names)):
                return f"it holds {extra[0] if extra else 'a file twice'}"
            if archive.getinfo("pyproject.toml").file_size > MAX_BYTES:
                return "its pyproject.toml is too large"
            project = tomllib.loads(archive.read("pyproject.toml").decode())
        if project.get("project", {}).get("dependencies"):
            return "it asks for packages"
        components = project.get("tool", {}).get("flwr", {}).get("app", {}).get("components")
    except (zipfile.BadZipFile, KeyError, ValueError, AttributeError, NotImplementedError, RuntimeError, OSError):
        return "it cannot be read"
    return None if components == COMPONENTS else f"its components are {components}"


def _require(intact: bool, module: str) -> None:
    if not intact:
        raise ImportError(f"{module} has changed")


def guard_link() -> None:
    """Makes `LocalOnly` the first middleware of the SuperLink."""
    from starlette.middleware import Middleware

    hooks: Any = importlib.import_module("flwr.superlink.extensions")
    main = importlib.import_module("flwr.superlink.main")
    before = hooks.get_middleware
    _require(callable(before) and getattr(main, "extensions", None) is hooks, "flwr.superlink.main")
    hooks.get_middleware = lambda: (Middleware(LocalOnly), *before())


def guard_apps() -> None:
    """Makes the SuperLink start only apps without a `problem_of`.

    `get_fab_config` reads the configuration of every app before it starts, wherever the app came from. Flower's hub is
    never asked.
    """
    handlers: Any = importlib.import_module("flwr.superlink.servicer.control.control_handlers")
    errors = importlib.import_module("flwr.supercore.error")
    read = handlers.get_fab_config
    names = set(handlers.start_run.__code__.co_names)
    _require({"get_fab_config", "_get_remote_fab"} <= names and callable(handlers._get_remote_fab), handlers.__name__)

    def checked(fab: bytes) -> Any:
        if problem := problem_of(fab):
            say(f"refused to start an app: {problem}; this server runs PerAda's own and nothing else")
            raise ValueError(f"not PerAda's own app: {problem}")
        return read(fab)

    def remote(*words: object) -> Any:
        say("refused to fetch an app from Flower's hub")
        raise errors.FlowerError(errors.ApiErrorCode.FAB_DOWNLOAD_FAILURE, "apps are not fetched from the hub")

    handlers.get_fab_config, handlers._get_remote_fab = checked, remote


def guard_node() -> None:
    """Makes the SuperNode check apps by `problem_of`, as it would check a signature, and poll more often."""
    node: Any = importlib.import_module("flwr.supernode.start_client_internal")
    pull, _ = node._pull_and_store_message, node._verify_fab
    last = [time.monotonic()]  # when a message came
    _require({"get_fab", "trusted_entities"} <= _arguments(pull), node.__name__)

    def guarded(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def fetch(digest: str, run: int) -> Any:
            fab = get_fab(digest, run)
            fab.verifications = {"valid_license": "perada"}  # the SuperNode wants this before it asks `_verify_fab`
            return fab

        message = pull(get_fab=fetch, **{**rest, "trusted_entities": {"perada": "its own app only"}})
        if message is not None:
            last[0] = time.monotonic()
        return message

    def sleep(seconds: float) -> None:
        busy = time.monotonic() - last[0] < BUSY
        time.sleep(min(seconds, POLL) if busy else seconds)

    def verify(fab: Any, entities: object) -> bool:
        problem = problem_of(fab.content)
        if problem:
            say(f"refused an app that the server sent: {problem}; this site runs PerAda's own and nothing else")
        return problem is None

    def start(words: list[str]) -> Any:
        ours = [sys.executable, "-P", "-m", "perada.flower.superexec"]  # forks ClientApps
        return subprocess.Popen([*ours, *words[1:]] if words[0] == "flower-superexec" else words)

    _require(node.subprocess is subprocess and node.time is time, node.__name__)
    node._pull_and_store_message, node._verify_fab = guarded, verify
    node.time, node.subprocess = SimpleNamespace(sleep=sleep, time=time.time), SimpleNamespace(Popen=start)
    _shorten_waits()


def _shorten_waits() -> None:
    for where, name, value in (
        ("flwr.supernode.fleet_http_connection", "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT),
        ("flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT),
        ("flwr.supercore.retry.http_retry", "MAX_RETRY_DELAY", RETRY),
    ):
        module = importlib.import_module(where)
        _require(isinstance(getattr(module, name), int), where)
        setattr(module, name, value)
    heartbeat: Any = importlib.import_module("flwr.supercore.heartbeat")
    delays = heartbeat.exponential  # up to 20 seconds between two heartbeats that failed: the site counts as away
    _require("max_delay" in _arguments(delays), heartbeat.__name__)
    heartbeat.exponential = lambda max_delay: delays(max_delay=min(RETRY, max_delay))


def _arguments(function: Any) -> set[str]:
    return set(function.__code__.co_varnames[: function.__code__.co_argcount])


def die_with_parent() -> None:
    """On Linux: has the kernel send us SIGTERM when the process that started us ends."""
    if sys.platform != "linux":
        return
    parent = int(os.environ.get("PERADA_FLOWER_PARENT", "0"))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent and os.getppid() != parent:  # it ended before we could ask
        sys.exit(1)


def main(words: list[str]) -> None:
    which, *rest = words
    die_with_parent()
    try:
        if which == "superlink":
            guard_link()
            guard_apps()
            entry = importlib.import_module("flwr.superlink.cli.flower_superlink").flower_superlink
        else:
            guard_node()
            entry = importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode
    except (ImportError, AttributeError) as error:
        say(f"this version of flwr cannot be guarded ({error}): install 'flwr>=1.41,<1.42'")
        sys.exit(78)
    sys.argv = [f"flower-{which}", *rest]
    entry()


if __name__ == "__main__":
    main(sys.argv[1:])
