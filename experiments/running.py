"""Runs an experiment: run by run, in slices of time, on any machine that has its folder."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from perada.callbacks import OnRound
from perada.config import Config, resolve
from perada.config.objects import check
from perada.data import VALIDATION, Federation
from perada.errors import InputError, Interrupted, RunError, unknown
from perada.experiment import Say
from perada.lanes import Pool
from perada.runs.files import locked, write_atomic
from perada.runs.folder import RunFolder
from perada.runs.moment import Progress
from perada.runs.names import resumable
from perada.runs.run import load
from perada.runs.train import train
from perada.sweep.plan import check_all, keep_backbone, shared_backbone, validated
from perada.sweep.workers import jobs_for, share_lanes, shares

from . import results
from .results import Result
from .study import settings_of, validation_of
from .trials import Experiment, Trial

Heard = Callable[[Progress], None]
OnRun = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Place:
    """Where an experiment reads and writes. Results do not depend on it."""

    out: Path  # run folders: OUT/EXPERIMENT/RUN
    results: Path  # RESULTS/EXPERIMENT/RUN.json
    data: str | None = None  # a folder with the data sets, or the file itself
    weights: str | None = None
    device: str | None = None

    def here(self, experiment: Experiment, trial: Trial) -> dict[str, Any]:
        """Returns the settings of this machine. A run's own public images are a file in the data folder."""
        found: dict[str, Any] = {} if self.device is None else {"run.device": self.device}
        if self.data is not None:
            file = Path(self.data) / experiment.file
            found["data.root"] = str(file if experiment.file and file.is_file() else self.data)
            if trial.settings.get("distill.data", VALIDATION) != VALIDATION:
                found["distill.data"] = str((Path(self.data) / trial.settings["distill.data"]).absolute())
        return found

    def start(self, experiment: Experiment, trial: Trial) -> dict[str, Any]:
        """Returns the weights of a new run; nothing if its settings name them."""
        if not experiment.needs_weights or "model.weights" in trial.settings or self.weights is None:
            return {}
        return {"model.weights": self.weights}


class Clock:
    """Stops runs in time, so that everything is saved before the time is over.

    It expects a round to take as long as the ones before, and adds the time of a checkpoint. A run that ends with
    corrupted test images needs `finishing` seconds for them, at most half of the whole time, until the first run has
    shown how long they take. A stopped run does not stop the runs beside it, but no further run begins.
    """

    def __init__(
        self,
        minutes: float | None,
        reserve: float = 15.0,
        finishing: float = 90.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now, self.stopped = now, False
        whole = None if minutes is None else minutes * 60
        self.end = None if whole is None else now() + whole
        self.reserve = reserve if whole is None else min(reserve, whole / 4)
        self.finishing = finishing if whole is None else min(finishing, whole / 2)
        self.longest = 0.0

    def finished(self, seconds: float) -> None:
        """Learns how many seconds the end of a run took."""
        self.longest = max(self.longest, seconds)
        self.finishing = max(10.0, 1.5 * self.longest)

    def over(self, needed: float) -> bool:
        """Returns whether fewer seconds are left, and remembers it."""
        over = self.end is not None and self.now() + needed > self.end
        self.stopped = self.stopped or over
        return over

    def watch(self, on_round: Heard, shifts: bool) -> Heard:
        """Returns `on_round`, with an interrupt where the next round would not fit."""
        gaps: list[float] = []
        before = self.now()

        def watched(progress: Progress) -> None:
            nonlocal before
            on_round(progress)
            gaps.append(self.now() - before)
            before = self.now()
            last = progress.round >= progress.rounds and progress.stage == "training"
            needed = self.reserve + 1.5 * max(gaps[-3:])
            if last:
                needed = self.finishing if shifts else 0.0
            if self.over(needed):
                raise KeyboardInterrupt

        return watched


@dataclass
class State:
    """What is done and what is left of an experiment."""

    experiment: Experiment
    found: dict[str, Result] = field(default_factory=dict)  # results that match the plan
    stale: dict[str, list[str]] = field(default_factory=dict)  # run -> settings that are not the plan's
    configs: dict[str, Config] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the runs that can train now

    @property
    def left(self) -> list[str]:
        return [t.name for t in self.experiment.trials if t.name not in self.found]

    def ready(self, only: Collection[str] = ()) -> list[str]:
        """Returns the runs of the first unfinished group that can train now; `only` names runs or groups."""
        several = [t for t in self.experiment.trials if t.name in self.settings and t.name not in self.found]
        several = [t for t in several if not only or t.name in only or t.group in only]
        return [t.name for t in several if t.group == several[0].group]


def state_of(experiment: Experiment, root: Path) -> State:
    """Returns the state according to the results. A result counts if its settings match the plan."""
    held, state = results.read(root, experiment.name), State(experiment)
    for trial in experiment.trials:  # runs that follow a choice come after its candidates
        settings = settings_of(experiment, trial, {n: validation_of(r) for n, r in state.found.items()})
        if settings is None:
            continue
        config = resolve(experiment.preset, settings)
        state.settings[trial.name], state.configs[trial.name] = settings, config
        result = held.get(trial.name)
        if result is not None and result["digest"] == results.digest(config):
            state.found[trial.name] = result
        elif result is not None:
            state.stale[trial.name] = sorted(
                k for k, v in result["settings"].items() if results.essence(config).get(k) != v
            ) or ["preset"]
    return state


def run_experiment(
    experiment: Experiment,
    place: Place,
    clock: Clock | None = None,
    together: int = 0,
    only: Sequence[str] = (),
    on_run: OnRun = lambda at, total, name: None,
    on_round: Heard = lambda progress: None,
    say: Say = lambda text: None,
) -> State:
    """Trains what is left, or `only` those runs or groups, until it is done or the time is over. Returns the state.

    `together` is the number of runs at once; 0 lets the device decide (one on a CPU).
    """
    clock, state = clock or Clock(None), state_of(experiment, place.results)
    known = list(dict.fromkeys([*experiment.groups, *(t.name for t in experiment.trials)]))
    for name in only:
        if name not in known:
            raise unknown("run", name, known)
    for run, keys in state.stale.items():
        say(f"{run}: its result has another {', '.join(keys)}: it runs again")
    if not state.ready(only):
        return state
    home = place.out / experiment.name
    for folder in (home, place.results / experiment.name):  # fail before training
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / ".trial", b"")
            (folder / ".trial").unlink(missing_ok=True)  # another process may do the same now
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    with locked(home):
        work = _Work(state, place, home, clock, cache(say), on_round, on_run, together)
        while (names := work.state.ready(only)) and not clock.stopped and not clock.over(clock.reserve):
            before = work.state.left
            work.group(names)
            if work.state.left == before and not clock.stopped:  # it would train forever
                raise RunError(f"{experiment.name}: the result of {before[0]} does not match its plan")
    return work.state


