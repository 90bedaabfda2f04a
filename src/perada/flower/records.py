"""What a server writes down about a run beside its metrics: who answered, who was refused and why, how far it is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..config import resolve
from ..config.settings import OF_SERVER, RULES, different
from ..errors import Damaged, InputError
from ..inputs import printable
from ..privacy.ledger import Ledger
from ..privacy.spending import SPENT, ledger_in
from ..runs.files import read_object, write_atomic
from ..runs.folder import RunFolder
from ..runs.moment import Checkpoint
from .quarantine import Quarantine
from .settings import MAX_ROUND, ServerSettings, checked_name

KINDS = {"federation": str, "run": str, "sites": list, "data": dict, "start": str, "start_round": int, "status": str}


@dataclass
class Diary:
    """flower.json (how far the run is) and events.jsonl (what happened) in the run's folder."""

    path: Path
    settings: ServerSettings
    run: str  # the id in every message: the name, and a part that no other run has
    start: str = ""  # the id of the run that this one continues,
    start_round: int = 0  # and how many rounds of it were done
    round: int = 0
    changed: str = ""  # a line about a setting that is another one now than when the run began
    undone: tuple[int, ...] = ()  # the rounds to which the run went back, one after another
    spent: Ledger = field(default_factory=Ledger)  # by the sites, at level client; undone rounds stay in it
    quarantine: Quarantine = field(init=False)

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.settings.rounds.quarantine)

    @property
    def history(self) -> str:
        """`undone` as it is sent to the sites."""
        return ",".join(map(str, self.undone))

    def begin(self) -> None:
        """Writes down a setting that a resumed run may change. Only for the process that has locked the folder."""
        if self.changed:
            write_atomic(self.path / "config.toml", self.settings.config.toml().encode())
            self.tell("", "changed", self.changed)
            self.changed = ""

    def say(self, text: str) -> None:
        print(f"perada: {printable(text)}", file=sys.stderr, flush=True)

    def tell(self, site: str, event: str, detail: str) -> None:
        """Writes a line in events.jsonl and on the screen. What sites say of themselves is made printable."""
        detail = printable(detail)
        line = {"time": round(time.time(), 3), "round": self.round, "site": site, "event": event, "detail": detail}
        with (self.path / "events.jsonl").open("a", encoding="utf8") as f:
            f.write(json.dumps(line) + "\n")
        self.say(f"round {self.round}: {f'site {site}: ' if site else ''}{event}: {detail}")

    def status(self, status: str, round: int, error: str = "") -> None:
        """Writes flower.json."""
        self.round = round
        note = {
            "name": self.path.name,
            "federation": self.settings.federation.name,
            "run": self.run,
            "rounds": self.settings.config.train.rounds,
            "sites": self.settings.federation.sites,
            "data": _data(self.settings),
            "start": self.start,
            "start_round": self.start_round,
            "undone": list(self.undone),
            "quarantine": self.quarantine.refused,
            "spent": self.spent.as_note(),
            "round": round,
            "status": status,
            "error": error,
        }
        write_atomic(self.path / "flower.json", (json.dumps(note, indent=1) + "\n").encode())


def open_run(
    settings: ServerSettings, name: str, resume: bool = False, start: str = "", back: int | None = None
) -> tuple[RunFolder, Diary]:
    """Returns the folder of a new or a resumed run.

    start: the name of a run that a new run continues. back: a finished run may go on, as it goes back to that round.
    """
    path, keep = settings.runs() / checked_name("run", name), settings.rounds.keep
    begun = resume and (path / "config.toml").is_file()
    if begun:
        changed = _check_config(path, settings)
        if note := _note(path):
            _check_resumed(path, note, settings, start, back is not None)
            return RunFolder(path, keep), _resumed(path, settings, note, changed)
    elif path.exists():
        raise InputError(f"{path} exists: resume=true goes on with it, another name starts a new run")
    if back is not None:
        raise InputError(f"there is no run {name!r} to go back in: see `perada flower status`")
    before = _start_id(settings, start)  # a run that cannot begin leaves nothing behind
    if not begun:
        RunFolder.create(path, settings.config.toml(), overwrite=False)
    diary = Diary(path, settings, f"{name}-{token_hex(4)}", before)
    diary.status("running", 0)
    return RunFolder(path, keep), diary


def _resumed(path: Path, settings: ServerSettings, note: dict[str, Any], changed: str) -> Diary:
    """Returns the diary as it was."""
    round = note.get("round", 0)
    if type(round) is not int or not 0 <= round < MAX_ROUND:
        raise Damaged(f"{path / 'flower.json'} is damaged: round is not a number of rounds")
    diary = Diary(path, settings, note["run"], note["start"], note["start_round"], round, changed)
    undone = note.get("undone", [])  # an older version did not write these two
    if not isinstance(undone, list) or not all(type(r) is int and r >= 0 for r in undone):
        raise Damaged(f"{path / 'flower.json'} is damaged: undone does not list rounds")
    diary.undone = tuple(undone)
    diary.quarantine.load(note.get("quarantine", {}), str(path / "flower.json"))
    diary.spent = _spent(note, path)
    return diary


