"""The result of a run: one small JSON file in `results/EXPERIMENT/`. Every table and figure is made from these."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

import torch

import perada
from perada import __version__
from perada.config import Config
from perada.errors import InputError
from perada.methods import REGISTRY, hyperparameters, make_method
from perada.runs.files import fits, jsonable, write_atomic

from .trials import Trial

# Settings of the machine: a result is the same with others.
MACHINE = ("data.root", "data.resident", "run.device", "run.lanes", "run.checkpoint_every", "run.eval_every")
OWN_WEIGHTS = ("random", "fedavg")  # settings of a run; anything else is the pretrained backbone
SPLITS = ("local_val", "server_val", "local_test", "global_test", "shifted")
COUNTERS = ("distilled", "accepted", "bytes_up", "bytes_down", "seconds", "train_loss", "failed")
Number, Maybe = int | float, int | float | None
KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("experiment", "run", "method", "digest", "date", "device"), str),
    **dict.fromkeys(("settings", "validation", "guard", "last", "versions"), dict),
    "seed": int,
    "rounds": int,
    "together": int,
    "rows": list,
    "seconds": Number,
}
PARTS: dict[str, dict[str, type | UnionType]] = {
    "validation": {"local_val": Maybe, "server_val": Maybe},
    "guard": {"kind": str | None, "distilled": int, "accepted": int | None},
    "versions": {"torch": str},
}
METRICS = {  # name -> its section and key in a result
    "Local": ("local_test", "mean"),
    "Global": ("global_test", "mean"),
    "corruptions": ("shifted", "mean"),
    "global model": ("global_model", "global_test"),
    "global model, corruptions": ("global_model", "shifted"),
}
Result = dict[str, Any]


def essence(config: Config) -> dict[str, Any]:
    """Returns the settings that identify a result on any machine: no paths, and no name of the pretrained weights."""
    found: dict[str, Any] = {
        k: list(v) if isinstance(v, tuple) else v for k, v in config.flat().items() if k not in MACHINE
    }
    if found["model.weights"] not in OWN_WEIGHTS:
        found["model.weights"] = "pretrained"
    if "/" in found["distill.data"]:
        found["distill.data"] = Path(found["distill.data"]).name
    return found


def vars_of(method: str) -> dict[str, Any]:
    """Returns the defaults of a method's own settings."""
    made = make_method(method, {})
    return {k: getattr(made, k) for k in hyperparameters(method)}


FORMER = {"train.cohort": 8}  # defaults that changed since results were made


def digest(config: Config) -> str:
    """Returns a digest of the settings that differ from the defaults.

    So a key that is newer than a result does not change the result's digest, as long as its default means no change.
    """
    plain = Config(method={"name": config.method_name, **vars_of(config.method_name)})
    usual = {**essence(plain), **FORMER}
    held = {k: v for k, v in essence(config).items() if k == "method.name" or usual[k] != v}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def machine(device: torch.device) -> str:
    """Returns the device's name for a table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def file_digest(path: str) -> dict[str, str] | None:
    """Returns the name and checksum of a weights file; None if there is no such file."""
    file = Path(path)
    if not file.is_file():
        return None
    return {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


@lru_cache
def code() -> str:
    """Returns a digest of the package's files. Results report it; nothing compares it."""
    root, held = Path(perada.__file__).parent, hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml")):
        held.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return held.hexdigest()[:16]


