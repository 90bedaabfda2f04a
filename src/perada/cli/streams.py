"""Standard output and standard error of the command: full, closed, or read by a process that has gone."""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class OutputLost(OSError):
    """Standard output or standard error cannot be written: no other file."""


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error


def exit_code(command: Callable[[], int]) -> int:
    """Returns the exit code of a command: 1 if its output is lost, after one line that says why."""
    _open()
    try:
        code = command()
        sys.stdout.flush()
    except OutputLost as error:
        code = 1
        if error.errno != errno.EPIPE:  # then the reader has what it wanted, as in `perada methods | head -1`
            with suppress(OSError):
                print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would print a second error when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _open() -> None:
    """Replaces the standard streams by ones that tell their errors from those of other files.

    Closed standard output becomes a file that cannot be written, and closed standard error one that forgets. Else the
    next file that is opened would take its number.
    """
    if os.name != "posix":
        return
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if old is getattr(sys, f"__{name}__"):  # None if it was closed
            raw = _Output(number, "w", closefd=False)
            lines, encoding = name == "stderr" or raw.isatty(), old.encoding if old else "utf-8"
            new = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=lines)
            setattr(sys, name, new)
