"""Hyper-parameters by the clients' own validation data, never by test data."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config, resolve, toml_value, tune_grid
from ..config.build import check
from ..data import Federation
from ..errors import InputError, unknown
from ..experiment import Progress, Say
from ..lanes import Pool
from ..methods import grids, hyperparameters
from ..runs.folder import write_atomic
from ..runs.jsonfiles import read_rows
from ..runs.names import chosen_source, free_path, newest_path, resumable, source_name, whole_name
from .plan import (
    absolute,
    again,
    check_all,
    choose_methods,
    moved,
    once,
    planned,
    read_plan,
    refuse_taken,
    settings_for,
    validated,
    whole,
    working_in,
    write_plan,
)
from .workers import jobs_for, share_lanes, shares

PLAN = "search.json"
GRIDS: dict[str, tuple[float, ...]] = {  # the paper's
    "train.lr": (5e-4, 1e-3, 5e-3, 1e-2),
    "distill.lr": (1e-5, 1e-4, 1e-3, 1e-2),
}


class Search:
    """A folder with `search.json`, `plan/METHOD.toml`, `results.jsonl` (a line for each finished point) and, at the
    end, `tuned.toml`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def plan(self) -> dict[str, Any]:
        return read_plan(self.path, PLAN, "search")

    def results(self) -> list[dict[str, Any]]:
        kinds = {"method": str, "settings": dict, "local_val": float | None}
        return read_rows(self.path / "results.jsonl", kinds)

    def record(self, result: Mapping[str, Any]) -> None:
        lines = [json.dumps(r) + "\n" for r in [*self.results(), result]]
        write_atomic(self.path / "results.jsonl", "".join(lines).encode())

    def best(self) -> dict[str, dict[str, Any]]:
        """The settings of the highest mean validation score, method by method; the first of equals in the plan."""
        out: dict[str, dict[str, Any]] = {}
        order = {_name(point): at for at, point in enumerate(self.plan.get("points", []))}
        results = sorted(self.results(), key=lambda r: order.get(_name(r), len(order)))
        for method in self.plan["methods"]:
            found = [r for r in results if r["method"] == method and r["local_val"] is not None]
            if found:
                out[method] = max(found, key=lambda r: r["local_val"])
        return out

    def tried(self) -> dict[str, int]:
        return Counter(str(r["method"]) for r in self.results())

    def write_tuned(self) -> None:
        """The first method's settings, and in `[methods.NAME]` all that is another method's own or was chosen."""
        best = self.best()
        base = planned(self.path, self.plan["methods"][0], {})
        parts = [base.toml()]
        for method, result in best.items():
            own = planned(self.path, method, {}).flat()
            kept = {k: v for k, v in own.items() if k.startswith("method.") or base.flat().get(k) != v}
            kept = {k: v for k, v in {**kept, **result["settings"]}.items() if k != "method.name"}
            lines = "".join(f"{key} = {toml_value(value)}\n" for key, value in kept.items())
            parts.append(f"# local validation {result['local_val']:.2f}\n[methods.{method}]\n{lines}")
        write_atomic(self.path / "tuned.toml", "\n".join(parts).encode())


