"""Settings as `section.key: value`, laid over a preset or file for several runs of it."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from ..methods import grids, hyperparameters
from ..predict.drift import Drift
from .keys import Config

Settings = Mapping[str, Any]
MACHINE = ("run.device", "run.lanes")  # chosen per machine
MOVED = (*MACHINE, "data.root")  # may differ on the machine that resumes a plan
PREDICTING = frozenset(f"drift.{f.name}" for f in fields(Drift))  # training does not depend on it
RESUMED = (*MOVED, "train.rounds", *PREDICTING)  # what a resumed run may change
RULES = frozenset(
    {"train.aggregate", "train.trim"}
)  # by which a server averages: a federation under attack may change it
OF_SERVER = ("run.device", "run.precision", *RULES, *PREDICTING)  # what a resumed federation may change
PATHS = ("data.root", "model.weights", "distill.data")
GRIDS: dict[str, tuple[float, ...]] = {  # the paper's
    "train.lr": (5e-4, 1e-3, 5e-3, 1e-2),
    "distill.lr": (1e-5, 1e-4, 1e-3, 1e-2),
}


def path_text(data: object) -> str | None:
    """Returns the path of the data as text, None without one; refuses what is not a path, such as arrays."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data)
    raise InputError(
        f"data must be the path of a folder or file, not a {type(data).__name__}: for arrays make "
        'perada.Federation.from_arrays({"site": (x, y)}) and train it with perada.Experiment (docs/python.md)'
    )


def given(
    set: Settings | None = None,
    *,
    method: str | None = None,
    data: str | Path | None = None,
    device: str | None = None,
    seed: int | None = None,
    lanes: int | None = None,
) -> dict[str, Any]:
    """Returns `set` with the settings that have an argument of their own."""
    own: dict[str, Any] = {"method.name": method, "data.root": path_text(data)}
    own |= {"run.device": device, "run.seed": seed, "run.lanes": lanes}
    return {**(set or {}), **{key: value for key, value in own.items() if value is not None}}


def moved(settings: Settings) -> dict[str, Any]:
    """Returns those settings that may differ on the machine that resumes a plan."""
    return {k: v for k, v in settings.items() if k in MOVED}


def different(settings: Settings, others: Settings, ignored: Container[str]) -> str | None:
    """Returns the first of the settings that has another value in `others`; of a path, only the last part counts."""

    def value(key: str, of: Settings) -> Any:
        setting = of.get(key)
        if key in PATHS:
            return Path(str(setting)).name
        return list(setting) if isinstance(setting, tuple) else setting  # JSON has no tuples

    return next((k for k in settings if k not in ignored and value(k, settings) != value(k, others)), None)


def absolute(settings: Settings, config: Config) -> dict[str, Any]:
    """Returns the settings with paths that mean the same from any folder, as `config` has them."""
    flat = config.flat()
    return {k: flat[k] if k in PATHS else v for k, v in settings.items()}


def for_method(method: str, settings: Settings, methods: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that this method has; a setting that none of `methods` has is an error."""
    known = {f"method.{k}" for m in methods for k in hyperparameters(m)}
    for key in settings:
        if key == "method.name":
            raise InputError(f"{key}: choose the methods with --methods a,b,c")
        if key.startswith("method.") and not known:
            raise InputError(f"{key}: none of {', '.join(methods)} has settings of its own: remove it")
        if key.startswith("method.") and key not in known:
            raise unknown("key", key, known)
    mine = {f"method.{k}" for k in hyperparameters(method)}
    kept = {k: v for k, v in settings.items() if not k.startswith("method.") or k in mine}
    return {**kept, "method.name": method}


def of_method(config: Config, base: Config, chosen: Settings) -> dict[str, Any]:
    """Returns what `[methods.NAME]` says: the method's own settings, those that differ from `base`, and the chosen."""
    flat, other = config.flat(), base.flat()
    own = {k: v for k, v in flat.items() if k.startswith("method.") or other.get(k) != v}
    return {k: v for k, v in {**own, **chosen}.items() if k != "method.name"}


def grid_of(method: str, config: Config, given: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Returns the values to try: for the learning rates of clients and server, and for the method's own settings.

    The value of the preset or file is always among them. `given` replaces the values of a key, or adds a key.
    """
    keys: dict[str, Sequence[Any]] = dict(GRIDS)
    if not config.make_method().parts.distils or not config.distill.steps:
        del keys["distill.lr"]
    keys |= {f"method.{k}": values for k, values in grids(method).items()}
    own = config.flat()
    keys = {k: values if own[k] in values else (*values, own[k]) for k, values in keys.items()}
    for key, values in given.items():
        of_another = key.startswith("method.") and key.removeprefix("method.") not in config.method
        if not of_another and (key != "distill.lr" or key in keys):
            keys[key] = values
    return keys


def check_grid(grid: Mapping[str, Sequence[Any]], methods: Sequence[str]) -> None:
    """Refuses keys that cannot be searched."""
    known = {f"method.{k}" for m in methods for k in hyperparameters(m)}
    for key in grid:
        if key.startswith("method.") and key not in known:
            raise unknown("key", key, known or GRIDS)
        if key.startswith("data."):
            raise InputError(f"{key} cannot be searched: all points share one split")
