"""Which folder a run is in, that no other process works there, and what is said where the work stops."""

from __future__ import annotations

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
from .folder import RunFolder, locked


def chosen_source(source: str | None, data: str | None) -> str:
    """The preset or file that is named; where none is, your own data where a path to some is given."""
    not_empty("PRESET", source)
    not_empty("--data", data)
    return source or ("digits" if data is None else "folder")


def not_empty(what: str, word: str | Path | None) -> None:
    """Refuse what a shell makes of a variable that is not set: it must not mean the default."""
    if word is not None and not str(word).strip():
        raise InputError(f"{what} is empty (a shell variable that is not set?): give it a value, or leave it out")


def source_name(source: str) -> str:
    """A preset's name, or a file's without its ending."""
    return Path(source).stem if source.endswith(".toml") else source


def whole_name(source: str) -> str:
    """A preset's name, or a file's whole path."""
    return str(Path(source).expanduser().absolute()) if source.endswith(".toml") else source


def default_out(source: str, config: Config) -> Path:
    """`runs/digits-perada-0`; a run that is there already is not touched (see `train`)."""
    return Path("runs") / f"{source_name(source)}-{config.method_name}-{config.run.seed}"


def free_path(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    return next(p for n in count(1) if not os.path.lexists(p := path if n == 1 else Path(f"{path}-{n}")))


def newest_path(path: Path) -> Path:
    found = [p for p in path.parent.glob(f"{path.name}*") if re.fullmatch(re.escape(path.name) + r"(-\d+)?", p.name)]
    if not found:
        raise InputError(f"nothing to resume: there is no {path}; name the folder with --out")
    return max(found, key=lambda p: p.stat().st_mtime)


class NewFolder:
    """The folder of a new run: `path`, or, if that is not `fixed`, the first free name from there.

    It is made when it is first asked for: everything that can be refused is refused before. One that is there already
    is locked at once, so that nobody begins to work in what will be replaced.
    """

    def __init__(self, path: Path, fixed: bool, config: Config, overwrite: bool, held: ExitStack) -> None:
        self.path, self.fixed, self.config, self.overwrite, self.held = path, fixed, config, overwrite, held
        RunFolder.check(self._name(), overwrite)
        self.there = fixed and path.is_dir()
        if self.there:
            held.enter_context(locked(path))

    def _name(self) -> Path:
        return self.path if self.fixed else free_path(self.path)

    @cached_property
    def made(self) -> RunFolder:
        path = self.path if self.there else self._take()
        return RunFolder.create(path, self.config.toml(), self.overwrite)

    def _take(self) -> Path:
        while True:
            path = self._name()
            try:
                path.mkdir(parents=True, exist_ok=self.fixed)
            except OSError as error:
                if isinstance(error, FileExistsError) and not self.fixed:
                    continue  # another process was quicker: the next name
                raise InputError(f"cannot write to {path}: {error.strerror}") from error
            self.held.enter_context(locked(path))
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
    """What goes wrong in here leaves something that can be resumed: say so."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(path) from stop
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # a write that fails does not know the file's name
            reason = f"{error.filename or path}: {error.strerror}"
        again = f"{command} --out {shlex.quote(str(path))} --resume"
        raise RunError(reason, f"{_saved(path)}: fix this, then {again}") from error


def _saved(path: Path) -> str:
    """What a run, or a folder of several, goes on from."""
    if not (path / "config.toml").is_file():
        return "what is finished is saved"
    newest, pretrained = (RunFolder(p).newest_round() for p in (path, path / "pretrain"))
    if newest is None and pretrained is not None:
        return f"pretraining is saved up to round {pretrained}"
    return "no round is saved yet" if newest is None else f"it is saved up to round {newest}"
