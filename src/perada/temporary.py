"""Temporary files and folders: what is written under such a name gets its own when it is whole."""

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

STALE = 24 * 3600.0  # seconds without a write, after which a temporary file is that of a killed process


def temporary_path(path: Path) -> Path:
    """Returns a name to write a file or folder under: beside it, and such that nobody can guess it."""
    return path.with_name(f".{path.name}.{token_hex(6)}.part")


def is_temporary(name: str, of: str = "") -> bool:
    """Returns whether a name is that of something half written. of: the name that it would have got; "" is any."""
    if of:
        return re.fullmatch(rf"\.{re.escape(of)}\.[0-9a-f]+\.part", name) is not None
    return name.startswith(".") and name.endswith(".part")  # older versions had other characters between


def sweep(folder: Path, leftover: Callable[[str], bool] = is_temporary, idle: float = STALE) -> None:
    """Removes the temporary files and folders of killed processes.

    leftover: whether a name is one of them. idle: the seconds since the last write; a live process writes too often to
    look stale. In a folder that the process has locked there is no other, and 0 removes all.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if leftover(path.name):
            with suppress(OSError):  # another process was faster
                if not idle or time.time() - path.lstat().st_mtime > idle:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
