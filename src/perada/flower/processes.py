"""Other programs as children that never outlive us: started, watched line by line, stopped with all they started."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..errors import InputError
from .wrapped import MARK

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")
_PR_SET_CHILD_SUBREAPER = 36
_NOT_OURS = ("FLWR_", "PERADA_FLOWER_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FORWARDED_ALLOW_IPS")
GRACE = 10.0  # seconds to stop in peace
LATE = 30.0  # seconds that a site works on after the server has stopped waiting
LONGEST = 1e7  # seconds that a timer takes


class Stop(Exception):
    """SIGTERM or SIGINT: put things in order and end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def code(self) -> int:
        """130 for Ctrl-C; a service that is told to stop and does is no failure."""
        return 130 if self.number == signal.SIGINT else 0


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT raises `Stop`; further ones are passed over while things are put in order.

    Processes whose parent ends become ours, so that none can get away.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stop(number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Ours, less what could send Flower to another place or by another way (a proxy between Flower's own processes on
    this machine would break them); its programs are beside our Python."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(_NOT_OURS)}
    beside = str(Path(sys.executable).parent)
    return {
        **kept,
        "PATH": f"{beside}{os.pathsep}{kept.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def program(name: str) -> str:
    """Where one of Flower's programs is: beside our Python, or on the PATH."""
    found = shutil.which(name, path=environment(Path())["PATH"])
    if found is None:
        raise InputError(f"Flower's program {name} is not found: is the folder that pip put it in on your PATH?")
    return found


class Child:
    """A running program; what it prints goes to a log file, and line by line to `on_line`."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], log: Path, on_line: Callable[[str], None], cwd: Path
    ) -> None:
        self.tail: deque[str] = deque(maxlen=60)
        self.on_line = on_line
        self.log = log
        self.process = subprocess.Popen(
            words,
            env={**env, "PERADA_FLOWER_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a", encoding="utf8") as f:
            for raw in self.process.stdout:
                line = _ANSI.sub("", raw.decode("utf8", "replace")).rstrip()
                f.write(line + "\n")
                f.flush()
                if line.strip():
                    self.tail.append(line)
                    self.on_line(line)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def said(self, pattern: str) -> str | None:
        """The last line so far that matches, None where none does."""
        return next((line for line in reversed(self.tail) if re.search(pattern, line)), None)

    def stop(self) -> None:
        """Ask, wait, insist; then the same with everything that it left behind."""
        end = time.monotonic() + GRACE
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        sweep(end)
        self.reader.join(2)
        if self.process.stdout is not None and not self.reader.is_alive():
            self.process.stdout.close()


def sweep(until: float = 0.0) -> None:
    """End all processes below us: in peace until the given moment (of time.monotonic), then not."""
    asked: set[int] = set()
    while left := descendants(os.getpid()):
        late = time.monotonic() > until
        for pid in left if late else left - asked:
            _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        _reap()
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """All living processes below one, by /proc; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended just now
        if state not in "ZX":
            parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while more := {p for p, parent in parents.items() if (parent == pid or parent in found) and p not in found}:
        found |= more
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    """Let go of what was reparented to us and ended; our own children are Popen's to wait for."""
    for entry in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            pids = [int(word) for word in entry.read_text().split()]
        except OSError:
            continue
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def marked(line: str) -> str | None:
    """The words of a line that is meant for people (`wrapped.say`)."""
    return line.partition(MARK)[2] if line.startswith(MARK) else None
