"""A ClientApp that need not start cold. Flower starts a process for every message, and most of a short message's time
goes into loading torch. Here one process at a site loads it once and forks for every message:

    python -m perada.flower.warm SOCKET      beside the SuperNode, started by `perada flower site`
    flwr-clientapp ARGUMENTS                 found first on the SuperNode's PATH: `ask.py`, which has the warm process
                                             fork, and runs Flower's own program where there is none

What is forked has loaded code and nothing else: no data, no model, no thread. It ends with its work, or a while after
the server has stopped waiting for it (`limited`): Flower would wait for one that hangs without an end, and the site
would be out for good.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
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
from .processes import program
from .wrapped import die_with_parent, say

ASK = Path(__file__).with_name("ask.py")


def stub(folder: Path) -> Path:
    """A folder for the PATH with a `flwr-clientapp` that asks the warm process."""
    folder.mkdir(parents=True, exist_ok=True)
    real = program("flwr-clientapp")
    script = folder / "flwr-clientapp"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{ASK}" "{real}" "$@"\n')
    script.chmod(0o755)
    return folder


def main(path: Path) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: _leave(path))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started us
    from flwr.supernode.cli import flwr_clientapp

    from .messages import Refused, read_about

    app: Any = importlib.import_module("perada.flower.app")
    handle = app.handle

    def in_time(site: Any, content: Any) -> Any:
        within = 0.0
        with suppress(Refused):  # `handle` says so itself
            within = read_about(content).within
        with limited(within):
            return handle(site, content)

    app.handle = in_time
    gc.freeze()  # what is loaded stays shared with the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        _serve(listener, flwr_clientapp)


class TooLate(Exception):
    """Nobody waits for this work any more."""


@contextmanager
def limited(within: float) -> Iterator[None]:
    """Break the work off where it goes on long after the server has stopped waiting; 0 is no limit.

    First by an exception, so that the SuperNode gets an answer and can go on at once. Where none of our code runs any
    more, this process is ended a little later (SIGALRM takes none), which the SuperNode finds out within a minute.
    """
    if within <= 0:
        yield
        return
    late = min(within + processes.LATE, processes.LONGEST)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, late + processes.GRACE)  # stays until the process has ended
    signal.signal(signal.SIGUSR1, _break_off)
    timer = threading.Timer(late, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _break_off(number: int, frame: FrameType | None) -> None:
    say("gave up on a message that the server had long stopped waiting for")
    raise TooLate("the server has long stopped waiting")


def _leave(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
    os._exit(0)


def _serve(listener: socket.socket, entry: Callable[[], None]) -> None:
    """Fork for whoever asks; tell the child's number at once and its exit code when it ends."""
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ears:
        ears.register(listener, selectors.EVENT_READ)
        while True:
            if ears.select(0.05):
                caller, _ = listener.accept()
                words = _hear(caller)
                if words is None:
                    caller.close()
                    continue
                child = os.fork()
                if child == 0:
                    ears.close()
                    listener.close()
                    for other in (caller, *running.values()):
                        other.close()
                    _work(entry, words)
                _tell(caller, child)
                running[child] = caller
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    if code == -signal.SIGALRM:
                        say("ended a ClientApp that hung: this site can go on in a minute at most")
                    _tell(caller := running.pop(child), code)
                    caller.close()


def _hear(caller: socket.socket) -> list[str] | None:
    caller.settimeout(5)
    try:
        with caller.makefile("r", encoding="utf8") as f:
            return [str(word) for word in json.loads(f.readline())]
    except (OSError, ValueError):
        return None


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # it may not wait any more
        caller.sendall(f"{number}\n".encode())


def _work(entry: Callable[[], None], words: list[str]) -> None:
    """In the child: be `flwr-clientapp WORDS`."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    code = 1
    try:
        os.environ["PERADA_FLOWER_PARENT"] = "0"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        die_with_parent()
        sys.argv = ["flwr-clientapp", *words]
        entry()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
