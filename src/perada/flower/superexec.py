"""Flower's SuperExec at a site, with torch loaded, so that it can fork a ClientApp per message.

Flower's own starts a process per message, and most of a short message's time goes into loading torch:

    python -P -m perada.flower.superexec ARGUMENTS    as `flower-superexec ARGUMENTS`; `guards` has the SuperNode run it

This process holds code only: no data and no model. A forked ClientApp ends with its work, or some time after the server
has stopped waiting for it (`limited`). Flower would wait for a hanging one forever, and the site would take part no
more.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any

from . import processes
from .guards import die_with_parent, say

MAX_TIMER_S = 1e7


def main() -> None:
    os.environ["PERADA_FLOWER_PARENT"] = "0"  # the SuperNode started us, and not `perada flower site`
    die_with_parent()
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supernode.cli import flwr_clientapp

    from ..server.checks import Refused
    from .messages import read_request

    app: Any = importlib.import_module("perada.flower.app")
    executor: Any = subprocess_executor
    handle = app.handle

    def handle_in_time(site: Any, content: Any) -> Any:
        within = 0.0
        with suppress(Refused):  # `handle` refuses it, too
            within = read_request(content).within
        with limited(within):
            return handle(site, content)

    def start(words: Sequence[str], **streams: Any) -> None:
        if words[0] == "flwr-clientapp":
            fork(flwr_clientapp, words)
        else:
            subprocess.Popen(words, **streams)

    app.handle = handle_in_time
    executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    executor.SubprocessExecutor.reconcile = lambda self: reap()  # SuperExec calls it several times a second
    gc.freeze()  # the children share the memory of everything loaded so far
    flower_superexec()


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


def fork(entry: Callable[[], None], words: Sequence[str]) -> int:
    """Runs a program's entry point with these words in a forked process; returns the process's number."""
    if child := os.fork():
        return child

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        die_with_parent()
        sys.argv = list(words)
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


def reap() -> None:
    """Takes note of forked processes that have ended."""
    for code in processes.reaped():
        if code == -signal.SIGALRM:
            say("ended a ClientApp that hung: this site can take part again within a minute")


if __name__ == "__main__":
    main()