@dataclass
class _Work:
    """One call of `run_experiment`: what its runs share."""

    state: State
    place: Place
    home: Path
    clock: Clock
    say: Say
    on_round: Heard
    on_run: OnRun
    together: int
    federation: Federation | None = None

    def group(self, names: Sequence[str]) -> None:
        """Trains these runs, or the first of them that fit at once, then updates the state."""
        configs = {n: self._config(n) for n in names}
        if self.federation is None:
            methods = {c.method_name: c for c in reversed(configs.values())}  # missing data fail here
            self.federation = check_all(methods.values())
        for config in configs.values():
            check(config, self.federation)
        device = self.federation.device
        many = min(self.together or (jobs_for(len(names), device) if shares(device) else 1), len(names))
        if many > 1:
            names = names[:many]  # the others come next; results must say how many trained together
            try:
                share_lanes(names, many, lambda name, pool: self._one(name, configs[name], many, pool), self._done)
            except KeyboardInterrupt as stop:
                raise Interrupted(self.home) from stop
        else:
            for name in names:
                self._one(name, configs[name], 1, None)
                self._done(name)
        gc.collect()  # models and recorded steps form cycles that hold GPU memory
        self.state = state_of(self.state.experiment, self.place.results)

    def _config(self, name: str) -> Config:
        experiment = self.state.experiment
        trial = experiment.trial(name)
        if (
            experiment.needs_weights
            and not self.place.start(experiment, trial)
            and "model.weights" not in trial.settings
        ):
            self.say(f"no --weights given: {resolve(experiment.preset, {}).model.weights} weights")
        more = {**self.place.here(experiment, trial), **self.place.start(experiment, trial)}
        return resolve(experiment.preset, {**self.state.settings[name], **more})

    def _done(self, name: str) -> None:
        """Reports a run of the group that has finished or stopped."""
        experiment, root = self.state.experiment, self.place.results
        there = [t for t in experiment.trials if results.path_of(root, experiment.name, t.name).is_file()]
        self.on_run(len(there), len(experiment.trials), "stopping" if self.clock.stopped else f"{name} done")

    def _one(self, name: str, config: Config, many: int, pool: Pool | None) -> None:
        """Continues one run to its end, or to the end of the time."""
        if self.clock.stopped:
            return

        ended = 0.0

        def shown(progress: Progress) -> None:
            nonlocal ended
            ended = self.clock.now()
            for client in progress.failed:
                self.say(f"warning: {name}: {client}: training stopped being finite; kept its last state")
            self.on_round(progress)

        on_round = self.clock.watch(shown, config.run.shifts)
        try:
            with resumable(self.home):
                rows, last = self._train(name, config, on_round, pool)
        except KeyboardInterrupt as stop:
            if self.clock.stopped:
                return  # it is saved
            raise Interrupted(self.home) from stop
        except RunError as error:
            then = "what is finished is saved: the same command goes on from there"
            raise RunError(f"{name}: {error.what}", then) from error
        if config.run.shifts and ended:
            self.clock.finished(self.clock.now() - ended)
        trial, federation = self.state.experiment.trial(name), self.federation
        assert federation is not None
        weights = None if config.model.weights in results.OWN_WEIGHTS else self._weights(name, config)
        more = {"device": results.machine(federation.device), "together": many, "weights": weights}
        result = results.made(self.state.experiment.name, trial, self.state.settings[name], config, rows, last, **more)
        results.write(self.place.results, result)
        if not trial.tested:
            shutil.rmtree(self.home / name)

    def _weights(self, name: str, config: Config) -> dict[str, str] | None:
        """Returns the digest of the weights file, or of the run's own copy if that file is not here."""
        return results.file_digest(config.model.weights) or results.file_digest(
            str(self.home / name / "backbone.safetensors")
        )

    def _train(
        self, name: str, config: Config, on_round: Heard, pool: Pool | None
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
        """Returns a run's rows of metrics, and its summary or last row."""
        path, experiment = self.home / name, self.state.experiment
        trial = experiment.trial(name)
        assert self.federation is not None
        started = (path / "config.toml").is_file()
        if path.exists() and not started:
            _empty(path)
        if started:
            _same(path, config)
            _measured(path)
        if not trial.tested:
            splits = ("val", "server") if len(self.federation.server_val) else ("val",)
            last = validated(self.home, path, config, self.federation, [OnRound(on_round)], self.say, splits, pool)
            return RunFolder(path).metrics(), last.as_dict()
        if (path / "summary.json").is_file():  # only its result is missing
            run = load(path)
            return run.metrics, run.summary
        shared = shared_backbone(self.home, config)
        settings = self.place.here(experiment, trial)
        if not started:
            settings = {**self.state.settings[name], **settings, **self.place.start(experiment, trial)}
        run = train(
            experiment.preset,
            set=settings,
            out=path,
            resume=started,
            federation=self.federation,
            backbone=shared if shared is not None and shared.is_file() else None,
            callbacks=[OnRound(on_round)],
            say=self.say,
            pool=pool,
        )
        keep_backbone(run.folder, shared)
        return run.metrics, run.summary


def _same(path: Path, config: Config) -> None:
    """Refuses to continue a run with other settings: its preset may have changed since it began."""
    there, now = results.essence(resolve(str(path / "config.toml"), {})), results.essence(config)
    other = [k for k in now if there.get(k) != now[k]]
    if other:
        raise InputError(f"{path} began with another {other[0]}: move it away, or choose another --out")


def _empty(path: Path) -> None:
    """Removes what a kill left before the settings were written; refuses a folder that has more."""
    held = [p for p in path.rglob("*") if p.is_file() and not p.name.endswith(".part")]
    if held:
        raise InputError(f"{path} has {held[0].name} but no config.toml: copy the whole folder, or move it away")
    shutil.rmtree(path)


def _measured(path: Path) -> None:
    """Refuses to continue a run that lost measurements: its result would be incomplete."""
    config, folder = resolve(str(path / "config.toml"), {}), RunFolder(path)
    last, end = config.train.rounds, config.train.rounds + 1
    if not (path / "summary.json").is_file():  # rounds after the newest whole checkpoint are measured again
        found, _ = folder.load()
        end = 0 if found is None else found.round
    wanted = {n for n in range(1, end) if n % config.run.eval_every == 0 or n == last}
    if lost := wanted - {row["round"] for row in folder.metrics()}:
        then = f"copy that file again, or remove {path} to train it from the start"
        raise InputError(f"{path / 'metrics.jsonl'} lacks round {min(lost)}: {then}")


def lay_over(weights: Path, statistics: Path, out: Path) -> Path:
    """Writes the weights with the running statistics of another image size to `out`. Returns the file."""
    for file in (weights, statistics):
        if not file.is_file():
            raise InputError(f"no such file: {file}")
    try:
        held, over = (load_file(file) for file in (weights, statistics))
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {weights} or {statistics}: {error}") from error
    if strange := sorted(over.keys() - held.keys()):
        raise InputError(f"{statistics} has {strange[0]}, which {weights} does not have: are they of one network?")
    if other := sorted(n for n, t in over.items() if t.shape != held[n].shape):
        raise InputError(f"{statistics} has {other[0]} in another shape than {weights}: are they of one network?")
    path = out / f"{weights.stem}+{statistics.stem}.safetensors"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save({**held, **over}))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path
