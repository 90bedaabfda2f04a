"""Finds what a name stands for: one of ours, `package.module:callable`, or an entry point of another package."""

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import InputError, unknown

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check(kind: str, group: str, name: str, ours: Mapping[str, Any]) -> None:
    """Refuses a name that stands for nothing; imports nothing."""
    if ":" in name:
        if not PATH.fullmatch(name):
            raise InputError(f"{kind} {name!r} is not a name and not package.module:callable")
    elif name not in ours and not entry_points(group=group, name=name):
        module, dot, attribute = name.rpartition(".")
        if dot:
            raise InputError(f"unknown {kind} {name!r}: write {module}:{attribute} for one of your own")
        raise unknown(kind, name, [*ours, *(e.name for e in entry_points(group=group))])


def find(kind: str, group: str, name: str, ours: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the callable that `name` stands for."""
    check(kind, group, name, ours)
    if name in ours:
        target = ours[name]
    elif ":" in name:
        module, _, attribute = name.partition(":")
        target = _imported(kind, name, module, attribute)
    else:
        point = next(iter(entry_points(group=group, name=name)))
        target = _imported(kind, name, point.module, point.attr)
    if not callable(target):
        raise InputError(f"{kind} {name!r} is of type {type(target).__name__}, which cannot be called")
    return target  # type: ignore[no-any-return]


def _imported(kind: str, name: str, module: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # a file in the current folder can be named, as with `python -m`
    try:
        target: Any = import_module(module)
    except Exception as error:  # a module may fail in any way while it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise InputError(f"{kind} {name!r}: no module {error.name!r}: install it or start in its folder") from error
        raise InputError(f"{kind} {name!r}: importing {module} fails: {_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise InputError(f"{kind} {name!r}: module {module!r} has no {attribute!r}")
        target = getattr(target, part)
    return target


def called(kind: str, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what another package's callable returns. An exception in it becomes one line."""
    try:
        return make(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{kind} {name!r} cannot be made: {_line(error)}") from error


def _line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
