"""Training in a run folder: a new run, a resumed one, and what is written at the end."""

import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..callbacks import Callback, Metrics, OnRound, check_callbacks
from ..client.cohort import SPLITS, LocalCohort
from ..client.scores import all_scores_on, majority_scores, mean_scores, personal_thresholds
from ..config import Config, build, describe, federation_of, resolve
from ..config.settings import given, path_text
from ..data import CORRUPTIONS, Federation, named_sets
from ..data.public import Chunks
from ..errors import InputError
from ..experiment import Experiment, Say
from ..lanes import Pool
from ..lanes.machine import precision_of
from ..methods import sizes_of
from ..models import same_weights
from ..predict.scores import DriftScorer
from ..privacy.guarantee import Guarantee
from ..report import write_report
from .calibration import calibrated, scorer
from .calibration import save as save_calibrations
from .files import locked, read_file, write_atomic
from .folder import RunFolder
from .manifest import METRICS
from .moment import Evaluation
from .names import (
    NewFolder,
    chosen_source,
    default_out,
    made_from,
    newest_path,
    refuse_other_settings,
    refuse_other_source,
    resumable,
)
from .run import Run, warn
from .shifts import Shifts

MARKS = {"gathered": "gathered", "trained": "updated"}  # names of the boundaries inside a round
PAUSE = 15.0  # seconds between checkpoints on a GPU, where taking one stops the training for a moment


class Saver:
    """Writes checkpoints, one after another.

    background: writes in a thread while the training goes on; rounds may be short there, so not all are saved.
    """

    def __init__(self, background: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, "perada-save") if background else None
        self._last: Future[None] | None = None
        self._now, self._at = now, now()

    def due(self) -> bool:
        """Whether a checkpoint can be taken without waiting for the one before."""
        written = self._last is None or self._last.done()
        return self._thread is None or (written and self._now() >= self._at + PAUSE)

    def take(self, write: Callable[[], None]) -> None:
        """Writes a checkpoint, after the one before; raises what went wrong with that one."""
        self._wait()
        self._at = self._now()
        if self._thread is None:
            write()
        else:
            self._last = self._thread.submit(write)

    def close(self) -> None:
        """Waits for the last checkpoint."""
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


def train(
    source: str | None = None,
    *,
    method: str | None = None,
    data: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    federation: Federation | None = None,
    backbone: Path | None = None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda text: None,
    pool: Pool | None = None,
) -> Run:
    """Trains a preset or a TOML file; the same keys as on the command line.

    federation: saves loading the same data again, where several runs share them. backbone: the result of an earlier
    run's FedAvg pretraining. pool: trains this run's lanes together with other runs'.
    """
    check_callbacks(callbacks)
    data = path_text(data)
    named, source = source, chosen_source(source, data)
    overrides = given(set, method=method, data=data, seed=seed, device=device)
    with ExitStack() as stack:  # holds the folder's lock, taken before anything in it is changed
        if resume:
            path = Path(out) if out is not None else newest_path(default_out(source, resolve(source, overrides)))
            run, experiment = _resume(path, named, overrides, federation, say, callbacks, stack)
            about = None
        else:
            config = resolve(source, overrides)
            path = Path(out) if out is not None else default_out(source, config)
            new = NewFolder(path, out is not None or overwrite, config, overwrite, stack)

            def pretrain(inner: Experiment) -> None:
                _pretrain(inner, new.made, callbacks, say)  # makes the folder only now

            experiment = build(config, backbone, say, federation, pretrain)
            config = new.config = experiment.config  # with the noise that was solved
            run, about = Run(new.made, config), {"source": made_from(source, config)}
            if backbone is not None and (rows := rows_beside(backbone)).is_file():
                pretraining_rows(run.folder).parent.mkdir(exist_ok=True)
                write_atomic(pretraining_rows(run.folder), read_file(rows))
        experiment.model.pool = pool
        _train(run, experiment, callbacks, about)
    now = experiment.now
    if experiment.spending.over(now.memory) and now.round < experiment.train.rounds:
        say(f"every client's Privacy.budget is spent after round {now.round}: nothing more is trained")
    busy, idle = experiment.model.lane_steps
    if busy:
        say(f"{busy:,} lane-steps; {idle / (busy + idle):.1%} of slots idle")
    return run


def run_in(experiment: Experiment, path: Path, callbacks: Sequence[Callback], resume: bool, overwrite: bool) -> Run:
    """Trains an experiment made from Python objects in a folder; returns the run."""
    check_callbacks(callbacks)
    config = describe(experiment)
    with ExitStack() as stack:
        if resume:
            stack.enter_context(resumable(path))
            folder = _locked(path, stack)
            refuse_other_settings(path, resolve(str(path / "config.toml")), config)
            folder.check_data(experiment.federation.facts())
            if folder.backbone is not None and not same_weights(experiment.net, folder.backbone):
                raise InputError(f"the network's weights are not those of {folder.backbone}: load them into it first")
            _continue(experiment, folder, config, warn)
        else:
            folder = NewFolder(path, True, config, overwrite, stack).made
        run = Run(folder, config, net=experiment.net)
        _train(run, experiment, callbacks, None if resume else {})
    return run


