"""Train, load, use: what `import perada` gives and what the command line is thin over."""

from __future__ import annotations

import platform
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..client.scores import Scores, all_scores_on, personal_scores, scores_on
from ..config import Config, resolve
from ..data import SEVERITIES, Federation, blank, build_federation, data_home, named_sets, place_of
from ..errors import InputError, unknown
from ..experiment import DTYPES, Say, Simulation, precision_of, prepare
from ..lanes import Pool, State
from ..methods import method_sizes
from ..models import count_groups
from ..predict.export import about, check_out, weights_of, write_program, write_weights
from ..predict.pictures import predictions
from ..report import write_report
from .folder import RunFolder, device_of, locked, write_atomic
from .loop import Progress
from .loop import run as run_rounds
from .names import (
    NewFolder,
    chosen_source,
    default_out,
    made_from,
    newest_path,
    not_empty,
    refuse_other,
    resumable,
)

OWN = {"local": "local_test", "val": "local_val", "global": "global_test"}  # test sets that every run has


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


class Run:
    """A run folder, opened. Weights and data are read when they are first needed; what is to be known about them then
    is said with `say`, by default as a Python warning.

    `given`: the user says where the data are, so that they are looked at even where they are not needed.
    """

    def __init__(self, folder: RunFolder, config: Config, say: Say = _warn, given: bool = False) -> None:
        self.folder, self.config, self.path, self.say, self.given = folder, config, folder.path, say, given

    @cached_property
    def simulation(self) -> Simulation:
        """The run at its newest checkpoint."""
        sim = prepare(self.config, self.folder.backbone, federation=self.names, to_train=False)
        saved, passed_over = self.folder.load()
        for line in passed_over:
            self.say(f"{self.path}: {line}")
        if saved is None:
            raise InputError(f"{self.path} has no checkpoint yet: train it first")
        sim.restore(saved)
        return sim

    @property
    def summary(self) -> dict[str, Any]:
        return self.folder.summary()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.folder.metrics()

    @cached_property
    def federation(self) -> Federation:
        """Who holds what; needs the data, not the weights."""
        if (self.path / "flower.json").is_file():
            raise InputError(f"the images of {self.path} are at its sites: nothing here can be computed from them")
        found = build_federation(self.config.data, device_of(self.config.run.device))
        self.folder.check_data(_data_facts(found))
        return found

    @cached_property
    def names(self) -> Federation:
        """Who the clients are and what they tell apart, without their images where the run has noted it: weights and
        predictions need no more."""
        if self.given or "federation" in self.__dict__:
            return self.federation
        return blank(self.folder.about(), device_of(self.config.run.device)) or self.federation

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.names.clients)

    def table(self) -> list[dict[str, Any]]:
        """One row a client: its data and its personal model's scores."""
        rows = self.metrics
        if not rows:
            raise InputError(f"{self.path} was not evaluated yet: finish it with --resume")
        last, sizes = rows[-1], self.folder.about().get("clients")
        if sizes is None:  # a run made before that was written down
            sizes = {c.name: [len(c.train), len(c.val), len(c.test)] for c in self.federation.clients}
        return [
            {
                "client": name,
                **dict(zip(("train", "val", "test"), sizes[name], strict=True)),
                **{s: last[s]["per_client"][name] for s in ("local_test", "local_val", "global_test")},
            }
            for name in self.clients
        ]

    def state(self, client: str) -> State:
        """What one client predicts with, one lane: its personal adapter (or model)."""
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        lanes = self.simulation.personal()
        at = self.clients.index(client) if lanes.lanes > 1 else 0
        return lanes.map(lambda t: t[at : at + 1])

    def model(self, client: str) -> nn.Module:
        """A plain torch module on the CPU, in eval mode, personal adapter in place. Input: `normalise(images)`."""
        return self.simulation.model.plain(self.state(client)).cpu()

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 `[n, C, H, W]` -> what `model()` takes."""
        return self.names.prepare(images, DTYPES[self.config.run.precision])

    def evaluate(
        self, on: str | Sequence[str] = ("local", "global"), progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Scores]:
        """`local`, `val`, `global`, or a name of `data.named_sets`: `fog:3`, `fog`, `shifted`, `cifar10.1`, ... As in a
        run's summary, `shifted` has the severities of `run.severities`. `progress`: copies made, of how many."""
        asked, held, sim = [on] if isinstance(on, str) else list(on), self.federation, self.simulation
        lanes = sim.personal()
        plain = [s for s in asked if s in OWN]
        out = personal_scores(sim.model, lanes, held, plain) if plain else {}
        for name in asked:
            if name not in plain:
                official = name.partition(":")[0]
                home = place_of(official, self.config.data.root) if official.startswith("cifar10") else None
                levels = self.config.run.severities if name == "shifted" else SEVERITIES
                sets = named_sets(held, name, home or self.config.data.root or data_home(), levels, progress)
                out[name] = scores_on(sim.model, lanes, held, sets)
        return {key: out[key] for key in (OWN.get(name, name) for name in asked)}

    def predict(self, client: str, images: str | Path | Sequence[str | Path]) -> list[dict[str, Any]]:
        """Class names with probabilities, most probable first; label probabilities for multi-label data."""
        paths = [images] if isinstance(images, str | Path) else list(images)
        return predictions(self.model(client), self.names, DTYPES[self.config.run.precision], client, paths)

    def export(self, client: str, out: str | Path, merged: bool = False) -> None:
        """FILE.safetensors: the personal part, or with `merged` the whole network, ready for `load_state_dict`.
        FILE.pt2 and FILE.onnx: the whole network as a program, `normalise`d images `[n, 3, H, W]` in, logits out."""
        out = Path(out)
        check_out(out)
        data = self.names
        size = list(data.images.shape[2:])
        told = {"mean": data.mean, "std": data.std, "size": size, "multilabel": data.multilabel}
        said = about(self.config, client, data.classes, **told)
        if out.suffix == ".safetensors":
            held = self.model(client).state_dict() if merged else weights_of(self.state(client))
            write_weights(out, held, said)
        else:
            write_program(out, self.model(client), size, said)


