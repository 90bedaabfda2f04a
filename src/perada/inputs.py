"""What every room checks about input: that a path is a plain file, how much there is, and that it can be printed."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from .errors import InputError

CLASSES = 100_000  # or labels, of a data set
SITES = 100_000
NAME = 255  # characters of a name of a site, class or label; file systems have the same bound
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def user_path(text: str | Path) -> Path:
    """Returns a path that a person wrote, with `~` as their home; refuses what can name no file."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (RuntimeError, ValueError) as error:  # no such user; a zero byte
        raise InputError(f"{str(text)!r} is not a path: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{str(text)[:NAME]!r}… is not a path: it is too long") from error
    return path


def plain_file(path: Path, most: int | None = None) -> Path:
    """Returns the path if it is a regular file of at most `most` bytes, or if nothing is there; else refuses it.

    To open a pipe may wait for ever, and a device such as /dev/zero never ends. A missing file is for the reader to
    refuse, who knows what it is for.
    """
    try:
        problem = _problem(path.stat(), most)
    except OSError:  # the reader gets the same error
        return path
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not the name of a file") from error
    if problem:
        raise InputError(f"cannot read {path}: {problem}")
    return path


@contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[BufferedReader]:
    """Opens what `plain_file` returns, to read it; anything else is an OSError, also if it was put there just now."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if problem := _problem(os.fstat(handle), most):
            raise OSError(errno.EINVAL, problem, str(path))
    except OSError:
        os.close(handle)
        raise
    with open(handle, "rb") as file:
        yield file


def _problem(status: os.stat_result, most: int | None) -> str:
    """Returns why something is not a regular file of at most `most` bytes; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file"
    if most is not None and status.st_size > most:
        return f"it has {status.st_size:,} bytes, and the most is {most:,}"
    return ""


def printable(text: str) -> str:
    """Returns a text on one line without control characters: each is written as Python does, such as `\\x1b`.

    Names come from files and folders. An escape sequence in one could rewrite the terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str | None) -> str:
    """Returns words from outside as one short, printable line for a log."""
    return printable(" ".join((text or "")[:1000].split()))[:200]
