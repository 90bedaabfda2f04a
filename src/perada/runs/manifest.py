"""manifest.json: the format of a run folder, and the checksums of the files in it that results depend on.

Checkpoints are not in it: each has its own checksums in its state.json.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any, Literal

from ..errors import Damaged, InputError
from .files import digest_of, is_whole, read_object, sealed, write_atomic

FORMAT = 2  # of run folders; 1 had no manifest, and clients by position
METRICS = "metrics.jsonl"
BACKBONE = "backbone.safetensors"
DRIFT = "drift.json"
FILES = ("data.json", BACKBONE, "summary.json", DRIFT)  # metrics.jsonl is added when the run is finished
PATIENCE = 5  # times that a reader looks again, in case another process is writing
State = Literal["whole", "changed", "missing", "stray", "unchecked"]


class NewerFormat(InputError):
    """A newer version of perada wrote this."""


def check_format(path: Path, content: dict[str, Any]) -> None:
    """Refuses the format of a newer version."""
    if content["format"] > FORMAT:
        raise NewerFormat(f"{path} was written by a newer version of perada (format {content['format']}): update it")


class Manifest:
    """The manifest of one run folder.

    Each file has the checksums that it may have; None means that it may be missing. A change is noted before it is
    made and again after it, so a kill between the two leaves a folder in which both contents are valid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "manifest.json"

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> dict[str, list[str | None]] | None:
        """Returns the checksums that each file may have; None without a manifest."""
        sums: dict[str, list[str | None]] | None = self._content().get("sha256")
        return sums

    @property
    def rows_from(self) -> int:
        """The first round whose checkpoint knows the rows of metrics.jsonl: those before it were lost."""
        return int(self._content().get("rows_from", 0))

    def _content(self) -> dict[str, Any]:
        """Returns what the manifest says, nothing without one."""
        if not self.exists:
            return {}
        advice = "copy it again, or delete it to use the folder unchecked"
        content = read_object(self.path, {"format": int, "sha256": dict}, advice)
        check_format(self.path, content)
        if not is_whole(content) or not all(isinstance(sums, list) for sums in content["sha256"].values()):
            raise Damaged(f"{self.path} is damaged: {advice}")
        return content

    def state(self, name: str) -> State:
        """Returns whether a file is what was written; "unchecked" where nothing is known of it."""
        state: State = "unchecked"
        for _ in range(PATIENCE):
            known = self.read()
            if known is None or (name == METRICS and name not in known):
                return "unchecked"
            state = self._compare(name, known.get(name, [None]))
            if state == "whole":
                break
            time.sleep(0.02)
        return state

    def _compare(self, name: str, sums: list[str | None]) -> State:
        path = self.folder / name
        try:
            digest = digest_of(path)
        except FileNotFoundError:
            return "whole" if None in sums else "missing"
        except OSError:
            return "changed"
        return "whole" if digest in sums else "stray" if sums == [None] else "changed"

    def begin(self) -> None:
        """Writes a manifest of what is there, if the folder has none."""
        if not self.exists:
            self.folder.mkdir(exist_ok=True)
            self._write({name: [digest_of(self.folder / name)] for name in FILES if (self.folder / name).is_file()})

    def replace(self, name: str, data: bytes) -> None:
        """Writes a file, and notes its checksum."""
        self.begin()
        sums, new = self.read() or {}, hashlib.sha256(data).hexdigest()
        if sums.get(name) != [new]:
            self._write({**sums, name: [*sums.get(name, [None]), new]})
        write_atomic(self.folder / name, data)
        if sums.get(name) != [new]:
            self._write({**sums, name: [new]})

    def remove(self, name: str) -> None:
        """Deletes a file."""
        self.begin()
        sums = self.read() or {}
        if sums.get(name):
            self._write({**sums, name: [*sums[name], None]})
        (self.folder / name).unlink(missing_ok=True)
        self.drop(name)

    def note(self, name: str) -> None:
        """Notes the checksum of a file as it is, if there is one."""
        if (self.folder / name).is_file():
            self._write({**(self.read() or {}), name: [digest_of(self.folder / name)]})

    def drop(self, name: str) -> None:
        """Forgets a file."""
        sums = self.read() or {}
        if name in sums:
            self._write({n: s for n, s in sums.items() if n != name})

    def lose_rows(self, before: int) -> None:
        """Notes that the user goes on without the rows of metrics.jsonl before a round."""
        self._write(self.read() or {}, before)

    def _write(self, sums: dict[str, list[str | None]], rows_from: int | None = None) -> None:
        first = self.rows_from if rows_from is None else rows_from
        write_atomic(self.path, sealed({"format": FORMAT, "sha256": sums, "rows_from": first}))
