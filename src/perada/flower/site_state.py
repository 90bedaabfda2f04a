"""What a site keeps on its own disk: its personal state after each round, and what it answered.

    STATE/FEDERATION/SITE/RUN/round-0003/   kept.safetensors     after training in round 3: never sent
                                            reply.safetensors    what was uploaded
                                            state.json           round, digest of what it was trained from, checksums
    STATE/FEDERATION/SITE/RUN/plan.json, received.safetensors    the newest plan and broadcast, to use the model with
                                                                 (and the rounds to which the run went back)
    STATE/FEDERATION/SITE/RUN/notes.jsonl                        losses and scores by round: never sent
    STATE/FEDERATION/SITE/backbone-SHA.safetensors               the server's frozen weights, if they are a file

The state before a round is that of the entry before it. If the server asks for a round again (it died before it saved
the round), the site repeats its answer: it never trains a round twice from the same broadcast. A new run begins from
the method's first state, unless the server names a run to continue from. Older runs stay on the disk.

A server may take a run back to an earlier round (`perada flower run --from-round`). It then says so in every request
(`undone`). What was trained after that round counts no more, and is removed when a round has been trained instead. If
the state before the round is gone, the site goes on from the oldest that it has: fewer of the undone rounds are in it
than in any other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..lanes import State
from ..runs.files import is_number, locked, read_file, replaced, write_atomic
from ..runs.states import load_state, read_states, save_state
from ..server.checks import Refused
from .settings import MAX_ROUND, SiteSettings

NOTES = "notes.jsonl"
MEASURED = ("loss", "local_test", "local_val", "epsilon")  # what a row of the notes may have
_ENTRY = re.compile(r"round-(\d{4,})")


@dataclass(frozen=True)
class Entry:
    """One round that this site has trained."""

    round: int
    previous: int | None  # the round trained before this one; None if it began from the method's first state
    received: str  # `messages.digest` of what it was trained from
    kept: State
    upload: State
    said: dict[str, Any]  # the numbers of the reply
    undone: str = ""  # the rounds to which the run had gone back by then


class SiteState:
    """The folder of one site in one federation."""

    def __init__(self, state: Path, federation: str, site: str, keep: int = SiteSettings.keep) -> None:
        self.path, self.keep = state / federation / site, keep

    @contextmanager
    def locked(self, within: float) -> Iterator[None]:
        """Lets one process at a time work: another one may still train a round whose deadline has passed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from error
        with locked(self.path, within, Refused("busy with an earlier round")):
            yield

    def rounds(self, run: str) -> list[int]:
        """Returns the rounds that have an entry, oldest first."""
        home = self.path / run
        names = (_ENTRY.fullmatch(p.name) for p in home.iterdir()) if home.is_dir() else ()
        return sorted(int(m[1]) for m in names if m)

    def entry(self, run: str, round: int) -> Entry:
        """Returns an entry; refuses a damaged one, and leaves the older ones as they are."""
        path = self._folder(run, round)
        try:
            note, states = read_states(path, {"round": int, "received": str, "said": dict})
            fields = (note["round"], note["previous"], note["received"], states["kept"], states["reply"], note["said"])
            return Entry(*fields, note.get("undone", ""))
        except (InputError, OSError, KeyError) as error:
            raise InputError(
                f"{path} is damaged ({error}): move it away to continue from the round before it, which is intact"
            ) from error

    def history(self, run: str) -> list[int]:
        """Returns the rounds to which the run went back, as the newest request said."""
        try:
            undone = json.loads(read_file(self.path / run / "plan.json"))["undone"]
            return [int(round) for round in undone.split(",") if round]
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):  # none, or an older one
            return []

    def check_history(self, run: str, undone: str) -> None:
        """Refuses a request that was sent before the run went back."""
        known = self.history(run)
        if [int(round) for round in undone.split(",") if round][: len(known)] != known:
            raise Refused(f"the run has gone back to round {known[-1]} since")

    def standing(self, run: str) -> list[int]:
        """Returns the rounds that have an entry and were not undone since, oldest first."""
        history = self.history(run)
        return [r for r in self.rounds(run) if r < min(history[self._tries(run, r) :], default=r + 1)]

    def _tries(self, run: str, round: int) -> int:
        """Returns how often the run had gone back when an entry was written."""
        try:
            undone = json.loads(read_file(self._folder(run, round) / "state.json")).get("undone", "")
            return len(undone.split(",")) if undone else 0
        except (OSError, ValueError, RecursionError, AttributeError):  # `entry` refuses it
            return MAX_ROUND

    def base(self, run: str, round: int) -> int | None:
        """Returns the round whose entry is the state before `round`; None for the method's first state."""
        earlier, rounds = [r for r in self.standing(run) if r < round], self.rounds(run)
        if earlier or not rounds:
            return earlier[-1] if earlier else None
        if (first := self.entry(run, rounds[0])).previous is None:
            return None
        if self.history(run):
            return first.round
        raise Refused(f"its state before round {round} is gone: it keeps rounds {first.round} and later")

    def before(self, run: str, round: int) -> State | None:
        """Returns what the site kept when `round` began, or None if it had trained no round."""
        base = self.base(run, round)
        return None if base is None else self.entry(run, base).kept

    def newest(self, run: str) -> State | None:
        """Returns what the site keeps now."""
        return self.before(run, MAX_ROUND)

    def answered(self, run: str, round: int, received: str) -> Entry | None:
        """Returns the entry of this very work, or None if it was not done yet."""
        rounds = self.standing(run)
        if round in rounds and (entry := self.entry(run, round)).received == received:
            return entry
        if rounds and rounds[-1] > round:
            raise Refused(f"it is past round {round}: it has trained round {rounds[-1]}")
        return None

    def save(self, run: str, entry: Entry) -> None:
        """Writes `round-NNNN`, and removes what was undone and the oldest entries.

        The same round from another broadcast is replaced.
        """
        target = self._folder(run, entry.round)
        states = {"kept.safetensors": entry.kept, "reply.safetensors": entry.upload}
        note = {k: getattr(entry, k) for k in ("round", "previous", "received", "said", "undone")}
        try:
            with replaced(target, mode=0o700) as part:
                hashes = {name: save_state(part / name, state) for name, state in states.items()}
                write_atomic(part / "state.json", json.dumps({**note, "sha256": hashes}, indent=1).encode())
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror}; the round before it is intact") from error
        standing = self.standing(run)
        for old in set(self.rounds(run)) - set(standing[-self.keep :]):
            shutil.rmtree(self._folder(run, old), ignore_errors=True)

    def save_broadcast(self, run: str, plan: str, start: str, start_round: int, undone: str, broadcast: State) -> None:
        """Saves what the site's model needs besides its kept state."""
        home = self.path / run
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_state(home / "received.safetensors", broadcast)
            note = {"plan": plan, "start": start, "start_round": start_round, "undone": undone}
            write_atomic(home / "plan.json", json.dumps(note).encode())
        except OSError as error:
            raise InputError(f"cannot write to {home}: {error.strerror}") from error

    def load_broadcast(self, run: str) -> tuple[str, str, int, State]:
        """Returns the plan, the run that this one continues, how many rounds of it were done, and the broadcast."""
        home = self.path / run
        try:
            note = json.loads(read_file(home / "plan.json"))
            return note["plan"], note["start"], int(note["start_round"]), load_state(home / "received.safetensors")
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise InputError(f"{home}: plan.json is damaged ({error}): take part in another round") from error

    def note(self, run: str, row: Mapping[str, Any]) -> None:
        """Adds what was measured at the site to its notes, which are for its own people."""
        home = self.path / run
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (home / NOTES).open("a", encoding="utf8") as file:
                file.write(json.dumps(dict(row)) + "\n")
        except OSError as error:
            raise InputError(f"cannot write to {home}: {error.strerror}") from error

    def notes(self, run: str) -> list[dict[str, Any]]:
        """Returns what was measured, one row per round, without what was undone; the newest of a round counts."""
        history, rows = self.history(run), dict[int, dict[str, Any]]()
        try:
            lines = read_file(self.path / run / NOTES).decode("utf8", "replace").splitlines()
        except OSError:  # an older version wrote none
            lines = []
        for line in lines:
            try:
                row = json.loads(line)
                number, undone = row["round"], row.get("undone", "")
                values = [row[key] for key in MEASURED if row.get(key) is not None]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a kill while it was written
                continue
            if not (is_number(number, int) and isinstance(undone, str) and all(map(is_number, values))):
                continue
            back = min(history[len(undone.split(",")) if undone else 0 :], default=number)
            if number <= back:
                rows[number] = rows.get(number, {}) | row
        return [rows[number] for number in sorted(rows)]

    def runs(self) -> list[str]:
        """Returns the ids of the runs that this site took part in, the newest last."""
        plans = sorted(self.path.glob("*/plan.json"), key=lambda file: file.stat().st_mtime)
        return [file.parent.name for file in plans]

    def _folder(self, run: str, round: int) -> Path:
        return self.path / run / f"round-{round:04d}"

    def backbone_file(self, sha256: str) -> Path:
        """Returns where the server's frozen weights are kept, if they were sent."""
        return self.path / f"backbone-{sha256[:16]}.safetensors"
