"""All chosen methods, several seeds, one split: a folder of runs and the paper's table of them."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import Config, resolve
from ..data import Federation, build_federation
from ..errors import InputError, Interrupted, RunError
from ..experiment import Progress, Say
from ..lanes import Pool
from ..machine import device_of
from ..report import write_report
from ..runs.folder import write_atomic
from ..runs.names import chosen_source, free_path, newest_path, resumable, source_name, whole_name
from ..runs.run import Run, load
from ..runs.train import train
from . import standings
from .plan import (
    absolute,
    again,
    check_all,
    choose_methods,
    keep_backbone,
    moved,
    once,
    planned,
    read_plan,
    refuse_taken,
    settings_for,
    shared_backbone,
    whole,
    working_in,
    write_plan,
)
from .workers import jobs_for, share_lanes, shares, work_through

PLAN = "plan.json"


class Comparison:
    """A folder with `plan.json` (what was asked for), `plan/NAME.toml` and a run folder each, and the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def plan(self) -> dict[str, Any]:
        return read_plan(self.path, PLAN, "comparison")

    @property
    def names(self) -> list[str]:
        plan = self.plan
        return [f"{method}-{seed}" for seed in plan["seeds"] for method in plan["methods"]]

    def finished(self, name: str) -> bool:
        return all((self.path / name / file).is_file() for file in ("summary.json", "report.html"))

    @property
    def runs(self) -> list[Run]:
        """The finished ones."""
        return [load(self.path / name) for name in self.names if self.finished(name)]

    def standings(self) -> standings.Standings:
        return standings.standings([run.summary for run in self.runs])

    def write_tables(self) -> None:
        found = self.standings()
        files = {"md": standings.markdown, "csv": standings.comma_separated, "tex": standings.latex}
        for ending, made in files.items():
            write_atomic(self.path / f"table.{ending}", made(found).encode())


def compare(
    source: str | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    seeds: int | None = None,
    data: str | None = None,
    set: Mapping[str, Any] | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    on_run: Callable[[int, int, str], None] = lambda at, total, name: None,
    on_round: Callable[[Progress], None] = lambda progress: None,
    say: Say = lambda text: None,
) -> Comparison:
    """Train every method with every seed (default 1) on one split (`data.seed`), and write the tables.

    With `resume` finished runs are kept, a run that was stopped goes on, and methods or seeds that are asked for
    beyond the plan are added to it. `jobs` processes of one thread each share the runs; 0 is as many as is sensible
    here (which needs the caller's module to be guarded by `if __name__ == "__main__"`).
    """
    overrides = dict(set or {})
    for key, value in (("data.root", data), ("run.device", device)):
        if value is not None:
            overrides[key] = value
    if seeds is not None and seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {seeds}")
    chosen = chosen_source(source, data)
    path = Path(out) if out is not None else Path("runs") / f"compare-{source_name(chosen)}"
    if out is None:
        path = newest_path(path) if resume else free_path(path)
    found = Comparison(path)
    if not resume:
        refuse_taken(path, PLAN)
    with working_in(path, fresh=not resume):
        if resume:
            federation = _take_up(found, source, methods, seeds, overrides)
        else:
            federation = _begin(found, chosen, choose_methods(methods), seeds or 1, overrides)
        _go_through(found, federation, jobs, moved(overrides), on_run, on_round, say)
    return found


def _go_through(
    found: Comparison,
    federation: Federation,
    jobs: int,
    here: dict[str, Any],
    on_run: Callable[[int, int, str], None],
    on_round: Callable[[Progress], None],
    say: Say,
) -> None:
    """Train what is not finished, write the tables and the report."""
    names, left, speak = found.names, [n for n in found.names if not found.finished(n)], once(say)

    def done(name: str) -> None:
        with resumable(found.path, "perada compare"):
            found.write_tables()
        finished = sum(map(found.finished, names))
        on_run(finished, len(names), "done" if finished == len(names) else f"{name} done")

    on_run(len(names) - len(left), len(names), left[0] if left else "done")
    many = jobs or jobs_for(len(left), federation.device)
    if many > 1 and not shares(federation.device):
        _all_at_once(found, left, many, here, done, speak)
        left = []
    elif many > 1:

        def at(text: str) -> None:
            on_run(sum(map(found.finished, names)), len(names), text)

        share_runs(found, left, many, here, federation, at, done, speak)
        left = []
    for name in left:
        on_run(sum(map(found.finished, names)), len(names), name)
        _train(found, name, here, federation, on_round, speak)
        done(name)
    with resumable(found.path, "perada compare"):
        found.write_tables()
        write_report(found.runs, found.path / "report.html")


