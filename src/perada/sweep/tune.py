"""Hyper-parameters chosen by the clients' own validation data, never by test data."""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ..callbacks import Callback
from ..config import Config, resolve, toml_value, tune_grid
from ..config.objects import check
from ..config.settings import Settings, absolute, check_grid, for_method, given, grid_of, moved, of_method
from ..data import Federation
from ..errors import Diverged, InputError
from ..experiment import Say
from ..lanes import Pool
from ..methods import REGISTRY
from ..runs.files import read_rows, write_atomic
from ..runs.names import whole_name
from .plan import Plan, begun, check_all, choose_methods, validated
from .workers import OnRun, Train, train_all

Grid = Mapping[str, Sequence[Any]]


class Search(Plan):
    """The folder of a search: the plan, a line of results.jsonl per finished point, and, at the end, tuned.toml."""

    kind, verb, file = "search", "tune", "search.json"
    keys: ClassVar = {"source": str, "methods": list, "set": dict, "grid": dict, "points": list}

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """Returns what is tried, by name."""
        return {_name(point): point for point in self.plan.get("points", [])}

    def results(self) -> list[dict[str, Any]]:
        """Returns the finished points with their scores."""
        kinds = {"method": str, "settings": dict, "local_val": float | None}
        return read_rows(self.path / "results.jsonl", kinds)

    @property
    def names(self) -> list[str]:
        return list(self.points)

    def finished(self) -> list[str]:
        return [_name(result) for result in self.results()]

    def record(self, result: Mapping[str, Any]) -> None:
        """Writes down a finished point."""
        lines = [json.dumps(r) + "\n" for r in [*self.results(), result]]
        write_atomic(self.path / "results.jsonl", "".join(lines).encode())

    def best(self) -> dict[str, dict[str, Any]]:
        """Returns the result with the highest mean validation score per method; of equals the first in the plan."""
        out: dict[str, dict[str, Any]] = {}
        order = list(self.points)
        results = sorted(self.results(), key=lambda r: order.index(_name(r)) if order else 0)
        for method in self.plan["methods"]:
            scored = [r for r in results if r["method"] == method and r["local_val"] is not None]
            if scored:
                out[method] = max(scored, key=lambda r: r["local_val"])
        return out

    def table(self) -> list[dict[str, Any]]:
        """Returns one row per method: what was chosen, its validation score, and how many points were tried."""
        tried = Counter(r["method"] for r in self.results())
        return [{**best, "points": tried[method]} for method, best in self.best().items()]

    def write_tuned(self) -> None:
        """Writes the first method's settings, and in `[methods.NAME]` what differs for another or was chosen."""
        base = self.config(self.plan["methods"][0])
        parts = [base.toml()]
        for method, result in self.best().items():
            settings = of_method(self.config(method), base, result["settings"])
            lines = "".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items())
            name = method if method in REGISTRY else toml_value(method)  # a path of another package is quoted
            parts.append(f"# local validation {result['local_val']:.2f}\n[methods.{name}]\n{lines}")
        write_atomic(self.path / "tuned.toml", "\n".join(parts).encode())


def tune(
    source: str | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    data: str | Path | None = None,
    set: Settings | None = None,
    grid: Grid | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_run: OnRun = lambda finished, total, name: None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda text: None,
) -> Search:
    """Trains every point of every method's grid, evaluates it on local validation data, and writes `tuned.toml`.

    source: a preset or a TOML file. methods: a list or `a,b,c`; by default all. grid: values to try for a key instead
    of the paper's. A setting in `set` is not searched. callbacks: hear of points that are trained one after another.
    """
    settings = given(set, data=data, device=device)
    search, chosen = Search.at(source, data, out, resume)
    new = () if resume else _planned(chosen, choose_methods(methods), settings, dict(grid or {}))
    with search.working(*new):
        if resume:
            _check_same(search, source, methods, grid, settings)
        points = search.points
        federation = check_all([_config(search, next(iter(points.values())), settings)])
        say(f"{len(points)} training{'s' if len(points) > 1 else ''}")
        train_point = _trainer(search, points, settings, federation)
        train_all(search, train_point, 0, federation.device, on_run, callbacks, say)
        search.write_tuned()
    return search


def _name(point: Mapping[str, Any]) -> str:
    """Returns a point or its result in words."""
    shown = ", ".join(f"{k.partition('.')[2]} {toml_value(v)}" for k, v in point["settings"].items())
    return f"{point['method']} {shown}".strip()


def _planned(
    source: str, methods: list[str], settings: Settings, grid: Grid
) -> tuple[dict[str, Any], dict[str, Config], str]:
    """Returns a new plan with every point, its configurations and its source; refuses points that cannot be trained."""
    for key in grid:
        if key in settings:
            raise InputError(f"{key} is both given (--set) and searched (--grid): choose one")
    values_of = {**tune_grid(source), **grid}
    check_grid(values_of, methods)
    own = {m: for_method(m, settings, methods) for m in methods}
    configs = {m: resolve(source, own[m]) for m in methods}
    points: list[dict[str, Any]] = []
    for method, config in configs.items():
        keys = {k: v for k, v in grid_of(method, config, values_of).items() if k not in settings}
        for values in itertools.product(*keys.values()):
            point = {"method": method, "settings": dict(zip(keys, values, strict=True))}
            if point not in points:
                points.append(point)
    trials = [resolve(source, {**own[p["method"]], **p["settings"]}) for p in points]
    federation = check_all(next(c for c in trials if c.method_name == m) for m in methods)
    for config in trials:
        check(config, federation)
    if not any(len(c.val) for c in federation.clients):
        raise InputError("tuning needs validation data at the clients: raise DataOptions.val")
    plan = {"source": whole_name(source), "methods": methods, "set": absolute(settings, trials[0])}
    return {**plan, "grid": grid, "points": points}, configs, source


def _check_same(
    search: Search,
    source: str | None,
    methods: str | Sequence[str] | None,
    grid: Grid | None,
    settings: Settings,
) -> None:
    """Refuses methods and grids that are not the plan's: a search continues as it was begun."""
    plan, _ = search.resume(source, settings)
    if methods is not None and choose_methods(methods) != plan["methods"]:
        raise search.other("other methods")
    if grid and {k: list(v) for k, v in grid.items()} != plan["grid"]:
        raise search.other("another grid")


def _config(search: Search, point: Mapping[str, Any], settings: Settings) -> Config:
    """Returns a point of the plan as a run that is evaluated once, at its end, and not on shifted images."""
    config = search.config(point["method"], {**point["settings"], **moved(settings)})
    return replace(config, run=replace(config.run, eval_every=config.train.rounds, shifts=False))


def _trainer(
    search: Search, points: Mapping[str, Mapping[str, Any]], settings: Settings, federation: Federation
) -> Train:
    """Returns what trains a point: in a run folder of its own until its score is written down."""

    def one(name: str, callbacks: Sequence[Callback], say: Say, pool: Pool | None) -> None:
        config = _config(search, points[name], settings)
        path = search.path / ("current" if pool is None else f"current-{list(points).index(name)}")
        if begun(path) and (path / "config.toml").read_text() != config.toml():
            shutil.rmtree(path)  # it is another point's
        with search.training(name):
            try:
                last = validated(search.path, path, config, federation, callbacks, say, pool=pool)
                score = last.scores["local_val"].mean
            except Diverged as error:  # a point that cannot be chosen; the search goes on
                say(f"warning: {name}: {error}")
                score = None
            search.record({**points[name], "local_val": score})
            shutil.rmtree(path)

    return one
