"""A run folder: config, metrics, checkpoints. A kill at any moment loses nothing that was finished."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..errors import Damaged, InputError
from ..predict.scores import DriftScores
from ..privacy.guarantee import Guarantee
from ..temporary import is_temporary, sweep
from .checkpoints import Checkpoints, round_of
from .files import (
    damaged_line,
    fits,
    is_number,
    jsonable,
    read_object,
    write_atomic,
)
from .further import FILE as EVALUATIONS
from .manifest import BACKBONE, DRIFT, METRICS, Manifest
from .moment import SPLITS, Checkpoint, Evaluation
from .rows import Mark, Rows
from .shifts import Shifts

KEEP = 2  # checkpoints
PARTS = {
    "manifest.json",
    "data.json",
    "config.toml",
    METRICS,
    "summary.json",
    DRIFT,
    "report.html",
    EVALUATIONS,
    BACKBONE,
    "checkpoints",
    "pretrain",
}


def _empty(path: Path) -> None:
    """Empties a run folder. The config goes last: after a kill the folder is still a run, and can be replaced."""
    for part in sorted(path.iterdir(), key=lambda p: p.name == "config.toml"):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink()


def _data_fit(about: Mapping[str, Any]) -> bool:
    """Returns whether the values in data.json are of the kinds that are written; an older version wrote fewer."""
    sizes, numbers = list(about["clients"].values()), [*about.get("mean", []), *about.get("std", [])]
    return (
        all(isinstance(name, str) for name in about["classes"])
        and all(isinstance(one, list) and len(one) == 3 for one in [*sizes, about.get("image", [1, 1, 1])])
        and all(is_number(n, int) and n >= 0 for one in [*sizes, about.get("image", [])] for n in one)
        and all(is_number(n) for n in numbers)
        and ("source" not in about or fits(about["source"], {"name": str, "settings": dict}))
    )


class RunFolder:
    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self.path = path
        self.manifest = Manifest(path)
        self.rows = Rows(self.manifest)
        self._checkpoints = Checkpoints(path / "checkpoints", keep, self._older_names)

    @property
    def checkpoints(self) -> Path:
        return self._checkpoints.path

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
        if {n for n in names if not is_temporary(n)} - PARTS:  # a kill leaves such a part
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
            folder = cls(path)
            folder.manifest.begin()
        except OSError as error:
            raise InputError(f"cannot write to {path}: {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            if (path / "plan.json").is_file():
                raise InputError(f"{path} holds several runs: name one of the folders in it")
            raise InputError(f"{path} is not a run folder (no config.toml): train first, or check the path")
        folder = cls(path)
        folder.manifest.read()  # refuses a damaged one, and a newer format
        return folder

    def tidy(self) -> None:
        """Removes what killed processes left half written. Only for the process that has locked the folder."""
        sweep(self.path, idle=0)

    def notices(self) -> list[str]:
        """Returns a line about each file that is missing or damaged, although the run goes on without it."""
        lines, note = [], self._checkpoints.newest_note()
        if not self.manifest.exists and note is not None and not note.older:
            lines.append(f"{self.manifest.path} is missing: the other files are used unchecked")
        if self.manifest.state("data.json") == "missing":
            lines.append(f"{self.path / 'data.json'} is missing: copy it again; the data are not compared with it")
        if self.manifest.state("summary.json") == "missing":
            lines.append(f"{self.path / 'summary.json'} is missing: resume the run to write it again")
        if problem := self.rows.problem(self._mark()):
            return [*lines, problem]
        rows, newest = self.metrics(), self.newest_round()
        if rows and newest is not None and rows[-1]["round"] > newest:
            measured = rows[-1]["round"]
            lines.append(f"{self.path}: round {measured} was measured, but the newest checkpoint is of round {newest}")
        return lines

    # metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def metrics(self) -> list[dict[str, Any]]:
        return self.rows.read(self._mark())

    def _mark(self) -> Mark:
        note = self._checkpoints.newest_note()
        return note.mark if note and note.content["round"] >= self.manifest.rows_from else {}

    def evaluations(self) -> list[Evaluation]:
        """Returns the rows of metrics.jsonl as objects."""
        rows = []
        for line, row in enumerate(self.metrics(), 1):
            try:
                rows.append(Evaluation.read(row))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise damaged_line(self.rows.path, line, self.rows.advice(self._mark())) from error
        return rows

    def resume(self, rounds: int, say: Callable[[str], None], begun: int = 0) -> Checkpoint | None:
        """Returns the newest whole checkpoint, after which a run of so many rounds goes on; None begins it again.

        Says what is damaged or missing. Removes what came after the checkpoint: damaged newer ones, and their rows.
        Only for the process that has locked the folder. begun: the round to begin at without a checkpoint.
        """
        saved, skipped = self.load()
        for line in (*(f"{self.path}: {line}" for line in skipped), *self.notices()):
            say(line)
        self.tidy()
        last = begun if saved is None else saved.round
        if saved is not None and last > rounds:
            raise InputError(f"{self.path} has {last} rounds already: Train.rounds={rounds} would undo some")
        if saved is None and (self.path / "summary.json").is_file():
            raise InputError(f"{self.path} is finished, but its checkpoints are gone: copy them again, or overwrite it")
        if saved is None and self.metrics():
            say(f"{self.path} has scores but no checkpoint: it is trained from the first round")
        if skipped:  # their marks are of rows that are about to go
            self._checkpoints.remove_after(last)
        again = saved is not None and last < rounds and saved.note["finished"]  # its last stage comes later now
        self.cut_metrics(last - again)
        if last < rounds:
            self.reopen()
        return saved

    def cut_metrics(self, after: int) -> None:
        """Removes what was measured after round `after`: it will be measured again."""
        mark, last = self._mark(), self.newest_round()
        if mark and mark["bytes"] and not self.rows.path.exists() and last is not None:
            self.manifest.lose_rows(last + 1)
        self.rows.cut(after, self._mark())

    # what is said of the data, and of the whole run

    def write_json(self, name: str, value: object) -> None:
        self.manifest.replace(name, (json.dumps(jsonable(value), indent=1) + "\n").encode())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, after which metrics.jsonl does not change any more."""
        self.manifest.begin()
        self.manifest.note(METRICS)
        self.write_json("summary.json", summary)

    def reopen(self) -> None:
        """Removes the summary and the calibrations of fewer rounds; they are written again at the end."""
        for name in ("summary.json", DRIFT):
            if (self.path / name).exists():
                self.manifest.remove(name)

    def about(self) -> dict[str, Any]:
        """Returns what data.json says about the data and the run's preset or file; empty without it."""
        path, advice = self.path / "data.json", "delete it if the data are those that the run was made with"
        if self.manifest.state("data.json") in ("changed", "stray"):
            raise Damaged(f"{path} is damaged: {advice}")
        about = read_object(path, {"classes": list, "clients": dict}, advice) if os.path.lexists(path) else {}
        try:
            if about and not _data_fit(about):
                raise ValueError
        except (TypeError, ValueError) as error:
            raise Damaged(f"{path} is damaged: {advice}") from error
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
        kinds = {"round": int, "method": str, "data": str, "metric": str, "parameters": dict}
        advice = f"write it again with perada train --out {shlex.quote(str(self.path))} --resume"
        if self.manifest.state("summary.json") in ("changed", "stray"):  # also a link to itself, which does not exist
            raise Damaged(f"{path} is damaged: {advice}")
        if not os.path.lexists(path):
            raise InputError(f"{self.path} has no summary yet: resume the run to finish it")
        summary = read_object(path, kinds, advice)
        try:
            Evaluation.read(summary)
            Guarantee.read(summary)
            if "drift" in summary:
                DriftScores.read(summary["drift"])
            if "shifts" in summary:
                Shifts.read(summary["shifts"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{path} is damaged: {advice}") from error
        numbers = [*summary["parameters"].values(), summary.get("cohort", 1), summary.get("threads", 1)]
        if not all(is_number(n) for n in numbers) or not isinstance(summary.get("versions", {}), dict):
            raise Damaged(f"{path} is damaged: {advice}")
        return summary

    # checkpoints

    def has_checkpoint(self) -> bool:
        """Returns whether clients that did not change can be taken from a checkpoint."""
        return self._checkpoints.begun

    def save(self, checkpoint: Checkpoint, changed: Container[str], rows: Mark | None = None) -> None:
        """Writes `round-NNNN`. changed: the clients whose state did. rows: the mark of the rows at that moment."""
        self.manifest.begin()
        self._checkpoints.save(checkpoint, changed, self.rows.mark() if rows is None else rows)

    def newest_round(self) -> int | None:
        """Returns the round of the newest checkpoint, by its name alone."""
        paths = self._checkpoints.listed()
        return round_of(paths[-1]) if paths else None

    def checkpoint_digest(self, round: int) -> str:
        """Returns a checksum of all files of the newest checkpoint; empty if that is of another round."""
        note = self._checkpoints.newest_note()
        if note is None or note.content["round"] != round:
            return ""
        return hashlib.sha256(json.dumps(note.content["sha256"], sort_keys=True).encode()).hexdigest()

    def kept_rounds(self) -> list[int]:
        """Returns the rounds of the checkpoints that the folder has, by their names alone."""
        return [round_of(p) for p in self._checkpoints.listed()]

    def load(self, round: int | None = None) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest whole checkpoint, and a line about each damaged one that was skipped.

        round: returns the checkpoint after so many rounds and no other.
        """
        return self._checkpoints.load(round)

    def undo(self, round: int) -> None:
        """Removes every checkpoint after `round`, the newest first, and what was measured and written after it."""
        self._checkpoints.remove_after(round)
        self.cut_metrics(round)
        self.reopen()
        (self.path / "report.html").unlink(missing_ok=True)

    def _older_names(self, count: int) -> list[str]:
        """Returns the clients of a checkpoint of an older version, which has them by position; [] if nothing is known.

        The order in data.json and that in metrics.jsonl must agree: a client must never get another's model.
        """
        names = list(self.about().get("clients", ()))
        for row in self.metrics()[-1:]:
            measured = [list(row[s]["per_client"]) for s in SPLITS if isinstance(row.get(s), dict)][:1]
            if names and measured and names != measured[0]:
                raise Damaged("data.json has the clients in another order than metrics.jsonl")
            names = names or [n for one in measured for n in one]
        if names and len(names) != count:
            raise Damaged(f"it has {count} clients, and the data have {len(names)}")
        return names

    # the frozen backbone, if the config alone cannot make it again

    def save_backbone(self, tensors: Mapping[str, Tensor]) -> None:
        self.manifest.replace(BACKBONE, save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}))

    @property
    def backbone(self) -> Path | None:
        """The file; None without one. Damaged if it is not what was written."""
        path = self.path / BACKBONE
        state = self.manifest.state(BACKBONE)
        if state == "stray":
            raise Damaged(f"{path} is not a part of this run: remove it")
        if state in ("changed", "missing"):
            wrong = "is damaged" if state == "changed" else "is missing"
            raise Damaged(f"{path} {wrong}: copy it again, or train again")
        return path if path.is_file() else None