def go_back(folder: RunFolder, diary: Diary, round: int) -> None:
    """Undoes all that came after so many rounds; the sites learn of it with the next request.

    The checkpoints go first: if this is interrupted, the sites refuse what does not follow from what they have, and
    the same command can be given again. What was spent is written down before: those models have been sent.
    """
    if diary.settings.config.privacy.of_clients and (newest := folder.load()[0]) is not None:
        diary.spent = diary.spent.joined(ledger_in(newest.note.get("memory", {})))
        diary.status("running", diary.round)
    folder.undo(round)
    diary.undone += (round,)
    diary.quarantine.undo(round)
    diary.status("running", round)
    diary.tell("", "undone", f"the run continues from round {round}")


def ending(settings: ServerSettings, run: str) -> Checkpoint:
    """Returns the newest checkpoint of a run, by its id, with all that the run has spent.

    With differential privacy of clients it must have a ledger. Else its model holds uploads without noise.
    """
    name = run.rpartition("-")[0]
    path = settings.runs() / name
    saved, _ = RunFolder(path).load()
    if saved is None or (note := _note(path)).get("run") != run:
        raise InputError(f"continue-from: {name!r} has no finished round in {settings.runs()}")
    if not settings.config.privacy.of_clients:
        return saved
    memory = saved.note.get("memory", {})
    spent = ledger_in(memory).joined(_spent(note, path))
    if not spent.spent:
        raise InputError(
            f"continue-from: {name!r} was trained without Privacy.level=client, so its model is not private: "
            "start without it"
        )
    return replace(saved, note={**saved.note, "memory": {**memory, SPENT: spent.as_note()}})


def _spent(note: dict[str, Any], path: Path) -> Ledger:
    """Returns the ledger of a flower.json; an older version wrote none."""
    try:
        return Ledger.read(note.get("spent", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged(f"{path / 'flower.json'} is damaged: spent is not a ledger") from error


def _data(settings: ServerSettings) -> dict[str, Any]:
    """Returns what a label's number means and what an image is: this never changes in a run."""
    f = settings.federation
    return {"classes": list(f.classes), "channels": f.channels, "multilabel": f.multilabel}


def _other_data(note: dict[str, Any], settings: ServerSettings) -> str:
    """Returns a key of the data with which a run was made differently; empty if there is none."""
    return next((f"federation.{k}" for k, v in _data(settings).items() if note["data"].get(k) != v), "")


def _start_id(settings: ServerSettings, start: str) -> str:
    """Returns the id of the run to continue; empty without a name."""
    if not start:
        return ""
    note = _note(settings.runs() / checked_name("continue-from", start))
    if not note:
        raise InputError(f"continue-from: there is no run {start!r} in {settings.runs()}")
    if other := _other_data(note, settings):
        raise InputError(f"continue-from: {start!r} was made with another {other}: start without it")
    ending(settings, note["run"])
    return str(note["run"])


def _note(path: Path) -> dict[str, Any]:
    """Returns flower.json of a run; empty if the run has none yet."""
    file = path / "flower.json"
    return read_object(file, KINDS, "fix it, or give the run another name") if file.is_file() else {}


def _check_config(path: Path, settings: ServerSettings) -> str:
    """Refuses to resume a run with other settings than it began with, except those in OF_SERVER.

    Returns a line about a setting that changes what is trained; empty if there is none.
    """
    before, after = resolve(str(path / "config.toml")).flat(), settings.config.flat()
    if other := different(before, after, OF_SERVER):
        raise InputError(f"{path} was made with another {other}: change server.toml back, or give the run another name")
    rule = different(before, after, {*before} - RULES)
    return f"{rule} is {after[rule]} now, it was {before[rule]}" if rule else ""


def _check_resumed(path: Path, note: dict[str, Any], settings: ServerSettings, start: str, back: bool) -> None:
    """Refuses to resume a finished run, and one of another federation or beginning."""
    other = _other_data(note, settings)
    if (note["federation"], note["sites"]) != (settings.federation.name, list(settings.federation.sites)):
        other = "federation.name or federation.sites"
    if other:
        raise InputError(f"{path} was made with another {other}: change it back")
    if note["status"] == "finished" and not back:
        raise InputError(f"{path} is finished: give the run another name, or continue from it")
    if start and note["start"].rpartition("-")[0] != start:
        raise InputError(f"{path} did not begin from {start!r}: leave continue-from out, or give it another name")
