"""The checkpoints of a run: written in one step, clients by name, and no file shared by two of them.

A client's state that did not change is taken from the checkpoint before. Its file is a hard link to the one in the
oldest checkpoint, which is then removed, or else a copy. So one damaged file never breaks both checkpoints that are
kept, and a state that does not change any more costs no further writing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Damaged, InputError
from ..temporary import sweep
from .files import CHECKSUM, digest_of, fits, is_whole, read_file, read_object, replaced, sealed, write_atomic
from .manifest import FORMAT, NewerFormat, check_format
from .moment import Checkpoint, check_note
from .rows import Mark
from .states import ENDING, save_state, states_in

KINDS = {"round": int, "sha256": dict, "note": dict}
CLIENTS = {"clients": dict, "metrics": dict}  # since format 2
PATIENCE = 100  # times that a reader begins again because another process has saved a checkpoint
WHAT = "it is not what was written"


@dataclass(frozen=True)
class Note:
    """The state.json of a checkpoint."""

    path: Path
    content: Mapping[str, Any]

    @property
    def older(self) -> bool:
        """Whether a version wrote it that had clients by position."""
        return "format" not in self.content

    @property
    def mark(self) -> Mark:
        """Returns the mark of the rows of metrics.jsonl that were there; empty if an older version wrote it."""
        mark: Mark = self.content.get("metrics", {})
        return mark

    def file_of(self, client: str) -> tuple[Path, str] | None:
        """Returns a client's file and its checksum; None for a client that is not in it."""
        name = self.content.get("clients", {}).get(client)
        return None if name is None else (self.path / name, self.content["sha256"][name])


