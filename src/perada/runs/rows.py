"""metrics.jsonl: one row per evaluated round. Rows that were lost or changed are noticed.

A checkpoint notes the length and checksum of the rows before it (its mark), and the manifest those of a finished run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import Damaged
from .files import jsonable, read_file, rows_in, write_atomic
from .manifest import METRICS, Manifest

KINDS = {"round": int}
ADVICE = "copy the file again, or delete it to continue without its rows"
Mark = Mapping[str, Any]  # bytes and sha256 of the first rows; empty where an older version wrote none


def mark_of(data: bytes) -> Mark:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class Rows:
    """The metrics of one run folder."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.path = manifest, manifest.folder / METRICS
        self._written: tuple[int, Any] | None = None  # the file's length and hash so far, once they are needed

    def append(self, row: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        size, digest = self._so_far()
        self.manifest.drop(METRICS)
        line = (json.dumps(jsonable(row)) + "\n").encode()
        with self.path.open("ab") as f:
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
        digest.update(line)
        self._written = size + len(line), digest

    def _so_far(self) -> tuple[int, Any]:
        if self._written is None:
            data = self.content()
            self._written = len(data), hashlib.sha256(data)
        return self._written

    def mark(self) -> Mark:
        """Returns the mark of all rows, for a checkpoint."""
        size, digest = self._so_far()
        return {"bytes": size, "sha256": digest.hexdigest()}

    def content(self) -> bytes:
        return read_file(self.path) if os.path.lexists(self.path) else b""

    def read(self, mark: Mark) -> list[dict[str, Any]]:
        """Returns the rows. mark: the newest checkpoint's; rows before it must be what was written."""
        return rows_in(self._trusted(mark), self.path, KINDS, self.advice(mark))

    def advice(self, mark: Mark) -> str:
        """Returns what to do about a damaged line; "" where rows have no checksum, so that it may be removed."""
        return ADVICE if mark or self.manifest.state(METRICS) != "unchecked" else ""

    def _trusted(self, mark: Mark) -> bytes:
        """Returns the bytes that are what was written; Damaged if rows before the mark are not."""
        try:
            data = self.content()
        except OSError as error:
            raise Damaged(f"cannot read {self.path} ({error.strerror}): {ADVICE}") from error
        if not data and not os.path.lexists(self.path):
            return data
        whole = data[: mark["bytes"]] if mark else b""
        if mark and mark_of(whole) != mark:
            rows_in(data, self.path, KINDS, ADVICE)  # raises an error that names the line, if it can
            raise Damaged(f"{self.path} is damaged: {ADVICE}")
        if self.manifest.state(METRICS) != "changed":
            return data
        rows_in(data, self.path, KINDS, ADVICE)  # raises an error for a line between others
        return whole

    def problem(self, mark: Mark) -> str:
        """Returns in one line what is wrong with the file; empty if all rows are there."""
        state = self.manifest.state(METRICS)
        if not os.path.lexists(self.path) and (state == "missing" or (mark and mark["bytes"])):
            return f"{self.path} is missing: copy it again; without it the scores of earlier rounds are lost"
        try:
            self.read(mark)
        except Damaged as error:
            return str(error)
        if state == "changed":
            return (
                f"{self.path}: the last row is not what was written and is not used: resume the run to measure it again"
            )
        return ""

    def cut(self, after: int, mark: Mark) -> None:
        """Removes what was measured after round `after`: it will be measured again."""
        rows = [r for r in self.read(mark) if r["round"] <= after]
        data = "".join(json.dumps(r) + "\n" for r in rows).encode()
        if data != self.content():
            self.manifest.drop(METRICS)
            write_atomic(self.path, data)
            self._written = None
