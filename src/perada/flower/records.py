"""What a server writes down about a run beside its metrics: who answered, who was refused and why, how far it is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..config import resolve
from ..errors import InputError
from ..runs import Checkpoint, RunFolder, write_atomic
from .settings import ServerSettings, checked_name


@dataclass
class Diary:
    """flower.json (how far the run is) and events.jsonl (what happened) in the run's folder."""

    path: Path
    federation: str
    run: str  # the id in every message: the name, and a part that no other run has
    rounds: int
    sites: tuple[str, ...]
    start: str = ""  # the id of the run it goes on from
    round: int = 0
    quiet: bool = False

    def say(self, text: str) -> None:
        if not self.quiet:
            print(f"perada: {text}", file=sys.stderr, flush=True)

    def tell(self, site: str, event: str, detail: str) -> None:
        """One line in events.jsonl and on the screen."""
        line = {"time": round(time.time(), 3), "round": self.round, "site": site, "event": event, "detail": detail}
        with (self.path / "events.jsonl").open("a", encoding="utf8") as f:
            f.write(json.dumps(line) + "\n")
        self.say(f"round {self.round}: {f'site {site}: ' if site else ''}{event}: {detail}")

    def status(self, status: str, round: int, error: str = "") -> None:
        self.round = round
        held: dict[str, Any] = {k: getattr(self, k) for k in ("federation", "run", "rounds", "sites", "start", "round")}
        text = json.dumps({"name": self.path.name, **held, "status": status, "error": error}, indent=1)
        write_atomic(self.path / "flower.json", (text + "\n").encode())


def open_run(
    settings: ServerSettings, name: str, resume: bool = False, start: str = "", quiet: bool = False
) -> tuple[RunFolder, Diary]:
    """The folder of a new run, or of one to go on with; `start` names a run whose end is this one's beginning."""
    try:
        path = settings.runs() / checked_name("run", name)
    except ValueError as error:
        raise InputError(str(error)) from error
    rounds, f = settings.config.train.rounds, settings.federation
    if resume and (path / "config.toml").is_file():
        folder = RunFolder.open(path)
        _same(folder, settings)
        known = _known(path)
        if known and (known["federation"], known["sites"]) != (f.name, list(f.sites)):
            raise InputError(f"{path} was made with another federation.name or federation.sites: change them back")
        if known.get("status") == "finished":
            raise InputError(f"{path} is finished: give the run another name, or continue from it")
        if known:
            diary = Diary(path, f.name, known["run"], rounds, f.sites, known["start"], quiet=quiet)
            return folder, diary
    elif path.exists():
        raise InputError(f"{path} exists: resume=true goes on with it, another name starts a new run")
    else:
        folder = RunFolder.create(path, settings.config.toml(), overwrite=False)
    before = _known(settings.runs() / checked_name("continue-from", start)).get("run", "") if start else ""
    if start and not before:
        raise InputError(f"continue-from: there is no run {start!r} in {settings.runs()}")
    diary = Diary(path, f.name, f"{name}-{token_hex(4)}", rounds, f.sites, before, quiet=quiet)
    diary.status("running", 0)
    return folder, diary


def ending(settings: ServerSettings, run: str) -> Checkpoint:
    """The newest checkpoint of a run, by its id."""
    name = run.rpartition("-")[0]
    saved, _ = RunFolder(settings.runs() / name).load()
    if saved is None or _known(settings.runs() / name).get("run") != run:
        raise InputError(f"continue-from: {name!r} has no finished round in {settings.runs()}")
    return saved


def _known(path: Path) -> dict[str, Any]:
    """flower.json of a run; empty where there is none yet."""
    file = path / "flower.json"
    if not file.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(file.read_text("utf8"))
    except ValueError as error:
        raise InputError(f"{file} is damaged: mend it, or give the run another name") from error
    return found


def _same(folder: RunFolder, settings: ServerSettings) -> None:
    """A run goes on with the settings it began with."""
    stored = resolve(str(folder.path / "config.toml")).as_dict()
    given = settings.config.as_dict()
    for section, values in stored.items():
        for key, value in values.items():
            if key != "device" and given[section].get(key) != value:
                raise InputError(
                    f"{folder.path} was made with another {section}.{key}: change server.toml back, or give the run "
                    "another name"
                )