class Checkpoints:
    """The `checkpoints` folder of a run.

    keep: how many stay. names: returns the clients of an older checkpoint, which has them by position.
    """

    def __init__(self, path: Path, keep: int, names: Callable[[int], list[str]]) -> None:
        self.path, self.keep, self._older_names = path, keep, names
        self._newest: Note | None = None  # the one that was saved or loaded last
        self._written: set[Path] = set()  # by this object, so their files need no second look

    @property
    def begun(self) -> bool:
        """Whether unchanged clients can be taken from a checkpoint."""
        return self._newest is not None and not self._newest.older

    # Writing

    def save(self, checkpoint: Checkpoint, changed: Container[str], rows: Mark) -> None:
        """Writes `round-NNNN` under another name and renames it. rows: the mark of metrics.jsonl at this moment."""
        target = self.path / f"round-{checkpoint.round:04d}"
        try:
            self._recover()
            spare = self._spare(target)
            with replaced(target) as part:  # a kill between its two renames: see _recover
                sums = {
                    f"{name}{ENDING}": save_state(part / f"{name}{ENDING}", state)
                    for name, state in (("server", checkpoint.server), ("broadcast", checkpoint.broadcast))
                }
                files = {name: f"kept-{m:04d}{ENDING}" for m, name in enumerate(checkpoint.clients)}
                for name, file in files.items():
                    same = "" if name in changed else self._same(name, part / file, spare)
                    sums[file] = same or save_state(part / file, checkpoint.clients[name])
                content = {"format": FORMAT, "round": checkpoint.round, "clients": files, "sha256": sums}
                content |= {"metrics": rows, "note": checkpoint.note}
                write_atomic(part / "state.json", sealed(content))
        except OSError as error:
            raise OSError(f"cannot write {target}: {error.strerror}") from error
        self._newest = Note(target, content)
        self._written.add(target)
        for old in self._superseded(target):
            shutil.rmtree(old, ignore_errors=True)
            self._written.discard(old)

    def _superseded(self, target: Path) -> list[Path]:
        """Returns the checkpoints to remove once there is `target`: those of rounds that were undone, too."""
        listed, last = {*self.listed(), target}, _round_in(target.name)
        past = sorted((p for p in listed if _round_in(p.name) <= last), key=round_of)
        return [*past[: -self.keep], *(p for p in listed if _round_in(p.name) > last)]

    def _spare(self, target: Path) -> list[Note]:
        """Returns the checkpoints that are about to go, so that their files may be linked to."""
        notes = []
        for path in (*self._superseded(target), target):
            try:
                notes.append(self.note(path))
            except (InputError, OSError):
                continue
        return notes

    def _same(self, client: str, to: Path, spare: list[Note]) -> str:
        """Gives a client's unchanged state a file in a new checkpoint; returns its sha256, or "" if it cannot."""
        newest = None if self._newest is None else self._newest.file_of(client)
        if newest is None:
            return ""
        path, digest = newest
        for note in spare:
            old = note.file_of(client)
            if old is not None and old[1] == digest and (note.path in self._written or _whole(old[0], digest)):
                try:
                    os.link(old[0], to)
                    return digest
                except OSError:  # a file system without links
                    break
        try:
            data = read_file(path)
        except OSError:
            return ""
        if hashlib.sha256(data).hexdigest() != digest:
            return ""
        write_atomic(to, data)
        return digest

    def _recover(self) -> None:
        """Completes what a killed process left."""
        for aside in self.path.glob(".round-*.old"):
            target = self.path / aside.name.removeprefix(".").removesuffix(".old")
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:  # it was killed between the two renames
                os.replace(aside, target)
        sweep(self.path, idle=0)

    # Reading

    def listed(self) -> list[Path]:
        """Returns the checkpoints, oldest first: those that another process is just replacing, too."""
        paths = {_round_in(p.name): p for pattern in (".round-*.old", "round-*") for p in self.path.glob(pattern)}
        return [paths[n] for n in sorted(n for n in paths if n >= 0)]

    def _signs(self) -> list[tuple[str, int]]:
        """Returns what changes when another process saves a checkpoint."""
        try:
            return [(p.name, p.stat().st_ino) for p in self.listed()]
        except OSError:
            return []

    def load(self, round: int | None = None) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest whole checkpoint, and a line about each damaged one that was skipped.

        round: returns the checkpoint after so many rounds and no other.
        """
        for _ in range(PATIENCE):
            signs, warnings = self._signs(), list[str]()
            for path in reversed(self._wanted(round)):
                try:
                    return self._read(path), warnings
                except NewerFormat:
                    raise
                except (InputError, OSError, ValueError, KeyError) as error:
                    if self._signs() != signs:
                        break  # another process has removed it meanwhile
                    warnings.append(f"{path.name} is damaged and skipped: {error}")
            else:
                break
        if warnings:
            home = self.path.parent
            raise InputError(f"{home}: no checkpoint is whole ({warnings[0]}): remove that folder and train again")
        return None, warnings

    def _wanted(self, round: int | None) -> list[Path]:
        paths = self.listed()
        if round is None:
            return paths
        chosen = [p for p in paths if round_of(p) == round]
        if not chosen:
            known = ", ".join(str(round_of(p)) for p in paths) or "none"
            raise InputError(f"{self.path.parent} has no checkpoint after round {round} (it has: {known})")
        return chosen

    def remove_after(self, round: int) -> None:
        """Removes every checkpoint after a round, the newest first."""
        for path in reversed([p for p in self.listed() if round_of(p) > round]):
            shutil.rmtree(path)
            self._written.discard(path)
        if self._newest is not None and round_of(self._newest.path) > round:
            self._newest = None

    def newest_note(self) -> Note | None:
        """Returns the state.json of the newest checkpoint that has a whole one."""
        for path in reversed(self.listed()):
            try:
                return self.note(path)
            except NewerFormat:
                raise
            except (InputError, OSError):
                continue
        return None

    def note(self, path: Path) -> Note:
        """Returns a checkpoint's state.json; Damaged if it is not what was written."""
        content = read_object(path / "state.json", KINDS, WHAT)
        if CHECKSUM in content or "format" in content:
            if fits(content, {"format": int}):
                check_format(path, content)
            if not fits(content, CLIENTS) or not is_whole(content):
                raise Damaged(f"{path / 'state.json'} is damaged: {WHAT}")
        if content["round"] != _round_in(path.name):
            raise Damaged(f"{path} says that it is of round {content['round']}")
        try:
            check_note(content["note"], content["round"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{path / 'state.json'} is damaged: {WHAT}") from error
        return Note(path, content)

    def _read(self, path: Path) -> Checkpoint:
        note = self.note(path)
        states = states_in(path, dict(note.content["sha256"]))
        kept = {name: states[name] for name in sorted(states) if name.startswith("kept-")}
        if not {"server", "broadcast"} <= states.keys() or list(kept) != [f"kept-{m:04d}" for m in range(len(kept))]:
            raise Damaged("a file is missing in its state.json")
        names = self._older_names(len(kept)) if note.older and kept else []
        if note.older:
            clients = dict(zip(names or kept, kept.values(), strict=True))
        else:
            clients = {name: kept[file.removesuffix(ENDING)] for name, file in note.content["clients"].items()}
        self._newest, about = note, dict(note.content["note"])
        server, broadcast = states["server"], states["broadcast"]
        return Checkpoint(note.content["round"], server, broadcast, clients, about, nameless=note.older and not names)


def _whole(path: Path, digest: str) -> bool:
    try:
        return digest_of(path) == digest
    except OSError:
        return False


def _round_in(name: str) -> int:
    """Returns the round in the name of a checkpoint; -1 for another name."""
    whole = name[1:].removesuffix(".old") if name.startswith(".") else name
    number = whole.removeprefix("round-")
    return int(number) if number.isdecimal() and len(number) < 10 else -1


def round_of(checkpoint: Path) -> int:
    return _round_in(checkpoint.name)