def load(path: str | Path, *, data: str | Path | None = None, device: str = "auto", say: Say = _warn) -> Run:
    """Open a run folder, on this machine's device; `data` says where your own images are now, if they moved."""
    not_empty("--data", data)
    folder = RunFolder.open(Path(path))
    moved = {"run.device": device} | ({"data.root": str(data)} if data is not None else {})
    return Run(folder, resolve(str(folder.path / "config.toml"), moved), say, data is not None)


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
    on_round: Callable[[Progress], None] = lambda progress: None,
    say: Say = lambda text: None,
    pool: Pool | None = None,
) -> Run:
    """Train a preset or a TOML file; the same keys as on the command line.

    `federation` saves loading the same data again, where several runs share them; `backbone` is what FedAvg
    pretraining (`model.weights=fedavg`) gave an earlier run; `pool` trains its lanes together with other runs'.
    """
    data = None if data is None else str(data)
    given, source = source, chosen_source(source, data)
    overrides = dict(set or {})
    for key, value in (("method.name", method), ("data.root", data), ("run.seed", seed), ("run.device", device)):
        if value is not None:
            overrides[key] = value
    with ExitStack() as held:  # the folder's lock, before anything in it is changed
        if resume:
            path = Path(out) if out is not None else newest_path(default_out(source, resolve(source, overrides)))
            run, sim = _resume(path, given, overrides, federation, say, on_round, held)
        else:
            config = resolve(source, overrides)
            path = Path(out) if out is not None else default_out(source, config)
            new = NewFolder(path, out is not None or overwrite, config, overwrite, held)
            sim = prepare(config, backbone, say, federation, lambda inner: _pretrain(inner, new.made, on_round))
            run = Run(new.made, config)
        sim.model.pool = pool
        # The run is at its newest checkpoint: no need to read that again.
        run.__dict__.update(simulation=sim, federation=sim.federation)
        with resumable(run.path):
            if not resume:
                about = {**_data_facts(sim.federation), "source": made_from(source, config)}
                run.folder.write_json("data.json", about)
            if sim.backbone is not None and run.folder.backbone is None:
                run.folder.save_backbone(sim.backbone)
            _finish(run, run_rounds(sim, run.folder, on_round))
    asked, empty = sim.model.lane_steps
    if asked:
        say(f"{asked:,} lane-steps; {empty / (asked + empty):.1%} more in slots that stood empty")
    return run


def _data_facts(federation: Federation) -> dict[str, Any]:
    """What a run must find again to be opened: who holds which images, and how much of which classes."""
    return {
        "classes": list(federation.classes),
        "image": list(federation.images.shape[1:]),
        "multilabel": federation.multilabel,
        "mean": list(federation.mean),
        "std": list(federation.std),
        "clients": {c.name: [len(c.train), len(c.val), len(c.test)] for c in federation.clients},
        "split": federation.fingerprint,
    }


