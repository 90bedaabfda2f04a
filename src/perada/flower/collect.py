"""The runs at a server: lists, follows and collects them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..errors import Damaged, InputError, RunError, unknown
from ..runs.folder import RunFolder, at_work, replaced, write_atomic
from ..runs.jsonfiles import read_object
from .control import Control
from .project import Project

Say = Callable[[str], None]
LOOK_S = 0.5
ASK_S = 10.0  # seconds between two questions to Flower whether the run still runs
SOON_S = 2.0  # the same if flower.json says that it failed, which an earlier try of the run may have written


def runs(project: Project) -> dict[str, dict[str, Any]]:
    """Returns flower.json of every run of a project, by the run's name, oldest first."""
    files = sorted(project.settings().runs().glob("*/flower.json"), key=lambda p: p.stat().st_mtime)
    return {p.parent.name: _about(p) for p in files}


def _about(file: Path) -> dict[str, Any]:
    """Returns flower.json; a run that says it is running while no process works on it was stopped."""
    try:
        about = read_object(file, {"status": str, "round": int, "rounds": int}, "")
    except (Damaged, OSError):
        return {"status": "damaged", "round": "?", "rounds": "?", "error": f"cannot read {file}"}
    if about["status"] == "running" and not at_work(file.parent):
        about["status"] = "stopped"
    return about


def pick(project: Project, name: str | None) -> Path:
    """Returns the folder of a run, by default of the newest."""
    known = runs(project)
    if not known:
        raise InputError(f"{project.folder} has no run yet: start one with `perada flower run`")
    if name is not None and name not in known:
        raise unknown("run", name, known)
    return project.settings().runs() / (name or list(known)[-1])


def free_name(project: Project) -> str:
    """Returns the first of run-1, run-2, ... that does not exist."""
    folder = project.settings().runs()
    return next(name for n in count(1) if not (folder / (name := f"run-{n}")).exists())


def collect(project: Project, name: str | None, out: Path) -> Path:
    """Copies a run to a run folder, with the global adapter (or model) as one file in it.

    It has no personal models: those are at the sites (`perada flower export` there).
    """
    source = pick(project, name)
    RunFolder.check(out, overwrite=False)
    checkpoint, _ = RunFolder(source).load()
    if checkpoint is None:
        raise InputError(f"{source} has no finished round yet: wait for one")
    sent = checkpoint.broadcast
    tensors = {n: t[0].contiguous() for part in (sent.params, sent.buffers) for n, t in part.items()}
    about = {"round": str(checkpoint.round), "federation": project.settings().federation.name}
    try:
        with replaced(out) as part:
            shutil.copytree(source, part, ignore=shutil.ignore_patterns("*.part"), dirs_exist_ok=True)
            write_atomic(part / "global.safetensors", save(tensors, about))
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}") from error
    return out


class Follower:
    """Reports what the files of a run say, each thing once; skips what an earlier try of the run left."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        self.rows, self.events = len(RunFolder(folder).metrics()), len(self._events())

    def look(self) -> dict[str, Any]:
        """Reports what is new; returns flower.json, empty before there is one."""
        rows, events = RunFolder(self.folder).evaluations(), self._events()
        for row in rows[self.rows :]:
            self.say(f"round {row.round}: {row.brief()}")
        for event in events[self.events :]:
            self.say(f"round {event['round']}: {event['site'] or 'server'}: {event['event']}: {event['detail']}")
        self.rows, self.events = max(self.rows, len(rows)), max(self.events, len(events))
        try:
            return dict(json.loads((self.folder / "flower.json").read_text("utf8")))
        except (FileNotFoundError, ValueError):
            return {}

    def _events(self) -> list[dict[str, Any]]:
        file, events = self.folder / "events.jsonl", []
        for line in file.read_text("utf8").splitlines() if file.is_file() else ():
            try:
                events.append(json.loads(line))
            except ValueError:  # a line that is being written
                break
        return events


def follow(control: Control, number: str, follower: Follower, again: str) -> Path:
    """Waits for a run's end and returns its folder. again: the command that continues a run that ended early."""
    asked, ended = time.monotonic(), ""
    while True:
        about = follower.look()
        if about.get("status") == "finished":
            return follower.folder
        if ended:  # before this look
            why = control.complaint(number) or about.get("error") or ended
            raise RunError(f"the run ended before its last round ({why}); rounds are saved: {again}")
        if time.monotonic() - asked > (SOON_S if about.get("status") == "failed" else ASK_S):
            asked = time.monotonic()
            try:
                status = Control.open(control.home).run_status(number)
            except (InputError, RunError) as error:
                raise RunError(f"the server is gone ({error}); rounds are saved: start it, then {again}") from error
            ended = status if status.startswith("finished") else ""
        time.sleep(LOOK_S)
