"""What a site keeps, on its own disk: its personal state after each round, and what it answered.

    STATE/FEDERATION/SITE/RUN/round-0003/   kept.safetensors     after training in round 3: never sent
                                            reply.safetensors    what was uploaded
                                            state.json           round, what it was trained from, checksums
    STATE/FEDERATION/SITE/RUN/plan.json, received.safetensors    the newest plan and broadcast, to use the model with
    STATE/FEDERATION/SITE/backbone-SHA.safetensors               the server's frozen weights, where they are a file

The state before a round is that of the entry before it. A round asked for again (the server died before it saved the
round) is answered with what was answered then: a site never trains a round twice from the same broadcast. A new run
begins anew, as a simulation does, unless the server says which run it goes on from; what earlier runs left stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..lanes import State
from ..runs.folder import load_state, save_state, sync_folder, write_atomic
from .messages import Refused

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

KEEP = 3  # entries: two rounds can be asked for again, each with the state before it
_ENTRY = re.compile(r"round-(\d{4,})")


@dataclass(frozen=True)
class Entry:
    """One round that this site has trained."""

    round: int
    previous: int | None  # the round it trained before this one; None: it began from the method's first state
    received: str  # `messages.digest` of what it was trained from
    kept: State
    upload: State
    said: dict[str, Any]  # the numbers of the reply


class SiteState:
    """The folder of one site in one federation."""

    def __init__(self, state: Path, federation: str, site: str) -> None:
        self.path = state / federation / site

    @contextmanager
    def locked(self, within: float) -> Iterator[None]:
        """One process at a time: another one may still be training a round whose deadline has passed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from error
        until = time.monotonic() + within
        try:
            while fcntl is not None:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if time.monotonic() >= until:
                        raise Refused("busy with an earlier round") from error
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    def rounds(self, run: str) -> list[int]:
        """The rounds there are entries of, oldest first."""
        home = self.path / run
        found = (_ENTRY.fullmatch(p.name) for p in home.iterdir()) if home.is_dir() else ()
        return sorted(int(m[1]) for m in found if m)

    def entry(self, run: str, round: int) -> Entry:
        """An entry as it was written; a damaged one is refused, and what is older stays as it is."""
        path = self._at(run, round)
        try:
            note = json.loads((path / "state.json").read_text("utf8"))
            for name, wanted in note["sha256"].items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != wanted:
                    raise ValueError(f"{name} does not match its checksum")
            return Entry(
                round=note["round"],
                previous=note["previous"],
                received=note["received"],
                kept=load_state(path / "kept.safetensors"),
                upload=load_state(path / "reply.safetensors"),
                said=note["said"],
            )
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is damaged ({error}): move it away to go on from the round before it, which is whole"
            ) from error

    def before(self, run: str, round: int) -> State | None:
        """What the site kept when `round` began; None: nothing yet."""
        rounds = self.rounds(run)
        earlier = [r for r in rounds if r < round]
        if earlier:
            return self.entry(run, earlier[-1]).kept
        if rounds and (first := self.entry(run, rounds[0])).previous is not None:
            raise Refused(f"its state before round {round} is gone: it keeps rounds {first.round} and later")
        return None

    def newest(self, run: str) -> State | None:
        """What the site keeps now."""
        rounds = self.rounds(run)
        return self.entry(run, rounds[-1]).kept if rounds else None

    def answered(self, run: str, round: int, received: str) -> Entry | None:
        """The entry of this very work, if it was done before."""
        rounds = self.rounds(run)
        if round in rounds and (found := self.entry(run, round)).received == received:
            return found
        if rounds and rounds[-1] > round:
            raise Refused(f"it is past round {round}: it has trained round {rounds[-1]}")
        return None

    def save(self, run: str, entry: Entry) -> None:
        """Write `round-NNNN` beside the others and rename it into place."""
        target = self._at(run, entry.round)
        part, aside = (target.with_name(f".{target.name}.{word}") for word in ("part", "old"))
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True, mode=0o700)
            states = {"kept.safetensors": entry.kept, "reply.safetensors": entry.upload}
            hashes = {name: save_state(part / name, state) for name, state in states.items()}
            note = {k: getattr(entry, k) for k in ("round", "previous", "received", "said")}
            write_atomic(part / "state.json", json.dumps({**note, "sha256": hashes}, indent=1).encode())
            sync_folder(part)
            if target.exists():  # the same round from another broadcast
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(target, aside)
            os.replace(part, target)
            sync_folder(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror}; the round before it is whole") from error
        for old in self.rounds(run)[:-KEEP]:
            shutil.rmtree(self._at(run, old), ignore_errors=True)

    def received(self, run: str, plan: str, start: str, start_round: int, state: State) -> None:
        """Remember what a model is made of beside what the site keeps."""
        home, told = self.path / run, {"plan": plan, "start": start, "start_round": start_round}
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_state(home / "received.safetensors", state)
            write_atomic(home / "plan.json", json.dumps(told).encode())
        except OSError as error:
            raise InputError(f"cannot write to {home}: {error.strerror}") from error

    def told(self, run: str) -> tuple[str, str, int, State]:
        """What `received` remembered: the plan, the run it goes on from and which round of it, the broadcast."""
        home = self.path / run
        try:
            found = json.loads((home / "plan.json").read_text("utf8"))
            broadcast = load_state(home / "received.safetensors")
            return found["plan"], found["start"], int(found["start_round"]), broadcast
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{home}: plan.json is damaged ({error}): take part in another round") from error

    def runs(self) -> list[str]:
        """The ids of the runs this site took part in, the newest last."""
        found = [p.parent for p in self.path.glob("*/plan.json")] if self.path.is_dir() else []
        return [p.name for p in sorted(found, key=lambda p: (p / "plan.json").stat().st_mtime)]

    def _at(self, run: str, round: int) -> Path:
        return self.path / run / f"round-{round:04d}"

    # The server's frozen weights

    def backbone(self, sha256: str) -> Path | None:
        path = self.path / f"backbone-{sha256[:16]}.safetensors"
        return path if path.is_file() else None

    def save_backbone(self, sha256: str, data: bytes) -> None:
        write_atomic(self.path / f"backbone-{sha256[:16]}.safetensors", data)
