"""Training in a run folder: a new run, a resumed one, and what is written at the end."""

from __future__ import annotations

import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..callbacks import Callback, OnRound, check_callbacks
from ..client.scores import all_scores_on
from ..config import Config, build, describe, federation_of, resolve
from ..config.settings import RESUMED, changeable, given
from ..data import Federation, named_sets
from ..errors import InputError
from ..experiment import Experiment, Say
from ..lanes import Pool
from ..lanes.machine import precision_of
from ..methods import sizes_of
from ..models import same_weights
from ..report import write_report
from .folder import Checkpoint, RunFolder, locked, write_atomic
from .loop import train_in
from .names import (
    NewFolder,
    chosen_source,
    default_out,
    made_from,
    newest_path,
    refuse_other,
    resumable,
)
from .rows import Evaluation
from .run import Run


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

    federation: saves loading the same data again, where several runs share them. backbone: what FedAvg pretraining
    gave an earlier run. pool: trains this run's lanes together with other runs'.
    """
    check_callbacks(callbacks)
    data = None if data is None else str(data)
    named, source = source, chosen_source(source, data)
    overrides = given(set, method=method, data=data, seed=seed, device=device)
    with ExitStack() as stack:  # holds the folder's lock, taken before anything in it is changed
        if resume:
            path = Path(out) if out is not None else newest_path(default_out(source, resolve(source, overrides)))
            run, experiment = _resume(path, named, overrides, federation, say, callbacks, stack)
        else:
            config = resolve(source, overrides)
            path = Path(out) if out is not None else default_out(source, config)
            new = NewFolder(path, out is not None or overwrite, config, overwrite, stack)
            experiment = build(config, backbone, say, federation, lambda inner: _pretrain(inner, new.made, callbacks))
            run = Run(new.made, config)
        experiment.model.pool = pool
        about = {} if resume else {"source": made_from(source, config)}
        _train(run, experiment, callbacks, about if not resume else None)
    asked, empty = experiment.model.lane_steps
    if asked:
        say(f"{asked:,} lane-steps; {empty / (asked + empty):.1%} of slots idle")
    return run


def run_in(experiment: Experiment, path: Path, callbacks: Sequence[Callback], resume: bool, overwrite: bool) -> Run:
    """Trains an experiment made from Python objects in a folder; returns the run."""
    check_callbacks(callbacks)
    config = describe(experiment)
    with ExitStack() as stack:
        if resume:
            folder = RunFolder.open(path)
            stack.enter_context(locked(path))
            stored = resolve(str(path / "config.toml"))
            _same(path, stored, config)
            folder.check_data(experiment.federation.facts())
            saved, skipped = folder.load()
            for line in skipped:
                warnings.warn(f"{path}: {line}", stacklevel=3)
            _not_fewer(path, saved, config)
            if folder.backbone is not None and not same_weights(experiment.net, folder.backbone):
                raise InputError(f"the network's weights are not those of {folder.backbone}: load them into it first")
            _continue(experiment, folder, saved)
            write_atomic(path / "config.toml", config.toml().encode())
            run = Run(folder, config, net=experiment.net)
            _train(run, experiment, callbacks, None)
        else:
            folder = NewFolder(path, True, config, overwrite, stack).made
            run = Run(folder, config, net=experiment.net)
            _train(run, experiment, callbacks, {})
    return run


def _train(run: Run, experiment: Experiment, callbacks: Sequence[Callback], about: Mapping[str, Any] | None) -> None:
    """Trains to the last round and writes what is to be known of the run. about: of a new run, what data.json adds."""
    # The run is at its newest checkpoint: no need to read that again.
    run.__dict__.update(experiment=experiment, federation=experiment.federation)
    with resumable(run.path):
        if about is not None:
            run.folder.write_json("data.json", {**experiment.federation.facts(), **about})
        if run.folder.backbone is None and (tensors := experiment.frozen_to_save()):
            run.folder.save_backbone(tensors)
        if about is not None and experiment.now.round:  # it has trained before, maybe to its last round
            experiment.save(run.folder)
        row = train_in(experiment, run.folder, callbacks)
        conclude(run, experiment, row)


def _pretrain(inner: Experiment, folder: RunFolder, callbacks: Sequence[Callback]) -> None:
    """FedAvg pretraining as a run inside the run, so that it is saved and resumed like any other."""
    folder.write_json("data.json", inner.federation.facts())  # what a resumed run must find again
    home = RunFolder(folder.path / "pretrain")
    saved, _ = home.load()
    if saved is not None:
        inner.restore(saved)
    with resumable(folder.path):
        train_in(inner, home, [OnRound(c.round) for c in callbacks], stage="pretraining")
    shutil.rmtree(home.checkpoints)  # its result is backbone.safetensors; its metrics.jsonl stays


def _resume(
    path: Path,
    source: str | None,
    overrides: dict[str, Any],
    federation: Federation | None,
    say: Say,
    callbacks: Sequence[Callback],
    stack: ExitStack,
) -> tuple[Run, Experiment]:
    """The run as its folder describes it. Only the device, its lanes, the number of rounds and where your own data and
    the public images are may be given anew."""
    folder = RunFolder.open(path)
    stack.enter_context(locked(path))
    stored = str(path / "config.toml")
    may = changeable(resolve(stored), overrides)
    if resolve(stored, overrides) != (config := resolve(stored, may)):
        key = next(k for k in overrides if resolve(stored, {**may, k: overrides[k]}) != config)
        raise InputError(f"{path} was made with another {key}: resume it without that setting, or choose another --out")
    if source is not None:
        refuse_other(folder, source, config, overrides)
    saved, skipped = folder.load()
    for line in skipped:
        say(line)
    _not_fewer(path, saved, config)
    federation = federation or federation_of(config)
    folder.check_data(federation.facts())
    experiment = build(
        config, folder.backbone, say, federation, pretrain=lambda inner: _pretrain(inner, folder, callbacks)
    )
    more = _continue(experiment, folder, saved)
    write_atomic(path / "config.toml", config.toml().encode())
    if not more and (path / "summary.json").is_file():
        say(f"{path} was finished already: nothing is left to train; a larger Train.rounds adds rounds")
    return Run(folder, config), experiment


def _not_fewer(path: Path, saved: Checkpoint | None, config: Config) -> None:
    if saved is not None and saved.round > config.train.rounds:
        raise InputError(f"{path} has {saved.round} rounds already: Train.rounds={config.train.rounds} would undo some")


def _continue(experiment: Experiment, folder: RunFolder, saved: Checkpoint | None) -> bool:
    """Goes on after a checkpoint; returns whether there are rounds left to train."""
    if saved is not None:
        experiment.restore(saved)
    known = experiment.now.round
    more = known < experiment.train.rounds
    if more and experiment.now.finished:  # the last stage is undone, and that row was measured after it
        known -= 1
    folder.cut_metrics(known)
    if more:
        (folder.path / "summary.json").unlink(missing_ok=True)  # of fewer rounds; it is written again at the end
    return more


def _same(path: Path, stored: Config, config: Config) -> None:
    """Refuses to resume a run with other settings than it was made with."""
    old, new = stored.flat(), config.flat()
    for key in (*new, *(old.keys() - new.keys())):
        if key not in RESUMED and old.get(key) != new.get(key):
            raise InputError(f"{path} was made with another {key}: give the old one, or choose another folder")


def conclude(run: Run, experiment: Experiment, row: Evaluation) -> None:
    """Writes summary.json and report.html."""
    summary = summary_of(run, experiment, row)
    pretrained = RunFolder(run.path / "pretrain").metrics()
    if pretrained:  # full models crossed the network then
        summary["pretrain"] = {k: pretrained[-1][k] for k in ("round", "bytes_up", "bytes_down", "seconds")}
    if experiment.options.shifts and experiment.federation.clients:
        sets = named_sets(experiment.federation, "shifted", severities=experiment.options.severities)
        whole = experiment.global_model if summary["global_model"] else None
        lanes = [experiment.personal(), *([] if whole is None else [whole])]
        personal, *server = all_scores_on(experiment.model, lanes, experiment.federation, sets)
        summary["shifted"] = personal.as_dict()
        for scores in server:
            summary["global_model"] |= {"shifted": scores.mean}
    run.folder.write_json("summary.json", summary)
    write_report([run], run.path / "report.html")


def summary_of(run: Run, experiment: Experiment, row: Evaluation) -> dict[str, Any]:
    """Returns what summary.json says: the last evaluation and what it took."""
    config, federation = run.config, experiment.federation
    return {
        "name": run.path.name,
        "data": federation.name,
        "method": config.method_name,
        "metric": "auc" if federation.multilabel else "accuracy",
        **row.as_dict(),
        "cohort": experiment.train.cohort or len(experiment.clients),
        "guarded": experiment.distill.guard != "none",
        "parameters": sizes_of(experiment.method, experiment.model),
        "versions": {"perada": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": str(experiment.device),
        "precision": precision_of(experiment.options.precision, experiment.device),
        "threads": torch.get_num_threads(),
    }
