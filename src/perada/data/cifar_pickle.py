"""The pickles of CIFAR's Python archives, read without running them.

A pickle is a program. Only the few names that the official files use are known here; each stands for an inert class,
and any other name is refused before anything is done with it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .source import Pixels


def damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: {why}: the file is damaged or cut short; fetch it again")


def missing_file(path: Path) -> InputError:
    return InputError(f"{path} is missing: the data set is incomplete; fetch it again")


class _Foreign(Exception):
    """A pickle asks for something outside the few names that CIFAR's files use."""


def read_pickle(path: Path) -> dict[str, Any]:
    """Returns the dictionary in one of CIFAR's pickles, its keys as text and its arrays as uint8."""

    class Inert:  # numpy.dtype or numpy.ndarray; made anew per file, so that nothing a pickle does to it lasts
        state: Any = None

        def __init__(self, *args: Any) -> None:
            self.name = args[0] if args else None

        def __setstate__(self, state: Any) -> None:
            self.state = state

    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "dtype"): Inert,
        ("numpy", "ndarray"): Inert,
        ("numpy.core.multiarray", "_reconstruct"): lambda *args: Inert(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *args: Inert(),
        ("_codecs", "encode"): lambda text, coding: text.encode("latin1"),  # bytes, by Python 3 in protocol 2
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in known:
                raise _Foreign(f"{module}.{name}")
            return known[module, name]

    try:
        with path.open("rb") as f:
            fields = Unpickler(f, encoding="bytes").load()
        texts = {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in fields.items()}
        return {k: _array(v.state) if isinstance(v, Inert) else v for k, v in texts.items()}
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except _Foreign as error:
        raise InputError(
            f"{path}: not a CIFAR file: its pickle asks for {error}, which is not run; fetch it again"
        ) from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise damaged(path, "cannot be read as a CIFAR pickle") from error


def _array(state: Any) -> Pixels:
    """Returns what numpy put into the pickle: version, shape, type, column order, bytes."""
    _, shape, kind, by_columns, data = state
    if kind.name not in ("u1", b"u1") or not isinstance(data, bytes) or math.prod(shape) != len(data):
        raise ValueError("no array of bytes")
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order="F" if by_columns else "C")
