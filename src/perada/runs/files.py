"""Reading and writing files so that a kill leaves the old content or the new, and a wrong file is one clear line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from ..errors import Damaged, InputError
from ..inputs import opened
from ..temporary import is_temporary, sweep, temporary_path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOOK_S = 0.5  # the most seconds for which `at_work` holds a lock
CHECKSUM = "checksum"  # the key of a JSON object's own checksum
LARGEST = 10**18  # a larger count is not one that was written
Kinds = Mapping[str, type | UnionType]  # of the values of a JSON object

# What is in a file


def jsonable(value: Any) -> Any:
    """Returns a value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: Any, kind: type | UnionType = int | float) -> bool:
    """Returns whether a value from a file is a number that can have been written: finite, and a count of any use."""
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    if isinstance(value, float):  # the loss of a training that goes wrong has any size
        return math.isfinite(value)
    return isinstance(value, int) and -LARGEST < value < LARGEST


def fits(value: Any, kinds: Kinds) -> bool:
    """Returns whether a value is an object with these keys, and values of these kinds."""
    return isinstance(value, dict) and all(
        k in value and isinstance(value[k], kind) and (kind is not int or is_number(value[k]))
        for k, kind in kinds.items()
    )


def _own_checksum(content: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in content.items() if k != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as text that holds a checksum of itself."""
    content = json.loads(json.dumps(jsonable(content)))  # keys that are numbers become text, as they will be read
    return json.dumps({**content, CHECKSUM: _own_checksum(content)}, indent=1).encode()


def is_whole(content: Mapping[str, Any]) -> bool:
    """Returns whether an object that `sealed` wrote has the checksum that it says."""
    return content.get(CHECKSUM) == _own_checksum(content)


# Reading


def read_file(path: Path) -> bytes:
    """Returns the bytes of a regular file."""
    with opened(path) as file:
        return file.read()


def digest_of(path: Path) -> str:
    """Returns the sha256 of a regular file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path, kinds: Kinds, advice: str) -> dict[str, Any]:
    """Returns a JSON object with values of these kinds. advice: what to do about a damaged file."""
    try:
        content: dict[str, Any] = json.loads(read_file(path).decode("utf8"))
    except (ValueError, RecursionError):  # not JSON, not text, or nested without end
        content = {}
    except OSError as error:
        raise Damaged(f"cannot read {path} ({error.strerror}): {advice}") from error
    if not fits(content, kinds):
        raise Damaged(f"{path} is damaged: {advice}")
    return content


def read_rows(path: Path, kinds: Kinds) -> list[dict[str, Any]]:
    """Returns the lines of a .jsonl file, none without a file; skips a last one that a kill cut off."""
    return rows_in(read_file(path), path, kinds) if path.is_file() else []


def damaged_line(path: Path, number: int, advice: str = "") -> Damaged:
    """Returns the error about a line of a file. advice: what to do about it; else to remove the line."""
    if advice:
        return Damaged(f"{path} is damaged in line {number}: {advice}")
    return Damaged(f"{path} is damaged: remove its line {number}")


def rows_in(data: bytes, path: Path, kinds: Kinds, advice: str = "") -> list[dict[str, Any]]:
    """Returns what `read_rows` does, of the file's bytes. advice: as in `damaged_line`."""
    lines = data.decode("utf8", "replace").splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if fits(row, kinds):
            rows.append(row)
        elif number < len(lines):
            raise damaged_line(path, number, advice)
    return rows


# Writing


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that a kill leaves the old one or the new one, never a part. The old one's mode is kept."""
    part = temporary_path(path)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with open(handle, "wb") as f:
            if hasattr(os, "fchmod") and path.is_file():
                os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
            f.write(data)
            f.flush()
            os.fsync(handle)
        os.replace(part, path)
    except Exception:
        part.unlink(missing_ok=True)
        raise


def write_output(path: Path, data: bytes, parents: bool = False) -> None:
    """Writes a file that the user named, with its `parents` if they may be missing; InputError if it cannot."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut, as fsync does for a file's bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replaced(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yields a temporary folder to fill, which then takes the place of `target` in one step."""
    sweep(target.parent, lambda name: is_temporary(name, target.name))  # idle ones: the folder may not be locked
    part, old = temporary_path(target), target.with_name(f".{target.name}.old")
    part.mkdir(parents=True, mode=mode)
    try:
        yield part
        sync_folder(part)
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(part, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


# Locks


@contextmanager
def locked(path: Path, wait: float | None = None, busy: Exception | None = None) -> Iterator[None]:
    """Lets one process at a time work in a folder.

    Waits `wait` seconds (by default as long as `at_work` may look), and then raises `busy`.
    """
    if fcntl is None:
        yield
        return
    handle, until = os.open(path, os.O_RDONLY), time.monotonic() + (LOOK_S if wait is None else wait)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= until:
                    what = f"another process is at work in {path}: wait for it, or choose another --out"
                    raise busy or InputError(what) from error
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def at_work(path: Path) -> bool:
    """Returns whether a process works in a folder. The lock is shared: two that look do not see each other."""
    if fcntl is None:
        return True
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
