"""What a comparison and a search share: trainings planned in a folder before the first of them starts."""

import hashlib
import json
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from ..callbacks import Callback
from ..config import Config, federation_of, resolve
from ..config.objects import build, pretraining
from ..config.settings import MOVED, Settings, path_text
from ..data import Federation
from ..errors import InputError, Interrupted, RunError
from ..experiment import Say
from ..lanes import Pool
from ..methods import REGISTRY, check_name
from ..runs.files import locked, read_file, write_atomic
from ..runs.folder import RunFolder
from ..runs.moment import Evaluation
from ..runs.names import chosen_source, free_path, newest_path, resumable, source_name, whole_name
from ..runs.train import pretraining_rows, rows_beside, train_in


def choose_methods(methods: str | Sequence[str] | None) -> list[str]:
    """Returns the names in the order given; `a,b,c`, a list, or `all` (None)."""
    names = ["all"] if methods is None else methods.split(",") if isinstance(methods, str) else list(methods)
    names = [n.strip() for n in names if n.strip()]
    if not names:
        raise InputError("--methods: name at least one method, or all")
    for name in names:
        if name != "all":
            check_name(name)
    return list(REGISTRY) if "all" in names else list(dict.fromkeys(names))


class Plan(ABC):
    """A folder of trainings that were planned together: the plan, their configurations, and the source."""

    kind: ClassVar[str]  # what a message calls it
    verb: ClassVar[str]  # its command: perada VERB
    file: ClassVar[str]  # the name of the plan's file
    keys: ClassVar[Mapping[str, type]]  # of the object in that file

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all trainings."""

    @abstractmethod
    def finished(self) -> list[str]:
        """Returns the names of those that are finished."""

    def after_each(self) -> None:  # noqa: B027
        """Does nothing; the default hook after each training."""

    @classmethod
    def at(cls, source: str | None, data: str | Path | None, out: str | Path | None, resume: bool) -> tuple[Self, str]:
        """Returns an old plan or a new one, whose folder is not made yet, and the preset or file to use."""
        chosen = chosen_source(source, path_text(data))
        path = Path(out) if out is not None else Path("runs") / f"{cls.verb}-{source_name(chosen)}"
        if out is None:
            path = newest_path(path) if resume else free_path(path)
        planned = cls(path)
        if resume:
            _ = planned.plan  # refused here if there is none
        else:
            planned.refuse_taken()
        return planned, chosen

    @property
    def command(self) -> str:
        return f"perada {self.verb}"

    @property
    def plan(self) -> dict[str, Any]:
        """Returns the plan as it is in the folder."""
        try:
            return dict(json.loads((self.path / self.file).read_text("utf8")))
        except OSError as error:
            raise InputError(
                f"{self.path} is not a {self.kind} (no {self.file}): check --out, or start one without --resume"
            ) from error
        except (ValueError, TypeError) as error:
            raise self._damaged() from error

    def _damaged(self) -> InputError:
        return InputError(f"{self.path / self.file} is damaged: start again with another --out")

    def write(self, plan: Mapping[str, Any], configs: Mapping[str, Config], source: str) -> None:
        """Writes the configurations first, then the plan that names them: a plan that is there is whole."""
        try:
            (self.path / "plan").mkdir(parents=True, exist_ok=True)
            copy = self.path / "source.toml"
            if not source.endswith(".toml"):
                copy.unlink(missing_ok=True)  # of a plan that was never finished
            elif not copy.exists() or not copy.samefile(Path(source).expanduser()):
                shutil.copyfile(Path(source).expanduser(), copy)
            for name, config in configs.items():
                write_atomic(self.path / "plan" / f"{name}.toml", config.toml().encode())
            write_atomic(self.path / self.file, (json.dumps(plan, indent=1) + "\n").encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write to {self.path}: {error.strerror}")

    def config(self, name: str, settings: Settings | None = None) -> Config:
        return resolve(str(self.path / "plan" / f"{name}.toml"), settings or {})

    def resume(self, source: str | None, settings: Settings) -> tuple[dict[str, Any], str]:
        """Returns the plan and its source; refuses a damaged plan, and settings that are not the plan's."""
        plan = self.plan
        for key, kind in self.keys.items():
            if not isinstance(plan.get(key), kind) or not (plan[key] or kind is dict):
                raise self._damaged()
        if source is not None and whole_name(source) != plan["source"]:
            raise self.other(plan["source"], f"without {source}")
        for key, value in json.loads(json.dumps(dict(settings))).items():
            if key not in MOVED and (key not in plan["set"] or plan["set"][key] != value):
                raise self.other(f"another {key}")
        copy = self.path / "source.toml"
        return plan, str(copy) if copy.is_file() else str(plan["source"])

    def other(self, what: str, leave: str = "") -> InputError:
        """Returns the error that refuses to resume with other settings, or from another source."""
        made, leave = ("from", leave) if leave else ("with", "without it")
        return InputError(f"{self.path} was made {made} {what}: resume it {leave}, or choose another --out")

    def refuse_taken(self) -> None:
        """Refuses a path with something else in it; a plan that was never finished may be replaced."""
        try:
            names = {p.name for p in self.path.iterdir()} if self.path.exists() else set()
        except NotADirectoryError:
            names = {"a file"}
        except OSError as error:
            raise self._unwritable(error) from error
        if self.file in names:
            raise InputError(f"{self.path} exists: --resume continues it, --out picks another")
        if any(n not in ("plan", "source.toml") and n[0] != "." for n in names):
            raise InputError(f"{self.path} holds something else: choose another --out")

    @contextmanager
    def working(self, *new: Any) -> Iterator[None]:
        """Lets one process at a time work in the folder; what stops the work says how to resume it.

        new: the arguments of `write` for a new plan.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        with locked(self.path), resumable(self.path, self.command):
            if new:
                self.refuse_taken()  # another process may have been faster
                self.write(*new)
            yield

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Turns what stops one training into what stops the plan, with the command that resumes it."""
        try:
            with resumable(self.path, self.command):
                yield
        except Interrupted as stop:
            raise Interrupted(self.path) from stop
        except RunError as error:
            again = f"{self.command} --out {shlex.quote(str(self.path))} --resume"
            raise RunError(f"{name}: {error.what}", f"what is finished is saved: {again}") from error


