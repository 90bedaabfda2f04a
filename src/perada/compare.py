"""All chosen methods, several seeds, one split: a folder of runs and the paper's table of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import standings
from .api import Run, default_source, free_path, load, source_name, train
from .config import Config, resolve
from .data import Federation, build_federation
from .errors import InputError, Interrupted, RunError, unknown
from .methods import REGISTRY, hyperparameters
from .report import write_report
from .runs import device_of, write_atomic
from .simulate import Progress, Say, check


class Comparison:
    """A folder with `plan.json` (the runs in order), `plan/NAME.toml`, a run folder each, and the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Comparison:
        if not (path / "plan.json").is_file():
            raise InputError(f"{path} is not a comparison (no plan.json): check --out, or start one without --resume")
        return cls(path)

    @property
    def names(self) -> list[str]:
        found: list[str] = json.loads((self.path / "plan.json").read_text())["runs"]
        return found

    def config(self, name: str) -> Path:
        return self.path / "plan" / f"{name}.toml"

    def finished(self, name: str) -> bool:
        return (self.path / name / "summary.json").is_file()

    @property
    def runs(self) -> list[Run]:
        """The finished ones."""
        return [load(self.path / name) for name in self.names if self.finished(name)]

    def standings(self) -> standings.Standings:
        return standings.standings([run.summary for run in self.runs])

    def add(self, configs: Mapping[str, Config]) -> None:
        """Plan these runs; one that is planned already must be the same."""
        (self.path / "plan").mkdir(parents=True, exist_ok=True)
        known = self.names if (self.path / "plan.json").is_file() else []
        for name, config in configs.items():
            if name in known and resolve(str(self.config(name))) != config:
                raise InputError(f"{self.path}: {name} was planned with other settings: choose another --out")
        for name, config in configs.items():
            write_atomic(self.config(name), config.toml().encode())
        runs = [*known, *(name for name in configs if name not in known)]
        write_atomic(self.path / "plan.json", json.dumps({"runs": runs}, indent=1).encode())

    def write_tables(self) -> None:
        found = self.standings()
        files = {"md": standings.markdown, "csv": standings.comma_separated, "tex": standings.latex}
        for ending, made in files.items():
            write_atomic(self.path / f"table.{ending}", made(found).encode())


def choose_methods(text: str | Sequence[str] | None) -> list[str]:
    """`a,b,c` or `all`, in the order given."""
    if text is None or text == "all":
        return list(REGISTRY)
    names = [n.strip() for n in text.split(",") if n.strip()] if isinstance(text, str) else list(text)
    if not names:
        raise InputError("--methods: name at least one method, or all")
    for name in names:
        if name not in REGISTRY:
            raise unknown("method", name, REGISTRY)
    return list(dict.fromkeys(names))


def settings_for(method: str, overrides: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """The overrides that mean something to this method; one that means nothing to any of them is an error."""
    for key in overrides:
        name = key.removeprefix("method.")
        if key.startswith("method.") and not any(name in hyperparameters(m) for m in methods):
            known = {f"method.{k}" for m in methods for k in hyperparameters(m)}
            raise unknown("key", key, known)
    mine = {f"method.{k}" for k in hyperparameters(method)}
    kept = {k: v for k, v in overrides.items() if not k.startswith("method.") or k in mine}
    return {**kept, "method.name": method}


def compare(
    source: str | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    seeds: int = 1,
    data: str | None = None,
    set: Mapping[str, Any] | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_run: Callable[[int, int, str], None] = lambda at, total, name: None,
    on_round: Callable[[Progress], None] = lambda progress: None,
    say: Say = lambda text: None,
) -> Comparison:
    """Train every method with every seed on one split (`data.seed`), and write the tables.

    With `resume` finished runs are kept, a run that was stopped goes on, and methods or seeds that are asked for
    beyond the plan are added to it.
    """
    overrides = dict(set or {})
    for key, value in (("data.root", data), ("run.device", device)):
        if value is not None:
            overrides[key] = value
    if "method.name" in overrides:
        raise InputError("method.name: choose the methods with --methods a,b,c")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {seeds}")
    fresh = not resume or source is not None or methods is not None
    configs = _configs(source or default_source(data), choose_methods(methods), seeds, overrides) if fresh else {}
    found = _open(out, source or default_source(data), resume)
    if configs:
        first = next(iter(configs.values()))
        federation = build_federation(first.data, device_of(first.run.device))
        for config in configs.values():  # everything that can be refused is refused before the first run
            check(config, federation, config.make_method())
        found.add(configs)
    else:
        first = resolve(str(found.config(found.names[0])), {k: v for k, v in overrides.items() if k in MOVED})
        federation = build_federation(first.data, device_of(first.run.device))
    said: list[str] = []
    for at, name in enumerate(found.names):
        on_run(at, len(found.names), name)
        if found.finished(name):
            continue
        moved = {k: v for k, v in overrides.items() if k in MOVED}
        _train(found, name, moved, federation, on_round, lambda text: _once(text, said, say))
        found.write_tables()
    found.write_tables()
    write_report(found.runs, found.path / "report.html")
    return found


MOVED = ("run.device", "data.root")  # what may differ from the plan on the machine that resumes it


def _once(text: str, said: list[str], say: Say) -> None:
    """What one run says the others need not say again."""
    if text not in said:
        said.append(text)
        say(text)


def _configs(source: str, methods: list[str], seeds: int, overrides: dict[str, Any]) -> dict[str, Config]:
    out = {}
    for seed in range(seeds):
        for method in methods:
            config = resolve(source, settings_for(method, overrides, methods))
            number = config.run.seed + seed
            out[f"{method}-{number}"] = resolve(
                source, {**settings_for(method, overrides, methods), "run.seed": number}
            )
    return out


def _open(out: str | Path | None, source: str, resume: bool) -> Comparison:
    path = Path(out) if out is not None else Path("runs") / f"compare-{source_name(source)}"
    if resume:
        return Comparison.open(path)
    path = path if out is not None else free_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists: --resume continues it, --out picks another")
    return Comparison(path)


def _train(
    found: Comparison,
    name: str,
    moved: dict[str, Any],
    federation: Federation,
    on_round: Callable[[Progress], None],
    say: Say,
) -> None:
    path = found.path / name
    started = (path / "config.toml").is_file()
    try:
        train(
            str(found.config(name)),
            set=moved,
            out=path,
            resume=started,
            federation=federation,
            on_round=on_round,
            say=say,
        )
    except Interrupted as stop:
        raise Interrupted(found.path) from stop
    except RunError as error:
        again = f"perada compare --out {found.path} --resume"
        raise RunError(f"{name}: {error}, or go on with all of it: {again}") from error