def grid_of(method: str, config: Config, given: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """What is tried for a method: client and server learning rates, and its own settings that have a grid; what the
    preset or file has set is always among the values.

    `given` replaces the values of a key, or adds one that the method has.
    """
    keys: dict[str, Sequence[Any]] = {"train.lr": GRIDS["train.lr"]}
    if config.make_method().parts.distils and config.distill.steps:
        keys["distill.lr"] = GRIDS["distill.lr"]
    keys |= {f"method.{k}": values for k, values in grids(method).items()}
    own = config.flat()
    keys = {k: values if own[k] in values else (*values, own[k]) for k, values in keys.items()}
    for key, values in given.items():
        of_another = key.startswith("method.") and key.removeprefix("method.") not in config.method
        if not of_another and (key != "distill.lr" or key in keys):
            keys[key] = values
    return keys


def tune(
    source: str | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    data: str | None = None,
    set: Mapping[str, Any] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_point: Callable[[int, int, str], None] = lambda at, total, name: None,
    on_round: Callable[[Progress], None] = lambda progress: None,
    say: Say = lambda text: None,
) -> Search:
    """Train every point of every method's grid, evaluate it on local validation data alone, write `tuned.toml`."""
    overrides = dict(set or {})
    for key, value in (("data.root", data), ("run.device", device)):
        if value is not None:
            overrides[key] = value
    chosen = chosen_source(source, data)
    path = Path(out) if out is not None else Path("runs") / f"tune-{source_name(chosen)}"
    if out is None:
        path = newest_path(path) if resume else free_path(path)
    search = Search(path)
    if not resume:
        refuse_taken(path, PLAN)
    with working_in(path, fresh=not resume):
        if resume:
            _take_up(search, source, methods, grid, overrides)
        else:
            _begin(search, chosen, choose_methods(methods), overrides, dict(grid or {}))
        _go_through(search, overrides, on_point, on_round, say)
    return search


def _go_through(
    search: Search,
    overrides: Mapping[str, Any],
    on_point: Callable[[int, int, str], None],
    on_round: Callable[[Progress], None],
    say: Say,
) -> None:
    """Train what is not finished and write what was chosen."""
    points, speak = search.plan["points"], once(say)
    federation = check_all([_config(search, points[0], overrides)])
    speak(f"{len(points)} training{'s' if len(points) > 1 else ''}")
    known = {_name(r) for r in search.results()}
    left = {_name(p): p for p in points if _name(p) not in known}

    def train(name: str, pool: Pool | None = None) -> None:
        path = search.path / ("current" if pool is None else f"current-{list(map(_name, points)).index(name)}")
        heard = on_round if pool is None else lambda progress: None
        score = _train(path, search, _config(search, left[name], overrides), federation, heard, speak, pool)
        search.record({**left[name], "local_val": score})
        shutil.rmtree(path)

    jobs = jobs_for(len(left), federation.device) if shares(federation.device) else 1
    with resumable(search.path, "perada tune"):
        if jobs > 1:
            on_point(len(points) - len(left), len(points), next(iter(left)))
            share_lanes(list(left), jobs, train, lambda name: on_point(len(search.results()), len(points), name))
        else:
            for at, point in enumerate(points):
                on_point(at, len(points), _name(point))
                if _name(point) in left:
                    train(_name(point))
    on_point(len(points), len(points), "done")
    with resumable(search.path, "perada tune"):
        search.write_tuned()


def _name(point: Mapping[str, Any]) -> str:
    """A point or its result in words."""
    shown = ", ".join(f"{k.partition('.')[2]} {toml_value(v)}" for k, v in point["settings"].items())
    return f"{point['method']} {shown}".strip()


def _begin(
    search: Search, source: str, methods: list[str], overrides: dict[str, Any], grid: dict[str, Sequence[Any]]
) -> None:
    """Every point, written down before the first is trained. A setting that is given is not searched."""
    for key in grid:
        if key in overrides:
            raise InputError(f"{key} is both given (--set) and searched (--grid): choose one")
    given = {**tune_grid(source), **grid}
    _check_grid(given, methods)
    configs = {m: resolve(source, settings_for(m, overrides, methods)) for m in methods}
    points: list[dict[str, Any]] = []
    made: list[Config] = []
    for method, config in configs.items():
        keys = {k: v for k, v in grid_of(method, config, given).items() if k not in overrides}
        for values in itertools.product(*keys.values()):
            settings = dict(zip(keys, values, strict=True))
            if (point := {"method": method, "settings": settings}) not in points:
                points.append(point)
                made.append(resolve(source, {**settings_for(method, overrides, methods), **settings}))
    federation = check_all(next(c for c in made if c.method_name == m) for m in methods)
    for config in made:
        check(config, federation)
    if not any(len(c.val) for c in federation.clients):
        raise InputError("tuning needs validation data at the clients: raise data.val")
    typed = absolute(overrides, made[0])
    plan = {"source": whole_name(source), "methods": methods, "set": typed, "grid": grid, "points": points}
    write_plan(search.path, PLAN, plan, configs, source)


def _check_grid(given: Mapping[str, Sequence[Any]], methods: Sequence[str]) -> None:
    known = {f"method.{k}" for m in methods for k in hyperparameters(m)}
    for key in given:
        if key.startswith("method.") and key not in known:
            raise unknown("key", key, known or ["train.lr", "distill.lr"])
        if key.startswith("data."):
            raise InputError(f"{key} cannot be searched: all points share one split")


def _take_up(
    search: Search,
    source: str | None,
    methods: str | Sequence[str] | None,
    grid: Mapping[str, Sequence[Any]] | None,
    overrides: Mapping[str, Any],
) -> None:
    """Refuse what is not the plan's: a search goes on as it was begun."""
    plan = search.plan
    whole(search.path, PLAN, plan, {"source": str, "methods": list, "set": dict, "grid": dict, "points": list})
    again(search.path, plan, source, overrides)
    if methods is not None and choose_methods(methods) != plan["methods"]:
        raise InputError(f"{search.path} was made with other methods: resume it without them, or choose another --out")
    if grid and {k: list(v) for k, v in grid.items()} != plan["grid"]:
        raise InputError(f"{search.path} was made with another grid: resume it without it, or choose another --out")


def _config(search: Search, point: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """A point of the plan as a run that is evaluated once, at its end, and not on shifted images."""
    config = planned(search.path, point["method"], {**point["settings"], **moved(overrides)})
    return replace(config, run=replace(config.run, eval_every=config.train.rounds, shifts=False))


def _train(
    path: Path,
    search: Search,
    config: Config,
    federation: Federation,
    on_round: Callable[[Progress], None],
    say: Say,
    pool: Pool | None,
) -> float | None:
    """One point: its run folder is `path` until its score is written down."""
    text = config.toml()
    if path.exists() and (not (path / "config.toml").is_file() or (path / "config.toml").read_text() != text):
        shutil.rmtree(path)  # of another point
    found = validated(search.path, path, config, federation, on_round, say, pool=pool)
    score: float | None = found["local_val"]["mean"]
    return score
