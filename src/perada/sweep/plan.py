"""What a comparison and a search share: many trainings planned in a folder before the first of them starts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..callbacks import OnRound
from ..config import Config, resolve
from ..config.build import build, pretraining
from ..data import Federation, build_federation
from ..errors import InputError, unknown
from ..experiment import Experiment, Progress, Say
from ..lanes import Pool
from ..machine import device_of
from ..methods import REGISTRY, hyperparameters
from ..runs.folder import RunFolder, locked, write_atomic
from ..runs.loop import train_in
from ..runs.names import whole_name

MOVED = ("run.device", "run.lanes", "data.root")  # what may differ from the plan on the machine that resumes it


def choose_methods(text: str | Sequence[str] | None) -> list[str]:
    """`a,b,c` or `all` (None), in the order given."""
    names = ["all"] if text is None else text.split(",") if isinstance(text, str) else list(text)
    names = [n.strip() for n in names if n.strip()]
    if not names:
        raise InputError("--methods: name at least one method, or all")
    for name in names:
        if name != "all" and name not in REGISTRY:
            raise unknown("method", name, [*REGISTRY, "all"])
    return list(REGISTRY) if "all" in names else list(dict.fromkeys(names))


def settings_for(method: str, overrides: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """The overrides that mean something to this method; one that means nothing to any of them is an error."""
    for key in overrides:
        known = {f"method.{k}" for m in methods for k in hyperparameters(m)}
        if key == "method.name":
            raise InputError("method.name: choose the methods with --methods a,b,c")
        if key.startswith("method.") and not known:
            raise InputError(f"{key}: none of {', '.join(methods)} has settings of its own: remove it")
        if key.startswith("method.") and key not in known:
            raise unknown("key", key, known)
    mine = {f"method.{k}" for k in hyperparameters(method)}
    kept = {k: v for k, v in overrides.items() if not k.startswith("method.") or k in mine}
    return {**kept, "method.name": method}


def refuse_taken(path: Path, file: str) -> None:
    """Refuse a path that something else lies at. What a kill left of a plan that was never finished is no obstacle."""
    try:
        there = path.is_dir() and any(
            p.name not in ("plan", "source.toml") and p.name[0] != "." for p in path.iterdir()
        )
        taken = there or (path.exists() and not path.is_dir()) or (path / file).exists()
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}") from error
    if taken and (path / file).is_file():
        raise InputError(f"{path} exists: --resume continues it, --out picks another")
    if taken:
        raise InputError(f"{path} holds something else: choose another --out")


def read_plan(path: Path, file: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads((path / file).read_text("utf8"))
        return dict(found)
    except OSError as error:
        raise InputError(f"{path} is not a {what} (no {file}): check --out, or start one without --resume") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{path / file} is damaged: start anew with another --out") from error


def write_plan(path: Path, file: str, plan: Mapping[str, Any], configs: Mapping[str, Config], source: str) -> None:
    """The configurations first, then the plan that names them: it is there only when it is whole."""
    try:
        (path / "plan").mkdir(parents=True, exist_ok=True)
        copy = path / "source.toml"
        if not source.endswith(".toml"):
            copy.unlink(missing_ok=True)  # of a plan that was never finished
        elif not copy.exists() or not copy.samefile(Path(source).expanduser()):
            shutil.copyfile(Path(source).expanduser(), copy)
        for name, config in configs.items():
            write_atomic(path / "plan" / f"{name}.toml", config.toml().encode())
        write_atomic(path / file, (json.dumps(plan, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}") from error


def again(path: Path, plan: Mapping[str, Any], source: str | None, overrides: Mapping[str, Any]) -> str:
    """The source of a plan that is taken up again; refuses settings that are not the plan's."""
    copy = path / "source.toml"
    held = str(copy) if copy.is_file() else str(plan["source"])
    if source is not None and whole_name(source) != plan["source"]:
        raise InputError(f"{path} was made from {plan['source']}: resume it without {source}, or choose another --out")
    for key, value in json.loads(json.dumps(dict(overrides))).items():
        if key not in MOVED and (key not in plan["set"] or plan["set"][key] != value):
            raise InputError(f"{path} was made with another {key}: resume it without it, or choose another --out")
    return held


