"""Names that other packages may add to: `package.module:attribute`, and entry points of installed packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import InputError, unknown

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def installed(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group, such as `perada.datasets`, by name."""
    return {point.name: point for point in entry_points(group=group)}


def is_name(name: str, group: str) -> bool:
    """Returns whether `name` is `package.module:attribute` or an entry point of the group."""
    return bool(_PATH.fullmatch(name)) or name in installed(group)


def find(kind: str, name: str, known: Mapping[str, Any], group: str) -> Any:
    """Returns what a name stands for: an entry of `known`, `package.module:attribute`, or an entry point.

    kind: what is looked for, as an error calls it, such as "data set".
    """
    if name in known:
        return known[name]
    points = installed(group)
    if not is_name(name, group):
        raise unknown(kind, name, [*known, *points])
    module, _, attribute = (points[name].value if name in points else name).partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, SyntaxError) as error:
        raise InputError(
            f"{kind} {name!r}: cannot import {module} ({error}): install it, or put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise InputError(f"{kind} {name!r}: {module} has no {attribute!r}") from error
    if not callable(found):
        raise InputError(f"{kind} {name!r}: {attribute} is {type(found).__name__}, not a function")
    return found
