"""What a federation left behind: its runs at the server, and how to follow, list and take them out."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..errors import InputError, RunError, unknown
from ..runs.folder import RunFolder, at_work, write_atomic
from .control import Control
from .project import Project

Say = Callable[[str], None]
LOOK_S = 0.5
ASK_S = 10.0  # between two questions to Flower whether the run still runs
SOON_S = 2.0  # where the run says that it failed, which may be what an earlier try of it said


def runs(project: Project) -> dict[str, dict[str, Any]]:
    """flower.json of every run of a project, by the run's name, oldest first."""
    found = sorted(project.settings().runs().glob("*/flower.json"), key=lambda p: p.stat().st_mtime)
    return {p.parent.name: _about(p) for p in found}


def _about(file: Path) -> dict[str, Any]:
    """flower.json; a run that says it is running, and that nobody works on, was stopped."""
    try:
        about: dict[str, Any] = json.loads(file.read_text("utf8"))
        _ = about["status"], about["round"], about["rounds"]
    except (OSError, ValueError, KeyError, TypeError):
        return {"status": "damaged", "round": "?", "rounds": "?", "error": f"cannot read {file}"}
    if about["status"] == "running" and not at_work(file.parent):
        about["status"] = "stopped"
    return about


def pick(project: Project, name: str | None) -> Path:
    """The folder of a run; the newest where none is named."""
    known = runs(project)
    if not known:
        raise InputError(f"{project.folder} has no run yet: start one with `perada flower run`")
    if name is not None and name not in known:
        raise unknown("run", name, known)
    return project.settings().runs() / (name or list(known)[-1])


def free_name(project: Project) -> str:
    """run-1, run-2, ...: the first that is not taken."""
    known, n = project.settings().runs(), 1
    while (known / f"run-{n}").exists():
        n += 1
    return f"run-{n}"


def collect(project: Project, name: str | None, out: Path) -> Path:
    """A copy of a run as a run folder, with the global adapter (or model) as one file beside its checkpoints.

    Personal models are not in it: they are at the sites (`perada flower export` there).
    """
    source = pick(project, name)
    RunFolder.check(out, overwrite=False)
    saved, _ = RunFolder(source).load()
    if saved is None:
        raise InputError(f"{source} has no finished round yet: wait for one")
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns("*.part"))
        held = {n: t[0] for state in (saved.broadcast.params, saved.broadcast.buffers) for n, t in state.items()}
        about = {"round": str(saved.round), "federation": project.settings().federation.name}
        data = save({n: t.contiguous() for n, t in held.items()}, about)
        write_atomic(part / "global.safetensors", data)
        if out.exists():  # empty, as checked above
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}") from error
    return out


@dataclass
class Follower:
    """Tells of a run what its files say, each thing once."""

    folder: Path
    say: Say
    rows: int = 0
    events: int = 0

    def look(self) -> dict[str, Any]:
        """Tell what is new; flower.json as it is now, empty before there is one."""
        for row in (found := RunFolder(self.folder).evaluations())[self.rows :]:
            self.say(f"round {row.round}: {row.brief()}")
        self.rows = max(self.rows, len(found))
        for event in (told := list(self._events()))[self.events :]:
            self.say(f"round {event['round']}: {event['site'] or 'server'}: {event['event']}: {event['detail']}")
        self.events = max(self.events, len(told))
        file = self.folder / "flower.json"
        try:
            return dict(json.loads(file.read_text("utf8")))
        except (FileNotFoundError, ValueError):
            return {}

    def _events(self) -> Iterator[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        for line in file.read_text("utf8").splitlines() if file.is_file() else ():
            try:
                yield json.loads(line)
            except ValueError:
                return  # a line that is being written

    def skip(self) -> None:
        """Pass over what an earlier try of the run left."""
        self.rows, self.events = len(RunFolder(self.folder).metrics()), len(list(self._events()))


def follow(control: Control, number: str, follower: Follower, again: str) -> Path:
    """Until the run ends; RunError where it did not reach its last round, with the line (`again`) to go on with."""
    asked = time.monotonic()
    while True:
        now = follower.look()
        if now.get("status") == "finished":
            return follower.folder
        if time.monotonic() - asked > (SOON_S if now.get("status") == "failed" else ASK_S):
            asked = time.monotonic()
            try:
                status = Control.open(control.home).run_status(number)
            except (InputError, RunError) as error:
                raise RunError(f"the server is gone ({error}); rounds are saved: start it, then {again}") from error
            if status.startswith("finished"):
                now = follower.look()
                if now.get("status") == "finished":
                    return follower.folder
                why = control.complaint(number) or now.get("error") or status
                raise RunError(f"the run ended before its last round ({why}); rounds are saved: {again}")
        time.sleep(LOOK_S)
