"""Hyper-parameters by the clients' own validation data, never by test data (SPEC, section 7)."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .api import default_source, free_path, resumable, source_name
from .compare import choose_methods, settings_for
from .config import Config, resolve, toml_value, tune_grid
from .data import Federation, build_federation
from .errors import InputError
from .methods import grids
from .runs import RunFolder, device_of, write_atomic
from .simulate import Progress, Say, check, prepare, run

GRIDS: dict[str, tuple[float, ...]] = {  # the paper's
    "train.lr": (5e-4, 1e-3, 5e-3, 1e-2),
    "distill.lr": (1e-5, 1e-4, 1e-3, 1e-2),
}


class Search:
    """A folder with `plan.json`, `results.jsonl` (a line for each finished point) and `tuned.toml` at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "plan.json").read_text())
        return found

    def results(self) -> list[dict[str, Any]]:
        path = self.path / "results.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off by a kill

    def record(self, result: Mapping[str, Any]) -> None:
        lines = [json.dumps(r) + "\n" for r in [*self.results(), result]]
        write_atomic(self.path / "results.jsonl", "".join(lines).encode())

    def best(self) -> dict[str, dict[str, Any]]:
        """The settings of the highest mean validation score, method by method; the first of equals."""
        out: dict[str, dict[str, Any]] = {}
        for method in self.plan["methods"]:
            found = [r for r in self.results() if r["method"] == method and r["local_val"] is not None]
            if found:
                out[method] = max(found, key=lambda r: r["local_val"])
        return out

    def tried(self) -> dict[str, int]:
        return Counter(str(r["method"]) for r in self.results())

    def write_tuned(self) -> Path:
        """The settings of the search as one file, with `[methods.NAME]` for what was chosen."""
        parts = [(self.path / "base.toml").read_text()]
        for method, result in self.best().items():
            lines = "".join(f"{key} = {toml_value(value)}\n" for key, value in result["settings"].items())
            parts.append(f"# local validation {result['local_val']:.2f}\n[methods.{method}]\n{lines}")
        path = self.path / "tuned.toml"
        write_atomic(path, "\n".join(parts).encode())
        return path


def grid_of(method: str, config: Config, given: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """What is tried for a method: client and server learning rates, and its own settings that have a grid.

    `given` replaces the values of a key, or adds one.
    """
    keys: dict[str, Sequence[Any]] = {"train.lr": GRIDS["train.lr"]}
    if config.make_method().parts.distils and config.distill.steps:
        keys["distill.lr"] = GRIDS["distill.lr"]
    own = {f"method.{k}" for k in config.method if k != "name"}
    keys |= {f"method.{k}": values for k, values in grids(method).items()}
    for key, values in given.items():
        if key in own if key.startswith("method.") else key != "distill.lr" or key in keys:
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
    search = _open(out, source or default_source(data), resume)
    if not resume:
        _plan(search, source or default_source(data), choose_methods(methods), overrides, dict(grid or {}))
    moved = {k: v for k, v in overrides.items() if k in ("run.device", "data.root")} if resume else {}
    plan = search.plan
    configs = [_config(search, p, moved) for p in plan["points"]]
    federation = build_federation(configs[0].data, device_of(configs[0].run.device))
    _check(configs, federation)
    done = {json.dumps([r["method"], r["settings"]]) for r in search.results()}
    for at, (point, config) in enumerate(zip(plan["points"], configs, strict=True)):
        shown = ", ".join(f"{k.partition('.')[2]} {v:g}" for k, v in point["settings"].items())
        on_point(at, len(configs), f"{point['method']} ({shown})")
        if json.dumps([point["method"], point["settings"]]) not in done:
            score = _train(search, config, federation, on_round, say)
            search.record({**point, "local_val": score})
            shutil.rmtree(search.path / "current")
    search.write_tuned()
    return search


def _open(out: str | Path | None, source: str, resume: bool) -> Search:
    path = Path(out) if out is not None else Path("runs") / f"tune-{source_name(source)}"
    if resume:
        if not (path / "plan.json").is_file():
            raise InputError(f"{path} is not a search (no plan.json): check --out, or start one without --resume")
        return Search(path)
    path = path if out is not None else free_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists: --resume continues it, --out picks another")
    return Search(path)


def _plan(
    search: Search, source: str, methods: list[str], overrides: dict[str, Any], given: dict[str, Sequence[Any]]
) -> None:
    """Every point, written down before the first is trained. A setting that is given is not searched."""
    given = {**tune_grid(source), **given}
    points = []
    for method in methods:
        settings = settings_for(method, overrides, methods)
        base = resolve(source, settings)
        keys = {k: v for k, v in grid_of(method, base, given).items() if k not in overrides}
        for values in itertools.product(*keys.values()):
            point = dict(zip(keys, values, strict=True))
            resolve(source, {**settings, **point})  # refuses an unknown key or a bad value now
            points.append({"method": method, "settings": point})
    first = resolve(source, settings_for(methods[0], overrides, methods))
    federation = build_federation(first.data, device_of(first.run.device))
    every = [resolve(source, {**settings_for(m, overrides, methods)}) for m in methods]
    _check(every, federation)
    search.path.mkdir(parents=True, exist_ok=True)
    own = {k: v for k, v in overrides.items() if k.startswith("method.")}
    write_atomic(search.path / "base.toml", first.toml().encode())
    plan = {"methods": methods, "own": own, "points": points}
    write_atomic(search.path / "plan.json", (json.dumps(plan, indent=1) + "\n").encode())


def _check(configs: Sequence[Config], federation: Federation) -> None:
    if not any(len(c.val) for c in federation.clients):
        raise InputError("tuning needs validation data at the clients: raise data.val")
    for config in configs:
        check(config, federation, config.make_method())


def _config(search: Search, point: Mapping[str, Any], moved: Mapping[str, Any]) -> Config:
    """A point of the plan as a run that is evaluated once, at its end, and not on shifted images."""
    plan = search.plan
    settings = {**settings_for(point["method"], plan["own"], plan["methods"]), **point["settings"], **moved}
    config = resolve(str(search.path / "base.toml"), settings)
    quiet = replace(config.run, eval_every=config.train.rounds, shifts=False)
    return replace(config, run=quiet)


def _train(
    search: Search, config: Config, federation: Federation, on_round: Callable[[Progress], None], say: Say
) -> float | None:
    """One point: its run folder lives in `current/` until its score is written down."""
    path = search.path / "current"
    text = config.toml()
    if path.exists() and (not (path / "config.toml").is_file() or (path / "config.toml").read_text() != text):
        shutil.rmtree(path)  # of another point
    folder = RunFolder(path) if path.exists() else RunFolder.create(path, text, overwrite=False)
    with resumable(search.path, "perada tune"):
        sim = prepare(config, folder.backbone, say, federation)
        found, _ = folder.load()
        if found is not None:
            sim.restore(found)
        row = run(sim, folder, on_round, splits=("val",))
    score: float | None = row["local_val"]["mean"]
    return score
