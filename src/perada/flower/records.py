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
from ..runs.folder import RunFolder, write_atomic
from ..runs.moment import Checkpoint
from .settings import ServerSettings, checked_name

KEYS = ("federation", "run", "rounds", "sites", "data", "start", "start_round")  # of flower.json, beside what changes


@dataclass
class Diary:
    """flower.json (how far the run is) and events.jsonl (what happened) in the run's folder."""

    path: Path
    federation: str
    run: str  # the id in every message: the name, and a part that no other run has
    rounds: int
    sites: tuple[str, ...]
    data: dict[str, Any]  # what a label's number means and what an image is: never changes in a run
    start: str = ""  # the id of the run it goes on from,
    start_round: int = 0  # and how many rounds of it were done
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
        held: dict[str, Any] = {k: getattr(self, k) for k in (*KEYS, "round")}
        text = json.dumps({"name": self.path.name, **held, "status": status, "error": error}, indent=1)
        write_atomic(self.path / "flower.json", (text + "\n").encode())


def open_run(
    settings: ServerSettings, name: str, resume: bool = False, start: str = "", quiet: bool = False
) -> tuple[RunFolder, Diary]:
    """The folder of a new run, or of one to go on with; `start` names a run whose end is this one's beginning."""
    path = settings.runs() / checked_name("run", name)
    rounds, f, data = settings.config.train.rounds, settings.federation, _data(settings)
    if resume and (path / "config.toml").is_file():
        folder = RunFolder.open(path)
        _same(folder, settings)
        known = _known(path)
        if known and (known["federation"], known["sites"]) != (f.name, list(f.sites)):
            raise InputError(f"{path} was made with another federation.name or federation.sites: change them back")
        for key, value in data.items():
            if known and known["data"].get(key) != value:
                raise InputError(f"{path} was made with another federation.{key}: change it back")
        if known.get("status") == "finished":
            raise InputError(f"{path} is finished: give the run another name, or continue from it")
        if known and start and known["start"].rpartition("-")[0] != start:
            raise InputError(f"{path} did not begin from {start!r}: leave continue-from out, or give it another name")
        if known:
            begun = known["start"], known["start_round"]
            return folder, Diary(path, f.name, known["run"], rounds, f.sites, data, *begun, quiet=quiet)
        before = _before(settings, start)
    elif path.exists():
        raise InputError(f"{path} exists: resume=true goes on with it, another name starts a new run")
    else:
        before = _before(settings, start)  # first, for what cannot begin shall leave nothing
        folder = RunFolder.create(path, settings.config.toml(), overwrite=False)
    diary = Diary(path, f.name, f"{name}-{token_hex(4)}", rounds, f.sites, data, before, quiet=quiet)
    diary.status("running", 0)
    return folder, diary


def _data(settings: ServerSettings) -> dict[str, Any]:
    f = settings.federation
    return {"classes": list(f.classes), "channels": f.channels, "multilabel": f.multilabel}


def _before(settings: ServerSettings, start: str) -> str:
    """The id of the run to go on from, if it has something to go on from."""
    if not start:
        return ""
    known = _known(settings.runs() / checked_name("continue-from", start))
    if not known:
        raise InputError(f"continue-from: there is no run {start!r} in {settings.runs()}")
    for key, value in _data(settings).items():
        if known["data"].get(key) != value:
            raise InputError(f"continue-from: {start!r} was made with another federation.{key}: start without it")
    ending(settings, known["run"])
    return str(known["run"])


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
        if any(not isinstance(found[k], kind) for k, kind in (("run", str), ("sites", list), ("data", dict))):
            raise ValueError
        _ = [found[k] for k in (*KEYS, "status")]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged: fix it, or give the run another name") from error
    return found


def _same(folder: RunFolder, settings: ServerSettings) -> None:
    """A run goes on with the settings it began with, but for those of the machine."""
    stored = resolve(str(folder.path / "config.toml")).as_dict()
    given = settings.config.as_dict()
    for section, values in stored.items():
        for key, value in values.items():
            if key not in ("device", "precision") and given[section].get(key) != value:
                raise InputError(
                    f"{folder.path} was made with another {section}.{key}: change server.toml back, or give the run "
                    "another name"
                )