def _resume(
    path: Path,
    source: str | None,
    overrides: dict[str, Any],
    federation: Federation | None,
    say: Say,
    callbacks: Sequence[Callback],
    stack: ExitStack,
) -> tuple[Run, Experiment]:
    """Returns the run that its folder describes, ready to go on."""
    stack.enter_context(resumable(path))
    folder = _locked(path, stack)
    if "joined" in folder.about():
        raise InputError(f"{path} is of a client that joined a run: join again with more rounds, into another folder")
    stored = str(path / "config.toml")
    config = resolve(stored, overrides)
    refuse_other_settings(path, resolve(stored), config)
    if source is not None:
        refuse_other_source(folder, source, config, overrides)
    federation = federation or federation_of(config)
    folder.check_data(federation.facts())
    pretrain = partial(_pretrain, folder=folder, callbacks=callbacks, say=say)
    experiment = build(config, folder.backbone, say, federation, pretrain)
    more = _continue(experiment, folder, config, say)
    if not more and (path / "summary.json").is_file():
        say(f"{path} was finished already: nothing is left to train; a larger Train.rounds adds rounds")
    return Run(folder, config), experiment


def _locked(path: Path, stack: ExitStack) -> RunFolder:
    """Returns the folder of a run to resume, which no other process may use until `stack` is closed."""
    folder = RunFolder.open(path)
    stack.enter_context(locked(path))
    return folder


def _continue(experiment: Experiment, folder: RunFolder, config: Config, say: Say) -> bool:
    """Goes on after the newest checkpoint; returns whether there are rounds left to train."""
    digest = experiment.public_digest
    if folder.about().get("public", digest) != digest:
        raise InputError(f"the public images are not those that {folder.path} was made with: give the old ones")
    saved = folder.resume(config.train.rounds, say, experiment.now.round)
    if saved is not None:
        experiment.restore(saved)
    if (text := config.toml().encode()) != read_file(folder.path / "config.toml"):
        write_atomic(folder.path / "config.toml", text)
    return experiment.now.round < experiment.train.rounds


def _train(run: Run, experiment: Experiment, callbacks: Sequence[Callback], about: Mapping[str, Any] | None) -> None:
    """Trains to the last round, and writes the summary and the report. about: what data.json adds, of a new run."""
    run.experiment, run.federation = experiment, experiment.federation  # no need to read the last checkpoint again
    with resumable(run.path):
        if about is not None:
            public = {"public": experiment.public_digest} if experiment.public else {}
            run.folder.write_json("data.json", {**experiment.federation.facts(), **public, **about})
        if run.folder.backbone is None and (tensors := experiment.frozen_to_save()):
            run.folder.save_backbone(tensors)
        if about is not None and experiment.now.round:  # it has trained before, maybe to its last round
            experiment.save(run.folder)
        row = train_in(experiment, run.folder, callbacks)
        conclude(run, experiment, row)


def pretraining_rows(folder: RunFolder) -> Path:
    """Returns the file that says what a run's pretraining sent."""
    return folder.path / "pretrain" / METRICS


def rows_beside(backbone: Path) -> Path:
    """Returns where runs that share a pretrained backbone find what its pretraining sent."""
    return backbone.with_suffix(".jsonl")


def _pretrain(inner: Experiment, folder: RunFolder, callbacks: Sequence[Callback], say: Say) -> None:
    """Runs FedAvg pretraining as a run inside the run, so that it is saved and resumed like any other."""
    folder.write_json("data.json", inner.federation.facts())  # what a resumed run is checked against
    home = RunFolder(folder.path / "pretrain")
    saved = home.resume(inner.train.rounds, say)
    if saved is not None:
        inner.restore(saved)
    with resumable(folder.path):
        train_in(inner, home, [OnRound(c.round) for c in callbacks], stage="pretraining")
    shutil.rmtree(home.checkpoints)  # its result is backbone.safetensors; its metrics.jsonl stays


