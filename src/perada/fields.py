"""Checks the fields of a dataclass of options: the same rules for values from Python and from files."""

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from .errors import InputError, unknown

_WHOLE = 2**64
Options = TypeVar("Options")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def coerce(value: Any, kind: Any, name: str) -> Any:
    """Returns a value as a field's type has it: whole numbers serve as floats, lists as tuples."""
    if isinstance(value, np.generic):  # from Python: a number of an array
        value = value.item()
    if isinstance(value, int) and not -_WHOLE <= value < _WHOLE:  # not shown: Python prints at most 4,300 digits
        raise InputError(f"{name} must be between -2^64 and 2^64")
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if get_origin(kind) is UnionType:  # text or a list of it
        kind = next(k for k in get_args(kind) if isinstance(value, str) == (k is str))
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{name} must be a list, such as [1, 2], not {value!r}")
        return tuple(coerce(v, get_args(kind)[0], name) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{name} must be {WORDS[kind]}, not {value!r}")
    if kind is float and not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {value}")
    return value


def made(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Returns an object of a dataclass of options; refuses an unknown option."""
    known = get_type_hints(kind)
    for name in values:
        if name not in known:
            raise unknown("option", name, known)
    return kind(**values)


def check_fields(options: object, least: Mapping[str, int] | None = None, positive: tuple[str, ...] = ()) -> None:
    """Gives every field of a dataclass its declared type; refuses another type, and a number below its bound.

    least: the smallest value of a field. positive: fields that must be above 0.
    """
    where = type(options).__name__
    for name, kind in get_type_hints(type(options)).items():
        object.__setattr__(options, name, coerce(getattr(options, name), kind, f"{where}.{name}"))
    for name, bound in (least or {}).items():
        if (value := getattr(options, name)) < bound:
            raise InputError(f"{where}.{name} must be at least {bound}, not {value}")
    for name in positive:
        if (value := getattr(options, name)) <= 0:
            raise InputError(f"{where}.{name} must be above 0, not {value}")
