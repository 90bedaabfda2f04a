"""Child processes that never outlive us: started, read line by line, stopped with everything they started."""

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
from .guards import MARK

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")
_PR_SET_CHILD_SUBREAPER = 36
_REMOVED = ("FLWR_", "PERADA_FLOWER_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FORWARDED_ALLOW_IPS")
GRACE = 10.0  # seconds that a process gets to stop by itself
LATE = 30.0  # seconds that a site may work on after the server has stopped waiting


class Stop(Exception):
    """SIGTERM or SIGINT came: clean up and end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.interrupted = number == signal.SIGINT


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT raises `Stop`; later ones are ignored during the cleanup.

    On Linux we adopt processes whose parent ends, so that `sweep` finds them.
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
    """Returns our environment for Flower's programs, without variables that redirect them.

    A proxy would break the connections between Flower's own processes. Flower's programs are in our Python's folder.
    """
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(_REMOVED)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def program(name: str) -> str:
    """Returns the path of one of Flower's programs."""
    path = shutil.which(name, path=environment(Path())["PATH"])
    if path is None:
        raise InputError(f"Flower's program {name} is not found: add the folder that pip installs programs in to PATH")
    return path


class Child:
    """A running program. Its output goes to a log file, and line by line to `on_line`."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], log: Path, on_line: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=60)
        self.on_line = on_line
        self.log = log
        self.process = subprocess.Popen(
            words,
            env={**env, "PERADA_FLOWER_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,  # Ctrl-C reaches us only, and we stop the child
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

    def last_line(self, pattern: str) -> str | None:
        """Returns the last line so far that matches, or None."""
        return next((line for line in reversed(self.tail) if re.search(pattern, line)), None)

    def stop(self) -> None:
        """Stops the program: SIGTERM, then SIGKILL after `GRACE`. Then stops everything that it left behind."""
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
    """Ends all processes below us: with SIGTERM, and after `until` (of time.monotonic) with SIGKILL."""
    asked: set[int] = set()
    while left := descendants(os.getpid()):
        late = time.monotonic() > until
        for pid in left if late else left - asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        list(reaped())
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Returns all living processes below one, by /proc; none on a system without /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended just now
        if state not in "ZX":
            parents[int(entry.name)] = int(parent)
    below: set[int] = set()
    while more := {p for p, parent in parents.items() if (parent == pid or parent in below) and p not in below}:
        below |= more
    return below


def reaped() -> Iterator[int]:
    """Yields the exit code of every child, also an adopted one, that has ended; it is no zombie any more."""
    with suppress(ChildProcessError):  # there are no children
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield os.waitstatus_to_exitcode(ended[1])


def marked(line: str) -> str | None:
    """Returns the text of a line that `guards.say` printed for the user, or None."""
    return line.partition(MARK)[2] if line.startswith(MARK) else None