def train_in(
    experiment: Experiment,
    folder: RunFolder,
    callbacks: Sequence[Callback] = (),
    splits: Sequence[str] = SPLITS,
    stage: str = "training",
) -> Evaluation:
    """Trains to the last round, and saves and evaluates (on `splits`) on the way; returns the last evaluation.

    An interrupt saves the last finished round, and is raised again.
    """
    local, every = isinstance(experiment.cohort, LocalCohort), experiment.options.checkpoint_every
    rows = {row.round: row for row in folder.evaluations()}
    saver = Saver(background=local and experiment.device.type != "cpu")
    listeners = [Metrics(folder), *callbacks]
    try:
        for callback in listeners:
            callback.start(experiment)
        for step in experiment.progress(rows, splits):
            began = step.round - (step.event == "trained")  # boundaries inside a round have its number at its start
            if step.event in MARKS:
                experiment.mark(MARKS[step.event], began)
            if step.row is not None:
                rows[step.round] = step.row
                for callback in listeners:
                    callback.evaluation(step.row)
                experiment.mark("measured", step.round)
            if step.event == "round":
                for callback in listeners:
                    callback.round(replace(step, row=rows.get(step.round), stage=stage))
            last = step.round >= experiment.last_round
            if step.event == "trained" and (last or not local or (step.round % every == 0 and saver.due())):
                saver.take(experiment.snapshot(folder))
                experiment.mark("saved", began)
            if step.event == "finished":
                saver.take(experiment.snapshot(folder))
                experiment.mark("finished", began)
        for callback in listeners:
            callback.end(experiment)
        return rows[experiment.now.round]
    except KeyboardInterrupt:
        if experiment.now.changed:
            saver.take(experiment.snapshot(folder))
        raise
    finally:
        saver.close()


def conclude(run: Run, experiment: Experiment, row: Evaluation) -> None:
    """Writes summary.json and report.html."""
    summary = summary_of(run, experiment, row)
    pretrained = RunFolder(run.path / "pretrain").metrics()
    if pretrained:  # full models crossed the network then
        summary["pretrain"] = {k: pretrained[-1][k] for k in ("round", "bytes_up", "bytes_down", "seconds")}
    judge = _drift_judge(run, experiment)
    if experiment.options.shifts and experiment.federation.clients:
        sets = named_sets(experiment.federation, "shifted", severities=experiment.options.severities)
        whole = experiment.global_model if summary["global_model"] else None
        lanes = [experiment.personal(), *([] if whole is None else [whole])]
        see = partial(judge.see_all, "shifted") if judge else ignore
        each = all_scores_on(experiment.model, lanes, experiment.federation, sets, see)
        personal, *server = [mean_scores(experiment.federation, scores) for scores in each]
        summary["shifted"] = personal.as_dict()
        summary["shifts"] = Shifts.of(list(CORRUPTIONS), experiment.options.severities, each).as_dict()
        for scores in server:
            summary["global_model"] |= {"shifted": scores.mean}
    if judge:
        summary["drift"] = judge.result().as_dict()
    run.folder.finish(summary)
    write_report([run], run.path / "report.html")


def ignore(logits: Sequence[Tensor], targets: Tensor) -> None:
    """Does nothing."""


def _drift_judge(run: Run, experiment: Experiment) -> DriftScorer | None:
    """Writes drift.json; returns what has scored the clients with it. None where drift cannot be noticed."""
    federation, options = experiment.federation, experiment.drift
    if not isinstance(experiment.cohort, LocalCohort) or (federation.multilabel and not options.multilabel):
        return None
    try:
        experiment.both_models()
    except InputError:  # of a method with one kind of model
        return None
    public = experiment.public.images if isinstance(experiment.public, Chunks) else None
    if options.prior == "public" and public is None:
        return None
    run.calibrations = calibrated(experiment, federation, public)
    save_calibrations(run.folder, experiment, run.calibrations)
    judge = scorer(experiment, federation, run.calibrations)
    judge.own()
    return judge


def summary_of(run: Run, experiment: Experiment, row: Evaluation) -> dict[str, Any]:
    """Returns what summary.json says: the last evaluation, and what the run cost."""
    config, federation, more = run.config, experiment.federation, dict[str, Any]()
    if (privacy := experiment.privacy).on:
        options = (privacy.level, privacy.noise, privacy.clip, privacy.delta, privacy.accountant)
        more["privacy"] = Guarantee(*options, experiment.epsilons, privacy.budget).as_dict()
    if federation.multilabel and federation.clients:
        more["thresholds"] = personal_thresholds(experiment.model, experiment.personal(), federation)
    return {
        "name": run.path.name,
        "data": federation.name,
        "method": config.method_name,
        "metric": "auc" if federation.multilabel else "accuracy",
        **row.as_dict(),
        "cohort": experiment.train.cohort or len(experiment.clients),
        "guarded": experiment.distill.guard != "none",
        "parameters": sizes_of(experiment.method, experiment.model),
        "majority": {split: scores.as_dict() for split, scores in majority_scores(federation).items()},
        "versions": {"perada": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": str(experiment.device),
        "precision": precision_of(experiment.options.precision, experiment.device),
        "threads": torch.get_num_threads(),
        **more,
    }