def made(
    experiment: str,
    trial: Trial,
    settings: Mapping[str, Any],
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    last: Mapping[str, Any],
    **more: Any,
) -> Result:
    """Returns a result: evaluations without per-client numbers, and the last one (`last`, or a summary) with them.

    `more` is added as it is: the device, the number of runs that trained together, the digest of the weights.
    """
    return {
        "experiment": experiment,
        "run": trial.name,
        "group": trial.group,
        "method": config.method_name,
        "seed": config.run.seed,
        "settings": {k: v for k, v in settings.items() if k not in (*MACHINE, "model.weights")}
        | ({"model.weights": trial.settings["model.weights"]} if "model.weights" in trial.settings else {}),
        "digest": digest(config),
        "rounds": last["round"],
        "validation": {key: (last.get(key) or {}).get("mean") for key in ("local_val", "server_val")},
        "guard": {
            "kind": config.distill.guard if last["distilled"] else None,
            "distilled": last["distilled"],
            "accepted": last["accepted"] if config.distill.guard != "none" else None,
        },
        "rows": [_short(row) for row in rows],
        "last": {k: v for k, v in last.items() if k in (*SPLITS, "global_model", "metric", "parameters", "privacy")},
        "seconds": last["seconds"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"perada": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "code": code(),
        "shared_gpu": bool(os.environ.get("PERADA_SHARED_GPU")),  # then other processes share its seconds
        **more,
    }


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"round": row["round"]}
    found |= {k: {part: row[k][part] for part in ("mean", "std")} for k in SPLITS if row.get(k)}
    found |= {k: row[k] for k in COUNTERS if k in row}
    if row.get("global_model"):
        found["global_model"] = row["global_model"]
    log = row.get("distill") or {}
    return found | {k: log[k] for k in ("guard_chose", "guard_index") if log.get(k) is not None}


def path_of(root: Path, experiment: str, run: str) -> Path:
    return root / experiment / f"{run}.json"


def write(root: Path, result: Result) -> Path:
    path = path_of(root, result["experiment"], result["run"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(jsonable(result), indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path


def read(root: Path, experiment: str) -> dict[str, Result]:
    """Returns run -> result of one experiment."""
    found = {}
    for path in sorted((root / experiment).glob("*.json")):
        try:
            result = json.loads(path.read_text("utf8"), parse_constant=_no_number)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged: remove it, and run it again") from error
        if not isinstance(result, dict) or not result.keys() >= KINDS.keys():
            raise InputError(f"{path} is not a result of a run: remove it from the results")
        if not _whole(result):
            raise InputError(f"{path} is damaged: remove it, and run it again")
        found[path.stem] = result
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _whole(result: Result) -> bool:
    """Returns whether every part that tables and figures read has the right type."""
    if not fits(result, KINDS) or not all(fits(result[k], kinds) for k, kinds in PARTS.items()):
        return False
    if not all(fits(row, {"round": int}) for row in result["rows"]):
        return False
    parts = [result["last"], *result["rows"]]
    means = [part[k] for part in parts for k in SPLITS if part.get(k) is not None]
    models = [part["global_model"] for part in parts if part.get("global_model") is not None]
    known = all(fits(m, {"mean": Maybe}) for m in means) and all(fits(m, {"global_test": Maybe}) for m in models)
    known = known and all(isinstance(m.get("shifted"), Maybe) for m in models)
    weights = result.get("weights") is None or fits(result["weights"], {"file": str})
    return known and weights and result["method"] in REGISTRY and result["together"] >= 1


def value(result: Result, metric: str) -> float | None:
    """Returns one of METRICS at the end of a run; None where it was not measured."""
    section, key = METRICS[metric]
    found = (result["last"].get(section) or {}).get(key)
    return None if found is None else float(found)


def later(result: Result, section: str, key: str = "mean") -> float | None:
    """Returns the mean over the evaluations from a run's middle round on; a single evaluation is noisy."""
    found = [row[section][key] for row in result["rows"] if 2 * row["round"] >= result["rounds"] and row.get(section)]
    return sum(found) / len(found) if found and None not in found else None


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with half of its 95% interval (Student's t); None with fewer than two seeds."""

    mean: float
    half: float | None
    seeds: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    def text(self, sign: bool = False) -> str:
        shown = f"{self.mean:+.2f}" if sign else f"{self.mean:.2f}"
        if self.half is None:
            return shown
        low, high = self.mean - self.half, self.mean + self.half
        return f"{shown} [{low:+.2f}, {high:+.2f}]" if sign else f"{shown} ± {self.half:.2f}"


def interval(values: Sequence[float]) -> Interval | None:
    if not values:
        return None
    n, mean = len(values), float(sum(values) / len(values))
    if n < 2:
        return Interval(mean, None, n)
    from scipy import stats  # slow to import, and every command imports this module

    spread = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5
    return Interval(mean, float(stats.t.ppf(0.975, n - 1)) * spread / n**0.5, n)


def paired(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Interval | None:
    """Returns the difference of two methods, paired over the seeds that both have."""
    both = [(a, theirs.get(seed)) for seed, a in sorted(ours.items())]
    return interval([a - b for a, b in both if a is not None and b is not None])