def check_all(configs: Iterable[Config]) -> Federation:
    """The one federation of them all; everything that can be refused is refused now, before the first training."""
    federation: Federation | None = None
    first: Config | None = None
    for config in configs:
        if federation is None or first is None:
            first, federation = config, build_federation(config.data, device_of(config.run.device))
        if config.data != first.data:
            raise InputError(
                f"{config.method_name} and {first.method_name} differ in their [data] settings: all share one split"
            )
        build(config, federation=federation, pretrain=_not_now)
    assert federation is not None
    return federation


def _not_now(sim: Experiment) -> None:
    """Pretraining has its time when the run has."""


@contextmanager
def working_in(path: Path, fresh: bool) -> Iterator[None]:
    """One process at a time works on a plan. A folder that was made for one that was then refused is taken away."""
    try:
        made = fresh and not path.exists()
        if fresh:
            path.mkdir(parents=True, exist_ok=True)
        with locked(path) if path.is_dir() else nullcontext():
            yield
    except OSError as error:
        if isinstance(error.filename, str | Path) and str(error.filename).startswith(str(path)) and fresh:
            raise InputError(f"cannot write to {path}: {error.strerror}") from error
        raise
    except InputError:
        if made and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        raise


def shared_backbone(path: Path, config: Config) -> Path | None:
    """Where the trainings of a plan keep what FedAvg pretraining gave: it is the same for all that ask for the same."""
    if config.model.weights != "fedavg":
        return None
    digest = hashlib.sha256(pretraining(config).toml().encode()).hexdigest()[:16]
    return path / "pretrain" / f"{digest}.safetensors"


def keep_backbone(held: Path | None, shared: Path | None) -> None:
    """Leave it for the next training."""
    if shared is not None and held is not None and not shared.is_file():
        shared.parent.mkdir(exist_ok=True)
        write_atomic(shared, held.read_bytes())


def once(say: Say) -> Callable[[str], None]:
    """What one run says the others need not say again."""
    said: set[str] = set()

    def speak(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return speak


def absolute(overrides: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The overrides with paths that mean the same from any folder, as `config` has them."""
    known = {"data.root": config.data.root, "model.weights": config.model.weights, "distill.data": config.distill.data}
    return {k: known.get(k, v) for k, v in overrides.items()}


def whole(path: Path, file: str, plan: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Refuse a plan that somebody has changed beyond recognition."""
    if not all(isinstance(plan.get(k), kind) and (plan[k] or kind is dict) for k, kind in kinds.items()):
        raise InputError(f"{path / file} is damaged: start anew with another --out")


def moved(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in overrides.items() if k in MOVED}


def planned(path: Path, name: str, settings: Mapping[str, Any]) -> Config:
    return resolve(str(path / "plan" / f"{name}.toml"), settings)


def validated(
    home: Path,
    path: Path,
    config: Config,
    federation: Federation,
    on_round: Callable[[Progress], None],
    say: Say,
    splits: Sequence[str] = ("val",),
    pool: Pool | None = None,
) -> dict[str, Any]:
    """Train the run in `path`, or what is left of it, and evaluate it on validation data alone: test data are not
    touched. `home` is the plan's folder. Returns the last evaluation."""
    folder = RunFolder(path) if path.exists() else RunFolder.create(path, config.toml(), overwrite=False)
    shared = shared_backbone(home, config)
    ready = shared if shared is not None and shared.is_file() else None
    experiment = build(config, folder.backbone or ready, say, federation)
    if shared is not None and ready is None and (tensors := experiment.frozen_to_save()):
        folder.save_backbone(tensors)
        keep_backbone(folder.backbone, shared)
    found, _ = folder.load()
    if found is not None:
        experiment.restore(found)
    folder.cut_metrics(experiment.now.round)
    experiment.model.pool = pool
    return train_in(experiment, folder, [OnRound(on_round)], splits).as_dict()
