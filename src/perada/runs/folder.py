"""A run folder: config, metrics, checkpoints. A kill at any moment loses nothing that was finished."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import Damaged, InputError
from ..lanes import State
from .moment import Checkpoint, Evaluation

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

KEEP = 2  # checkpoints
LOOK_S = 0.5  # the most seconds for which `at_work` holds a lock
PARTS = {
    "data.json",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "backbone.safetensors",
    "checkpoints",
    "pretrain",
}
Kinds = Mapping[str, type | UnionType]  # of the values of a JSON object


def jsonable(value: Any) -> Any:
    """Returns a value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fits(value: Any, kinds: Kinds) -> bool:
    """Returns whether a value is an object with these keys, and values of these kinds."""
    return isinstance(value, dict) and all(k in value and isinstance(value[k], kind) for k, kind in kinds.items())


def read_object(path: Path, kinds: Kinds, advice: str) -> dict[str, Any]:
    """Returns a JSON object with values of these kinds. advice: what to do about a damaged file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf8"))
    except ValueError:  # not JSON, or not text
        content = {}
    if not fits(content, kinds):
        raise Damaged(f"{path} is damaged: {advice}")
    return content


def read_rows(path: Path, kinds: Kinds) -> list[dict[str, Any]]:
    """Returns the lines of a .jsonl file, none without a file; skips a last one that a kill cut off."""
    lines = path.read_text("utf8", "replace").splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if fits(row, kinds):
            rows.append(row)
        elif number < len(lines):
            raise Damaged(f"{path} is damaged: remove its line {number}")
    return rows


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that a kill leaves the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def write_output(path: Path, data: bytes, parents: bool = False) -> None:
    """Writes a file that the user named, with its `parents` if they may be missing; InputError if it cannot."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def locked(path: Path, wait: float | None = None, busy: Exception | None = None) -> Iterator[None]:
    """Lets one process at a time work in a folder.

    Waits `wait` seconds (by default as long as `at_work` may look), and then raises `busy`.
    """
    if fcntl is None:
        yield
        return
    handle, until = os.open(path, os.O_RDONLY), time.monotonic() + (LOOK_S if wait is None else wait)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= until:
                    what = f"another process is at work in {path}: wait for it, or choose another --out"
                    raise busy or InputError(what) from error
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def at_work(path: Path) -> bool:
    """Returns whether a process works in a folder. The lock is shared: two that look do not see each other."""
    if fcntl is None:
        return True
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut, as fsync does for a file's bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replaced(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yields a temporary folder to fill, which then takes the place of `target` in one step."""
    part, old = (target.with_name(f".{target.name}.{word}") for word in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=mode)
    try:
        yield part
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(part)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(part, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def save_state(path: Path, state: State, lane: int = 0) -> str:
    """Writes one lane as safetensors (`params/NAME`, `buffers/NAME`); returns the sha256."""
    tensors = {f"params/{n}": t[lane] for n, t in state.params.items()}
    tensors |= {f"buffers/{n}": t[lane] for n, t in state.buffers.items()}
    data = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def load_state(path: Path) -> State:
    """Returns the lane that `save_state` wrote, on the CPU."""
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                kind, _, rest = name.partition("/")
                (params if kind == "params" else buffers)[rest] = f.get_tensor(name).unsqueeze(0)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return State(params, buffers)


def read_states(folder: Path, kinds: Kinds) -> tuple[dict[str, Any], dict[str, State]]:
    """Returns a folder's state.json, and its states by name, if every file has the checksum that is noted there."""
    note = read_object(folder / "state.json", {**kinds, "sha256": dict}, "it is not what was written")
    for name, digest in note["sha256"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise InputError(f"{name} does not match its checksum")
    return note, {name.removesuffix(".safetensors"): load_state(folder / name) for name in sorted(note["sha256"])}


def _empty(path: Path) -> None:
    """Empties a run folder. The config goes last: after a kill the folder is still a run, and can be replaced."""
    for part in sorted(path.iterdir(), key=lambda p: p.name == "config.toml"):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink()


def _round(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("round-"))


class RunFolder:
    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self.path, self.keep = path, keep  # keep: how many checkpoints stay
        self.checkpoints = path / "checkpoints"
        self._hashes: dict[str, str] = {}  # file name -> sha256 in the newest checkpoint
        self._newest: Path | None = None

    @staticmethod
    def check(path: Path, overwrite: bool) -> None:
        """Refuses a path that must not be written to."""
        try:
            path.lstat()
            names = {p.name for p in path.iterdir()} if path.is_dir() else None
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"cannot write to {path}: {error.strerror}") from error
        if names is None:
            raise InputError(f"{path} is a file: choose another --out")
        if names and not (path / "config.toml").is_file():
            raise InputError(f"{path} exists and is not a run folder, so it is not overwritten: choose another --out")
        if names and not overwrite:
            raise InputError(
                f"{path} exists: resume it, overwrite it or choose another folder (--resume, --overwrite, --out)"
            )
        if {n for n in names if not (n[0] == "." and n.endswith(".part"))} - PARTS:  # a kill leaves such a part
            raise InputError(f"{path} holds more than a run, so it is not overwritten: choose another --out")

    @classmethod
    def create(cls, path: Path, config_toml: str, overwrite: bool) -> RunFolder:
        """Makes a new run. The folder of a replaced run stays, because it is locked."""
        cls.check(path, overwrite)
        try:
            if path.exists():
                _empty(path)
            else:
                path.mkdir(parents=True)
            write_atomic(path / "config.toml", config_toml.encode())
        except OSError as error:
            raise InputError(f"cannot write to {path}: {error.strerror}") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            if (path / "plan.json").is_file():
                raise InputError(f"{path} holds several runs: name one of the folders in it")
            raise InputError(f"{path} is not a run folder (no config.toml): train first, or check the path")
        return cls(path)

    # metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self.path.mkdir(exist_ok=True)
        with (self.path / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(jsonable(row)) + "\n")
            f.flush()
            os.fsync(f.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        return read_rows(self.path / "metrics.jsonl", {"round": int})

    def evaluations(self) -> list[Evaluation]:
        """Returns the rows of metrics.jsonl as objects."""
        rows = []
        for line, row in enumerate(self.metrics(), 1):
            try:
                rows.append(Evaluation.read(row))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise Damaged(f"{self.path / 'metrics.jsonl'} is damaged: remove its line {line}") from error
        return rows

    def cut_metrics(self, after: int) -> None:
        """Removes what was measured after round `after`: it will be measured again."""
        rows = [r for r in self.metrics() if r["round"] <= after]
        write_atomic(self.path / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode())

    def write_json(self, name: str, value: object) -> None:
        write_atomic(self.path / name, (json.dumps(jsonable(value), indent=1) + "\n").encode())

    def about(self) -> dict[str, Any]:
        """Returns what data.json says about the data and the run's preset or file; empty without it."""
        path, advice = self.path / "data.json", "delete it if the data are those that the run was made with"
        about = read_object(path, {"classes": list, "clients": dict}, advice) if path.is_file() else {}
        if "source" in about and not fits(about["source"], {"name": str, "settings": dict}):
            raise Damaged(f"{path} is damaged: {advice}")
        return about

    def check_data(self, facts: Mapping[str, Any]) -> None:
        """Refuses other data than the run was made with, except for what an older version did not write.

        With other data a client would get another's model, or be tested on its training images.
        """
        known = {**facts, **{k: v for k, v in self.about().items() if k in facts}}
        if known == json.loads(json.dumps(facts)):
            return
        old, new = known["clients"], facts["clients"]
        gone, more = [n for n in old if n not in new], [n for n in new if n not in old]
        what = [f"{n!r} is new" for n in more[:1]] + [f"{n!r} is gone" for n in gone[:1]]
        what += [f"{n!r} has other samples" for n in old if n in new and old[n] != new[n]][:1]
        if known["classes"] != list(facts["classes"]):
            what = ["other classes"]
        if not what and known["image"] == list(facts["image"]) and known["split"] != facts["split"]:
            what = ["files renamed or exchanged, so that training images would be test images"]
        raise InputError(
            f"the data are not those that {self.path} was made with ({', '.join(what) or 'other images'}): "
            "give the old ones with --data, or train again"
        )

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        if not path.is_file():
            raise InputError(f"{self.path} has no summary yet: finish it with --resume")
        kinds = {"round": int, "method": str, "data": str, "metric": str, "parameters": dict}
        again = f"perada train --out {shlex.quote(str(self.path))} --resume"
        return read_object(path, kinds, f"write it again with {again}")

    # checkpoints

    def has_checkpoint(self) -> bool:
        """Returns whether there are files to link to, of clients that did not change."""
        return bool(self._hashes)

    def save(self, checkpoint: Checkpoint, changed: Iterable[int]) -> None:
        """Writes `round-NNNN` under another name and renames it; links the files of clients that did not change."""
        target = self.checkpoints / f"round-{checkpoint.round:04d}"
        try:
            with replaced(target) as part:  # a kill between the two renames: see _checkpoints
                hashes = {
                    f"{name}.safetensors": save_state(part / f"{name}.safetensors", state)
                    for name, state in (("server", checkpoint.server), ("broadcast", checkpoint.broadcast))
                }
                touched = set(changed)
                for m, state in enumerate(checkpoint.clients):
                    name = f"kept-{m:04d}.safetensors"
                    if m in touched or name not in self._hashes or not self._link(name, part):
                        hashes[name] = save_state(part / name, state)
                    else:
                        hashes[name] = self._hashes[name]
                note = {"round": checkpoint.round, "sha256": hashes, "note": checkpoint.note}
                write_atomic(part / "state.json", json.dumps(jsonable(note), indent=1).encode())
        except OSError as error:
            raise OSError(f"cannot write {target}: {error.strerror}") from error
        self._hashes, self._newest = hashes, target
        for old in self._checkpoints()[: -self.keep]:
            shutil.rmtree(old)

    def _link(self, name: str, part: Path) -> bool:
        if self._newest is None or not (self._newest / name).is_file():
            return False
        try:
            os.link(self._newest / name, part / name)
        except OSError:  # a file system without links
            shutil.copyfile(self._newest / name, part / name)
        return True

    def _checkpoints(self) -> list[Path]:
        for aside in self.checkpoints.glob(".round-*.old"):
            target = self.checkpoints / aside.name.removeprefix(".").removesuffix(".old")
            if not target.exists():  # a kill between the two renames left only the old checkpoint
                os.replace(aside, target)
        return self._named()

    def _named(self) -> list[Path]:
        return sorted(
            (p for p in self.checkpoints.glob("round-*") if p.name.removeprefix("round-").isdecimal()), key=_round
        )

    def newest_round(self) -> int | None:
        """Returns the round of the newest checkpoint, by its name alone."""
        paths = self._named()
        return _round(paths[-1]) if paths else None

    def load(self, round: int | None = None) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest whole checkpoint, and a line about each damaged one that was skipped.

        round: returns the checkpoint after so many rounds and no other.
        """
        warnings: list[str] = []
        paths = self._checkpoints()
        if round is not None and round not in map(_round, paths):
            known = ", ".join(str(_round(p)) for p in paths) or "none"
            raise InputError(f"{self.path} has no checkpoint after round {round} (it has: {known})")
        for path in reversed([p for p in paths if round in (None, _round(p))]):
            try:
                return self._read(path), warnings
            except (InputError, OSError, ValueError, KeyError) as error:
                warnings.append(f"{path.name} is damaged and skipped: {error}")
        if warnings:
            raise InputError(f"{self.path}: no checkpoint is whole ({warnings[0]}): remove that folder and train again")
        return None, warnings

    def undo(self, round: int) -> None:
        """Removes every checkpoint after `round`, the newest first, and what was measured and written after it."""
        for path in reversed([p for p in self._checkpoints() if _round(p) > round]):
            shutil.rmtree(path)
        self.cut_metrics(round)
        for name in ("summary.json", "report.html"):
            (self.path / name).unlink(missing_ok=True)

    def _read(self, path: Path) -> Checkpoint:
        note, states = read_states(path, {"round": int, "note": dict})
        self._hashes, self._newest = note["sha256"], path
        kept = [state for name, state in states.items() if name.startswith("kept-")]
        return Checkpoint(note["round"], states["server"], states["broadcast"], kept, note["note"])

    # the frozen backbone, if the config alone cannot make it again

    def save_backbone(self, tensors: Mapping[str, Tensor]) -> None:
        data = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})
        write_atomic(self.path / "backbone.safetensors", data)

    @property
    def backbone(self) -> Path | None:
        path = self.path / "backbone.safetensors"
        return path if path.is_file() else None