def _begin(found: Comparison, source: str, methods: list[str], seeds: int, overrides: dict[str, Any]) -> Federation:
    config = resolve(source, settings_for(methods[0], overrides, methods))
    numbers = list(range(config.run.seed, config.run.seed + seeds))
    plan = {"source": whole_name(source), "methods": methods, "seeds": numbers, "set": absolute(overrides, config)}
    configs = _configs(source, plan)
    federation = check_all(configs.values())
    write_plan(found.path, PLAN, plan, configs, source)
    return federation


def _take_up(
    found: Comparison,
    source: str | None,
    methods: str | Sequence[str] | None,
    seeds: int | None,
    overrides: dict[str, Any],
) -> Federation:
    """The plan as it is, with the methods and seeds that are new."""
    plan = found.plan
    whole(found.path, PLAN, plan, {"source": str, "methods": list, "seeds": list, "set": dict})
    held = again(found.path, plan, source, overrides)
    known, first = found.names, plan["seeds"][0]
    wanted = plan["methods"] if methods is None else list(dict.fromkeys([*plan["methods"], *choose_methods(methods)]))
    many = max(len(plan["seeds"]), seeds or 1)
    if wanted != plan["methods"] or many != len(plan["seeds"]):
        plan = {**plan, "methods": wanted, "seeds": list(range(first, first + many))}
        new = {name: config for name, config in _configs(held, plan).items() if name not in known}
        there, here = (planned(found.path, known[0], settings) for settings in ({}, moved(overrides)))
        check_all([here, *(_as(config, here) for config in new.values())])
        write_plan(found.path, PLAN, plan, {name: _as(config, there) for name, config in new.items()}, held)
    return check_all([planned(found.path, found.names[0], moved(overrides))])


def _as(config: Config, other: Config) -> Config:
    """A new configuration with the paths, the device and the precision of another: a relative path may have meant
    another folder."""
    return replace(
        config,
        data=replace(config.data, root=other.data.root),
        model=replace(config.model, weights=other.model.weights),
        distill=replace(config.distill, data=other.distill.data),
        run=replace(config.run, device=other.run.device, precision=other.run.precision),
    )


def _configs(source: str, plan: Mapping[str, Any]) -> dict[str, Config]:
    methods, overrides = plan["methods"], plan["set"]
    return {
        f"{method}-{seed}": resolve(source, {**settings_for(method, overrides, methods), "run.seed": seed})
        for seed in plan["seeds"]
        for method in methods
    }


def share_runs(
    found: Comparison,
    names: Sequence[str],
    jobs: int,
    here: dict[str, Any],
    federation: Federation,
    at: Callable[[str], None],
    done: Callable[[str], None],
    say: Say,
) -> None:
    """In one process, their lanes trained together."""

    def one(name: str, pool: Pool) -> None:
        def on_round(progress: Progress) -> None:
            _warn(name, progress, say)
            at(f"{name} and others, round {progress.round} of {progress.rounds}")

        _train(found, name, here, federation, on_round, say, pool)

    try:
        share_lanes(names, jobs, one, done)
    except KeyboardInterrupt as stop:
        raise Interrupted(found.path) from stop


def _warn(name: str, progress: Progress, say: Say) -> None:
    for client in progress.failed:
        say(f"warning: {name}: {client}: training stopped being finite; kept its last state")


def _all_at_once(
    found: Comparison, names: Sequence[str], jobs: int, here: dict[str, Any], done: Callable[[str], None], say: Say
) -> None:
    try:
        work_through(names, jobs, _worker, found.path, here, done=done, say=say)
    except KeyboardInterrupt as stop:
        raise Interrupted(found.path) from stop


def _worker(path: Path, here: dict[str, Any]) -> Callable[[str, Say], None]:
    """What a process of its own does with the names of runs."""
    found = Comparison(path)
    first = planned(path, found.names[0], here)
    federation = build_federation(first.data, device_of(first.run.device))

    def work(name: str, say: Say) -> None:
        _train(found, name, here, federation, lambda progress: _warn(name, progress, say), say)

    return work


def _train(
    found: Comparison,
    name: str,
    here: dict[str, Any],
    federation: Federation,
    on_round: Callable[[Progress], None],
    say: Say,
    pool: Pool | None = None,
) -> None:
    path = found.path / name
    started = (path / "config.toml").is_file()
    if path.exists() and not started:
        shutil.rmtree(path)  # a kill left a folder with nothing in it
    shared = shared_backbone(found.path, planned(found.path, name, here))
    try:
        run = train(
            str(found.path / "plan" / f"{name}.toml"),
            set=here,
            out=path,
            resume=started,
            federation=federation,
            backbone=shared if shared is not None and shared.is_file() else None,
            on_round=on_round,
            say=say,
            pool=pool,
        )
        keep_backbone(run.folder.backbone, shared)
    except Interrupted as stop:
        raise Interrupted(found.path) from stop
    except RunError as error:
        more = f"perada compare --out {shlex.quote(str(found.path))} --resume"
        raise RunError(f"{name}: {error.what}", f"what is finished is saved: {more}") from error
