"""A process at a site that has torch loaded and forks a ClientApp per message.

Flower starts a process per message, and most of a short message's time goes into loading torch. So:

    python -m perada.flower.fork_server SOCKET   started by `perada flower site` together with the SuperNode
    flwr-clientapp ARGUMENTS                     `fork_client.py`, first on the SuperNode's PATH: asks for a fork

The fork server holds code only: no data, no model, no thread. A forked process ends with its work, or some time after
the server has stopped waiting for it (`limited`). Flower would wait for a hanging one forever, and the site would take
part no more.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from . import processes
from .guards import die_with_parent, say
from .processes import program

CLIENT = Path(__file__).with_name("fork_client.py")
MAX_TIMER_S = 1e7


def install_client(folder: Path) -> Path:
    """Writes a `flwr-clientapp` that asks the fork server; returns the folder, for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    real = program("flwr-clientapp")
    script = folder / "flwr-clientapp"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{CLIENT}" "{real}" "$@"\n')
    script.chmod(0o755)
    return folder


def main(path: Path) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `perada flower site` handles Ctrl-C
    from flwr.supernode.cli import flwr_clientapp

    from .messages import Refused, read_about

    app: Any = importlib.import_module("perada.flower.app")
    handle = app.handle

    def handle_in_time(site: Any, content: Any) -> Any:
        within = 0.0
        with suppress(Refused):  # `handle` refuses it, too
            within = read_about(content).within
        with limited(within):
            return handle(site, content)

    app.handle = handle_in_time
    gc.freeze()  # the children share the memory of everything loaded so far
    os.chdir(path.parent)  # the path of a socket must be short
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
        listener.listen()
        serve(listener, flwr_clientapp)


class TooLate(Exception):
    """The server has stopped waiting for this work."""


@contextmanager
def limited(within: float) -> Iterator[None]:
    """Ends work that continues long after the server has stopped waiting; 0 means no limit.

    First it raises TooLate, so that the SuperNode gets an answer at once. If the work hangs outside of Python, SIGALRM
    kills this process a little later, which the SuperNode notices within a minute.
    """
    if within <= 0:
        yield
        return
    late = min(within + processes.LATE, MAX_TIMER_S)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, late + processes.GRACE)  # runs until the process has ended
    signal.signal(signal.SIGUSR1, _raise_too_late)
    timer = threading.Timer(late, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _raise_too_late(number: int, frame: FrameType | None) -> None:
    say("gave up on a message: the server stopped waiting for it long ago")
    raise TooLate("the server stopped waiting long ago")


def serve(listener: socket.socket, entry: Callable[[], None]) -> None:
    """Forks a process per connection. It gets the words of `flwr-clientapp` and sends its number and its exit code."""
    listener.settimeout(0.05)
    while True:
        with suppress(TimeoutError):
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _work(entry, caller)
            caller.close()
        with suppress(ChildProcessError):  # there are no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if os.waitstatus_to_exitcode(ended[1]) == -signal.SIGALRM:
                    say("ended a ClientApp that hung: this site can take part again within a minute")


def _work(entry: Callable[[], None], caller: socket.socket) -> None:
    """Runs `flwr-clientapp` with the caller's words in this (forked) process, and ends it."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    code = 1
    try:
        os.environ["PERADA_FLOWER_PARENT"] = "0"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        die_with_parent()
        caller.settimeout(5)
        with caller.makefile("r", encoding="utf8") as f:
            sys.argv = ["flwr-clientapp", *map(str, json.loads(f.readline()))]
        caller.sendall(f"{os.getpid()}\n".encode())
        entry()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):  # the caller may be gone
            caller.sendall(f"{code}\n".encode())
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
