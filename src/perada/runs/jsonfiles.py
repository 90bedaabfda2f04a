"""Small JSON files, read so that a damaged one is one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from ..errors import Damaged

Kinds = Mapping[str, type | UnionType]


def fits(value: Any, kinds: Kinds) -> bool:
    """Whether it has all these keys, with values of these kinds."""
    return isinstance(value, dict) and all(k in value and isinstance(value[k], kind) for k, kind in kinds.items())


def read_object(path: Path, kinds: Kinds, advice: str) -> dict[str, Any]:
    """Returns a JSON object with values of these kinds. advice: what to do about a damaged file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf8"))
    except ValueError:  # no JSON, or no text
        found = {}
    if not fits(found, kinds):
        raise Damaged(f"{path} is damaged: {advice}")
    return found


def read_rows(path: Path, kinds: Kinds) -> list[dict[str, Any]]:
    """Returns the lines of a .jsonl file, none without a file; skips a last one that a kill cut off."""
    lines = path.read_text("utf8", "replace").splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if fits(row, kinds):
            rows.append(row)
        elif number < len(lines):
            raise Damaged(f"{path} is damaged: remove its line {number}")
    return rows
