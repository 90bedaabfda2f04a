"""Flower's own SuperLink and SuperNode with a few things added that Flower 1.41 leaves open:

    python -P wrapped.py superlink ARGUMENTS    as `flower-superlink ARGUMENTS`
    python -P wrapped.py supernode ARGUMENTS    as `flower-supernode ARGUMENTS`

- One port serves everything: the sites' messages and the commands that start a run or let in a key, which nobody has to
  sign for. So commands are taken from this machine alone (`LocalOnly`); other machines get the sites' part.
- A site would run any code that the server sends it, and the server any code that somebody on its machine hands to it.
  Here both take an app that is a pyproject.toml and names PerAda's own two components, nothing else (`is_ours`): what
  runs at a site is what its people installed there.
- A node looks for messages every 3 seconds, says every 30 that it lives, and waits up to 20 before it tries a server
  again that was away; here all that is quicker, so that rounds are short and those that died are soon back.

Both end with the process that started them, and what they say of note goes out as lines that begin with `MARK`. Run as
a file so that neither of the two, which never compute, loads torch.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import ipaddress
import os
import signal
import sys
import time
import tomllib
import zipfile
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

MARK = "perada: "
FLEET = "/v1/fleet/"
COMPONENTS = {"serverapp": "perada.flower.app:server_app", "clientapp": "perada.flower.app:client_app"}
FILES = {"pyproject.toml", ".info/CONTENT", "README.md"}
LARGEST = 1_000_000  # bytes of an app's pyproject.toml
POLL = 0.5  # seconds between two looks for messages, while there are some,
BUSY = 120.0  # and this many seconds after the last; then Flower's own 3
RETRY = 5  # seconds at most until the next try to reach a server that is away
HEARTBEAT = 10  # seconds between two signs of life; the least that a SuperLink takes, which waits for two
_PR_SET_PDEATHSIG = 1

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def say(text: str) -> None:
    """A line for whoever started us."""
    print(MARK + text, flush=True)


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine: from loopback, or from the very address it is sent to."""
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

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app, self.ready = app, False

    def _open(self) -> bool:
        """Whether the keys are registered ($PERADA_FLOWER_READY is there): a site that came before would be refused."""
        self.ready = self.ready or os.path.exists(os.environ.get("PERADA_FLOWER_READY", "/"))
        return self.ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path = str(scope.get("path", ""))
        if not path.startswith(FLEET) and not is_local(scope):
            say(f"refused {path} from {_from(scope)}: commands are taken from this machine only")
            if scope["type"] == "http":
                await _answer(send, 403, b"commands are taken from the server itself only\n")
            return  # a websocket is closed by saying nothing
        if path.startswith(FLEET) and not self._open():
            await _answer(send, 503, b"the server is starting\n")
            return
        if path.startswith(FLEET) and path.endswith(("/activate-node", "/deactivate-node", "/register-node")):
            await self.app(scope, receive, _noted(send, scope, path.rsplit("/", 1)[1]))
            return
        await self.app(scope, receive, send)


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def _from(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "nowhere"


def _noted(send: Send, scope: Scope, what: str) -> Send:
    """Tell who comes, goes and is turned away."""
    good = {"activate-node": "a site connected from", "deactivate-node": "a site left from"}

    async def tell(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status = int(message["status"])
            if status >= 400:
                say(f"refused a site from {_from(scope)}: its key is not registered, or that site is connected already")
            elif what in good:
                say(f"{good[what]} {_from(scope)}")
        await send(message)

    return tell


def is_ours(fab: bytes) -> str | None:
    """None for an app without code that names PerAda's own components; else what is wrong with it."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as held:
            names = held.namelist()
            strange = sorted(set(names) - FILES)
            if strange or len(names) != len(set(names)):
                return f"it holds {strange[0] if strange else 'a file twice'}"
            if held.getinfo("pyproject.toml").file_size > LARGEST:
                return "its pyproject.toml is too large"
            project = tomllib.loads(held.read("pyproject.toml").decode())
        if project.get("project", {}).get("dependencies"):
            return "it asks for packages"
        found = project.get("tool", {}).get("flwr", {}).get("app", {}).get("components")
    except (zipfile.BadZipFile, KeyError, ValueError, AttributeError, NotImplementedError, RuntimeError, OSError):
        return "it cannot be read"
    return None if found == COMPONENTS else f"its components are {found}"


def guard_link() -> None:
    """Put `LocalOnly` before everything else that SuperLink does with a request."""
    from starlette.middleware import Middleware

    hooks = importlib.import_module("flwr.superlink.extensions")
    main = importlib.import_module("flwr.superlink.main")
    before = hooks.get_middleware
    if not callable(before) or getattr(main, "extensions", None) is not hooks:
        raise ImportError("flwr.superlink.main does not ask flwr.superlink.extensions for its middleware")
    hooks.get_middleware = lambda: (Middleware(LocalOnly), *before())


def guard_apps() -> None:
    """Have SuperLink start apps that pass `is_ours` and no others: in whatever way an app came (sent, stored before),
    its configuration is read by `get_fab_config` before it is started. Flower's hub is not asked at all."""
    handlers: Any = importlib.import_module("flwr.superlink.servicer.control.control_handlers")
    errors = importlib.import_module("flwr.supercore.error")
    read = handlers.get_fab_config
    started = handlers.start_run.__code__.co_names
    if not {"get_fab_config", "_get_remote_fab"} <= set(started) or not callable(handlers._get_remote_fab):
        raise ImportError("flwr.superlink.servicer.control.control_handlers has changed")

    def checked(fab: bytes) -> Any:
        wrong = is_ours(fab)
        if wrong:
            say(f"refused to start an app: {wrong}; this server runs PerAda's own and nothing else")
            raise ValueError(f"not PerAda's own app: {wrong}")
        return read(fab)

    def remote(*words: object) -> Any:
        say("refused to fetch an app from Flower's hub")
        raise errors.FlowerError(errors.ApiErrorCode.FAB_DOWNLOAD_FAILURE, "apps are not fetched from elsewhere")

    handlers.get_fab_config, handlers._get_remote_fab = checked, remote


def guard_node(poll: float) -> None:
    """Have SuperNode verify apps by `is_ours`, as it would by somebody's signature, and look for work more often."""
    node: Any = importlib.import_module("flwr.supernode.start_client_internal")
    pull, _ = node._pull_and_store_message, node._verify_fab
    last = [time.monotonic()]  # when a message came
    if not {"get_fab", "trusted_entities"} <= set(pull.__code__.co_varnames[: pull.__code__.co_argcount]):
        raise ImportError("flwr.supernode.start_client_internal has changed")

    def guarded(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def fetch(digest: str, run: int) -> Any:
            fab = get_fab(digest, run)
            fab.verifications = {"valid_license": "perada"}  # what SuperNode asks for before it asks `_verify_fab`
            return fab

        found = pull(get_fab=fetch, **{**rest, "trusted_entities": {"perada": "its own app only"}})
        if found is not None:
            last[0] = time.monotonic()
        return found

    def sleep(seconds: float) -> None:
        busy = time.monotonic() - last[0] < BUSY
        time.sleep(min(seconds, poll) if busy else seconds)

    def verify(fab: Any, entities: object) -> bool:
        wrong = is_ours(fab.content)
        if wrong:
            say(f"refused an app that the server sent: {wrong}; this site runs PerAda's own and nothing else")
        return wrong is None

    node._pull_and_store_message, node._verify_fab = guarded, verify
    node.time = SimpleNamespace(sleep=sleep, time=time.time)
    for where, name, value in (
        ("flwr.supernode.fleet_http_connection", "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT),
        ("flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT),
        ("flwr.supercore.retry.http_retry", "MAX_RETRY_DELAY", RETRY),
    ):
        module = importlib.import_module(where)
        if not isinstance(getattr(module, name), int):
            raise ImportError(f"{where} has changed")
        setattr(module, name, value)
    _hurry(importlib.import_module("flwr.supercore.heartbeat"))


def _hurry(heartbeat: Any) -> None:
    """Signs of life again RETRY seconds after the server is: up to 20 would pass, in which the site counts as away."""
    delays = heartbeat.exponential
    if "max_delay" not in delays.__code__.co_varnames[: delays.__code__.co_argcount]:
        raise ImportError("flwr.supercore.heartbeat has changed")
    heartbeat.exponential = lambda max_delay: delays(max_delay=min(RETRY, max_delay))


def die_with_parent() -> None:
    """SIGTERM when the process that started us ends in whatever way, where Linux can do that."""
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
            guard_node(POLL)
            entry = importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode
    except (ImportError, AttributeError) as error:
        say(f"this version of flwr cannot be guarded ({error}): install 'flwr>=1.41,<1.42'")
        sys.exit(78)
    sys.argv = [f"flower-{which}", *rest]
    entry()


if __name__ == "__main__":
    main(sys.argv[1:])
