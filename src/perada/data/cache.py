"""Cache files, which save work: each is whole or absent, and can be made again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..temporary import sweep, temporary_path


def cache_folder() -> Path | None:
    """Returns `$PERADA_CACHE` or `~/.cache/perada`; None if there can be no such folder."""
    try:
        folder = Path(os.environ.get("PERADA_CACHE") or "~/.cache/perada").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that gets its name when it is complete: a kill leaves only a temporary file, which nobody reads."""
    sweep(path.parent)
    part = temporary_path(path)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Returns the header of an .npy file of bytes; its length does not depend on the number of rows."""
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()