def _pretrain(inner: Simulation, folder: RunFolder, on_round: Callable[[Progress], None]) -> None:
    """FedAvg pretraining as a run inside the run, so that it is saved and resumed like any other."""
    folder.write_json("data.json", _data_facts(inner.federation))  # what a kill in here must find again
    home = RunFolder(folder.path / "pretrain")
    saved, _ = home.load()
    if saved is not None:
        inner.restore(saved)
    with resumable(folder.path):
        run_rounds(inner, home, lambda p: on_round(replace(p, stage="pretraining")))
    shutil.rmtree(home.checkpoints)  # its result is backbone.safetensors; its metrics.jsonl stays


def _resume(
    path: Path,
    source: str | None,
    overrides: dict[str, Any],
    federation: Federation | None,
    say: Say,
    on_round: Callable[[Progress], None],
    held: ExitStack,
) -> tuple[Run, Simulation]:
    """The run as its folder describes it. Only the device, its lanes, the number of rounds and where your own data and
    the public images are may be given anew."""
    folder = RunFolder.open(path)
    held.enter_context(locked(path))
    stored = str(path / "config.toml")
    free = ["run.device", "run.lanes", "train.rounds", "data.root"]
    there, here = (Path(str(p)) for p in (resolve(stored).distill.data, overrides.get("distill.data", "")))
    if there.name == here.name and there.is_absolute() and here.is_absolute():
        free.append("distill.data")  # the same file, elsewhere
    may = {k: v for k, v in overrides.items() if k in free}
    if resolve(stored, overrides) != (config := resolve(stored, may)):
        key = next(k for k in overrides if resolve(stored, {**may, k: overrides[k]}) != config)
        raise InputError(f"{path} was made with another {key}: resume it without that setting, or choose another --out")
    if source is not None:
        refuse_other(folder, source, config, overrides)
    saved, passed_over = folder.load()
    for line in passed_over:
        say(line)
    if saved is not None and saved.round > config.train.rounds:
        raise InputError(f"{path} has {saved.round} rounds already: train.rounds={config.train.rounds} would undo some")
    federation = federation or build_federation(config.data, device_of(config.run.device))
    folder.check_data(_data_facts(federation))
    sim = prepare(config, folder.backbone, say, federation, pretrain=lambda inner: _pretrain(inner, folder, on_round))
    if saved is not None:
        sim.restore(saved)
    known = sim.now.round
    more = known < config.train.rounds
    if more and sim.now.finished:
        sim.reopen()
        known -= 1  # that row was measured after the last stage
    folder.cut_metrics(known)
    write_atomic(path / "config.toml", config.toml().encode())
    if more:
        (path / "summary.json").unlink(missing_ok=True)  # of fewer rounds; it is written again at the end
    elif (path / "summary.json").is_file():
        say(f"{path} was finished already: nothing is left to train; --set train.rounds=N adds rounds")
    return Run(folder, config), sim


def summary_of(run: Run, federation: Federation, clients: int, device: torch.device, row: dict[str, Any]) -> Any:
    """What summary.json says: the last evaluation and what it took."""
    backbone, classes = run.config.model.backbone, len(federation.classes)
    sizes = method_sizes(run.config.method_name, backbone, classes)
    return {
        "name": run.path.name,
        "data": federation.name,
        "method": run.config.method_name,
        "metric": "auc" if federation.multilabel else "accuracy",
        **row,
        "cohort": run.config.train.cohort or clients,
        "guarded": run.config.distill.guard != "none",
        "parameters": {**sizes, "full": count_groups(backbone, classes)["full"]["parameters"]},
        "versions": {"perada": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": str(device),
        "precision": precision_of(run.config.run.precision, device),
        "threads": torch.get_num_threads(),
    }


def _finish(run: Run, row: dict[str, Any]) -> None:
    """summary.json and report.html."""
    sim = run.simulation
    summary = summary_of(run, sim.federation, len(sim.federation.clients), sim.model.device, row)
    pretrained = RunFolder(run.path / "pretrain").metrics()
    if pretrained:  # full models crossed the network then
        summary["pretrain"] = {k: pretrained[-1][k] for k in ("round", "bytes_up", "bytes_down", "seconds")}
    if run.config.run.shifts:
        sets = named_sets(sim.federation, "shifted", severities=run.config.run.severities)
        lanes = [sim.personal(), *([sim.now.broadcast] if summary["global_model"] else [])]
        personal, *server = all_scores_on(sim.model, lanes, sim.federation, sets)
        summary["shifted"] = personal.as_dict()
        for found in server:
            summary["global_model"] |= {"shifted": found.as_dict()["mean"]}
    run.folder.write_json("summary.json", summary)
    write_report([run], run.path / "report.html")