def check_all(configs: Iterable[Config]) -> Federation:
    """Returns the one federation of them all; refuses before the first training whatever can be refused."""
    first, *others = configs
    federation = federation_of(first)
    for config in (first, *others):
        for name, value in vars(first.data).items():
            if getattr(config.data, name) != value:
                both = f"{config.method_name} and {first.method_name}"
                raise InputError(f"{both} differ in DataOptions.{name}: all share one split")
        build(config, federation=federation, pretrain=lambda experiment: None)  # that is left to the run itself
    return federation


def shared_backbone(path: Path, config: Config) -> Path | None:
    """Returns where the trainings of a plan keep the result of FedAvg pretraining; equal settings share it."""
    if config.model.weights != "fedavg":
        return None
    digest = hashlib.sha256(pretraining(config).toml().encode()).hexdigest()[:16]
    return path / "pretrain" / f"{digest}.safetensors"


def keep_backbone(folder: RunFolder, shared: Path | None) -> None:
    """Copies a run's pretrained backbone for the next training, and what the pretraining sent."""
    backbone = folder.backbone
    if shared is not None and backbone is not None and not shared.is_file():
        shared.parent.mkdir(exist_ok=True)
        if (rows := pretraining_rows(folder)).is_file():
            write_atomic(rows_beside(shared), read_file(rows))
        write_atomic(shared, backbone.read_bytes())


def begun(path: Path) -> bool:
    """Returns whether a run was started there; removes a folder that a kill left without a configuration."""
    started = (path / "config.toml").is_file()
    if path.exists() and not started:
        shutil.rmtree(path)
    return started


def validated(
    home: Path,
    path: Path,
    config: Config,
    federation: Federation,
    callbacks: Sequence[Callback],
    say: Say,
    splits: Sequence[str] = ("val",),
    pool: Pool | None = None,
) -> Evaluation:
    """Trains the run in `path` and evaluates it on validation data alone; returns the last evaluation.

    home: the plan's folder. Test data are not touched.
    """
    folder = RunFolder(path) if path.exists() else RunFolder.create(path, config.toml(), overwrite=False)
    shared = shared_backbone(home, config)
    ready = shared if shared is not None and shared.is_file() else None
    experiment = build(config, folder.backbone or ready, say, federation)
    if shared is not None and ready is None and (tensors := experiment.frozen_to_save()):
        folder.save_backbone(tensors)
        keep_backbone(folder, shared)
    saved, _ = folder.load()
    if saved is not None:
        experiment.restore(saved)
    folder.cut_metrics(experiment.now.round)
    experiment.model.pool = pool
    return train_in(experiment, folder, callbacks, splits)
