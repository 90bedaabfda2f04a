"""Names and folders of runs, what a resumed run may change, and the message when work stops."""

import os
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ..config import Config, resolve
from ..config.settings import MACHINE, RESUMED, different, given
from ..errors import InputError, Interrupted, RunError
from .files import locked
from .folder import RunFolder


def chosen_source(source: str | None, data: str | None) -> str:
    """Returns the preset or file to use: `source`, else `folder` for data of one's own, else `digits`."""
    not_empty("PRESET", source)
    not_empty("--data", data)
    return source or ("digits" if data is None else "folder")


def not_empty(what: str, word: str | Path | None) -> None:
    """Refuses an empty word, which a shell makes of an unset variable: it must not mean the default."""
    if isinstance(word, str | Path) and not str(word).strip():
        raise InputError(f"{what} is empty (a shell variable that is not set?): give it a value, or leave it out")


def source_name(source: str) -> str:
    """Returns a preset's name, or a file's without its ending."""
    return Path(source).stem if source.endswith(".toml") else source


def whole_name(source: str) -> str:
    """Returns a preset's name, or a file's absolute path."""
    return str(Path(source).expanduser().absolute()) if source.endswith(".toml") else source


def default_out(source: str, config: Config) -> Path:
    """Returns the folder of a run that names none, such as `runs/digits-perada-0`."""
    return Path("runs") / f"{source_name(source)}-{config.method_name}-{config.run.seed}"


def free_path(path: Path) -> Path:
    """Returns `path`, or the first of path-2, path-3, ... that does not exist."""
    return next(p for n in count(1) if not os.path.lexists(p := path if n == 1 else Path(f"{path}-{n}")))


def newest_path(path: Path) -> Path:
    """Returns the newest of `path`, path-2, path-3, ..."""
    paths = [p for p in path.parent.glob(f"{path.name}*") if re.fullmatch(re.escape(path.name) + r"(-\d+)?", p.name)]
    if not paths:
        raise InputError(f"nothing to resume: there is no {path}; name the folder with --out")
    return max(paths, key=lambda p: p.stat().st_mtime)


class NewFolder:
    """The folder of a new run: `path`, or, if that is not `fixed`, the first free name from there.

    It is made when it is first used, after everything that can be refused. One that exists is locked at once, so that
    no other process begins to work in what will be replaced. The locks last until `stack` is closed.
    """

    def __init__(self, path: Path, fixed: bool, config: Config, overwrite: bool, stack: ExitStack) -> None:
        self.path, self.fixed, self.config, self.overwrite, self.stack = path, fixed, config, overwrite, stack
        RunFolder.check(self._name(), overwrite)
        self.exists = fixed and path.is_dir()
        if self.exists:
            stack.enter_context(locked(path))

    def _name(self) -> Path:
        return self.path if self.fixed else free_path(self.path)

    @cached_property
    def made(self) -> RunFolder:
        path = self.path if self.exists else self._take()
        return RunFolder.create(path, self.config.toml(), self.overwrite)

    def _take(self) -> Path:
        while True:
            path = self._name()
            try:
                path.mkdir(parents=True, exist_ok=self.fixed)
            except OSError as error:
                if isinstance(error, FileExistsError) and not self.fixed:
                    continue  # another process took this name: try the next
                raise InputError(f"cannot write to {path}: {error.strerror}") from error
            self.stack.enter_context(locked(path))
            return path


def made_from(source: str, config: Config) -> dict[str, Any]:
    """Returns what data.json says about the preset or file that a run is made from."""
    return {"name": whole_name(source), "settings": resolve(source, given(method=config.method_name)).flat()}


def refuse_other_settings(path: Path, stored: Config, config: Config) -> None:
    """Refuses to resume a run with another value of a setting that makes it a different run."""
    if other := different(config.flat(), stored.flat(), RESUMED):
        raise InputError(f"{path} was made with another {other}: give the old one, or choose another folder")


def refuse_other_source(folder: RunFolder, source: str, config: Config, overrides: Collection[str]) -> None:
    """Refuses a preset or file that says something else than the one that the run was made from."""
    made = folder.about().get("source")
    if made is None or (made["name"] == source and not source.endswith(".toml")):
        return  # an older version made the run; or it is the same preset, whatever that says today
    settings, stored = made_from(source, config)["settings"], config.flat()
    for known in (stored, {**stored, **made["settings"]}):  # a key newer than the run has today's default
        if not (other := different(settings, known, (*overrides, *MACHINE))):
            return
    raise InputError(
        f"{folder.path} was made from {made['name']} with another {other}: resume it without {source}, "
        "or choose another --out"
    )


@contextmanager
def resumable(path: Path, command: str = "perada train") -> Iterator[None]:
    """Turns a failure or an interrupt into an error that says what is saved, and how to resume."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(path) from stop
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # a failed write does not name the file
            reason = f"{error.filename or path}: {error.strerror}"
        again = f"{command} --out {shlex.quote(str(path))} --resume"
        raise RunError(reason, f"{_saved(path)}: fix this, then {again}") from error


def _saved(path: Path) -> str:
    """Returns in words what a run, or a folder of several runs, continues from."""
    if not (path / "config.toml").is_file():
        return "what is finished is saved"
    newest, pretrained = (RunFolder(p).newest_round() for p in (path, path / "pretrain"))
    if newest is None and pretrained is not None:
        return f"pretraining is saved up to round {pretrained}"
    return "no round is saved yet" if newest is None else f"it is saved up to round {newest}"
