"""Several methods and seeds on one split: a folder of runs and the paper's table of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..callbacks import Callback
from ..config import Config, federation_of, resolve
from ..config.settings import Settings, absolute, for_method, given, moved
from ..data import Federation
from ..errors import Diverged, InputError
from ..experiment import Say
from ..lanes import Pool
from ..report import standings, write_report
from ..report.choices import choices
from ..report.costs import measure, read_costs, write_costs
from ..runs.files import write_atomic
from ..runs.names import whole_name
from ..runs.run import Run, load
from ..runs.train import train
from .plan import Plan, begun, check_all, choose_methods, keep_backbone, shared_backbone
from .workers import OnRun, Train, train_all

ALONE = "standalone"  # the baseline: is it worth joining?


class Comparison(Plan):
    """The folder of a comparison: the plan, a run folder per method and seed, and the tables of what is finished."""

    kind, verb, file = "comparison", "compare", "plan.json"
    keys: ClassVar = {"source": str, "methods": list, "seeds": list, "set": dict}

    @property
    def names(self) -> list[str]:
        """Returns the names of all runs: method and seed."""
        plan = self.plan
        return [f"{method}-{seed}" for seed in plan["seeds"] for method in plan["methods"]]

    def finished(self) -> list[str]:
        files = ("summary.json", "report.html")
        return [n for n in self.names if all((self.path / n / file).is_file() for file in files)]

    @property
    def runs(self) -> list[Run]:
        """Returns the finished ones."""
        return [load(self.path / name) for name in self.finished()]

    def standings(self) -> standings.Standings:
        runs, known = self.runs, read_costs(self.path)
        table = standings.standings([run.summary for run in runs])
        costs = {row.method: known[row.method] for row in table.rows if row.method in known}
        return replace(table, costs=costs, choices=choices(runs))

    def measure_costs(self, federation: Federation) -> None:
        """Measures what a round costs a client, for the methods of which that is not known yet."""
        known, methods = read_costs(self.path), {run.config.method_name: run.config for run in self.runs}
        classes, size = len(federation.classes), federation.images.shape[-1]
        found = {name: measure(config, classes, size) for name, config in methods.items() if name not in known}
        if found:
            write_costs(self.path, known | {name: cost for name, cost in found.items() if cost is not None})

    def table(self) -> list[dict[str, Any]]:
        """Returns one row per method: its scores over clients and seeds, and its number of parameters."""
        rows: list[dict[str, Any]] = standings.as_json(self.standings())["methods"]
        return rows

    def after_each(self) -> None:
        """Writes the tables of what is finished."""
        if not self.finished():  # what there was diverged
            return
        table = self.standings()
        files = {"md": standings.markdown, "csv": standings.comma_separated, "tex": standings.latex}
        for ending, write in files.items():
            write_atomic(self.path / f"table.{ending}", write(table).encode())
        if table.choices is not None:
            write_atomic(self.path / "rounds.csv", table.choices.comma_separated().encode())


def compare(
    source: str | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    seeds: int | None = None,
    data: str | Path | None = None,
    set: Settings | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    baseline: bool = True,
    jobs: int = 1,
    on_run: OnRun = lambda finished, total, name: None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda text: None,
) -> Comparison:
    """Trains every method with every seed on one split, and writes the tables and a report.

    source: a preset or a TOML file. methods: a list or `a,b,c`; by default all. seeds: how many; by default 1.
    baseline: adds Standalone to the methods, so that the table says what each client reaches without the others.
    resume: keeps finished runs and continues the others; more methods or seeds than planned are added.
    jobs: processes of one thread each that share the runs; 0 is as many as is sensible here. With more than one, the
    caller's module needs `if __name__ == "__main__"`. callbacks: hear of runs that are trained one after another.
    """
    settings = given(set, data=data, device=device)
    if seeds is not None and seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {seeds}")
    comparison, chosen = Comparison.at(source, data, out, resume)
    names = choose_methods(methods)
    added = [ALONE] if baseline and ALONE not in names else []
    new = () if resume else _planned(chosen, [*names, *added], seeds or 1, settings)
    here = moved(settings)
    federation = check_all(new[1].values()) if new else None
    if new and added:
        say(f"{ALONE} is compared, too: it shows what each client reaches without the others")
    with comparison.working(*new):
        federation = federation or _continue(comparison, source, methods, seeds, settings)
        factory = partial(_trainer, comparison, here)
        train_all(comparison, factory(federation), jobs, federation.device, on_run, callbacks, say, factory)
        if not comparison.finished():
            raise Diverged("no run stayed finite", "lower Train.lr")
        comparison.measure_costs(federation)
        comparison.after_each()
        write_report(comparison.runs, comparison.path / "report.html")
    return comparison


def _planned(
    source: str, methods: list[str], seeds: int, settings: Settings
) -> tuple[dict[str, Any], dict[str, Config], str]:
    """Returns a new plan, its configurations and its source."""
    config = resolve(source, for_method(methods[0], settings, methods))
    numbers = list(range(config.run.seed, config.run.seed + seeds))
    plan = {"source": whole_name(source), "methods": methods, "seeds": numbers, "set": absolute(settings, config)}
    return plan, _configs(source, plan), source


def _continue(
    comparison: Comparison,
    source: str | None,
    methods: str | Sequence[str] | None,
    seeds: int | None,
    settings: Settings,
) -> Federation:
    """Returns the federation of the plan, after adding the methods and seeds that are new to it."""
    plan, source = comparison.resume(source, settings)
    known, first = comparison.names, plan["seeds"][0]
    added = [] if methods is None else choose_methods(methods)
    all_methods = list(dict.fromkeys([*plan["methods"], *added]))
    many = max(len(plan["seeds"]), seeds or 1)
    here = comparison.config(known[0], moved(settings))
    if all_methods == plan["methods"] and many == len(plan["seeds"]):
        return check_all([here])
    plan = {**plan, "methods": all_methods, "seeds": list(range(first, first + many))}
    new = {name: config for name, config in _configs(source, plan).items() if name not in known}
    federation = check_all([here, *(_as(config, here) for config in new.values())])
    there = comparison.config(known[0])
    comparison.write(plan, {name: _as(config, there) for name, config in new.items()}, source)
    return federation


def _as(config: Config, other: Config) -> Config:
    """Returns a configuration with the paths, device and precision of another: relative paths may have changed."""
    return replace(
        config,
        data=replace(config.data, root=other.data.root),
        model=replace(config.model, weights=other.model.weights),
        distill=replace(config.distill, data=other.distill.data),
        run=replace(config.run, device=other.run.device, precision=other.run.precision),
    )


def _configs(source: str, plan: Mapping[str, Any]) -> dict[str, Config]:
    methods = plan["methods"]
    return {
        f"{method}-{seed}": resolve(source, given(for_method(method, plan["set"], methods), seed=seed))
        for seed in plan["seeds"]
        for method in methods
    }


def _trainer(comparison: Comparison, here: Settings, federation: Federation | None = None) -> Train:
    """Returns what trains a run by its name. Loads the data if they are not given, as in another process."""
    data = federation or federation_of(comparison.config(comparison.names[0], here))

    def one(name: str, callbacks: Sequence[Callback], say: Say, pool: Pool | None) -> None:
        path = comparison.path / name
        started, shared = begun(path), shared_backbone(comparison.path, comparison.config(name, here))
        with comparison.training(name):
            try:
                run = train(
                    str(comparison.path / "plan" / f"{name}.toml"),
                    set=here,
                    out=path,
                    resume=started,
                    federation=data,
                    backbone=shared if shared is not None and shared.is_file() else None,
                    callbacks=callbacks,
                    say=say,
                    pool=pool,
                )
            except Diverged as error:  # the other runs are compared without it
                say(f"warning: {name}: {error}")
            else:
                keep_backbone(run.folder, shared)

    return one
