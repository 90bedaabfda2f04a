"""Damage to the files of a run, and the commands that must notice it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perada.cli import main as cli

CLIENT = "client-01"


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 64
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert cli.main([str(w) for w in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def commands(run: Path, home: Path) -> dict[str, list[str]]:
    """The commands that answer with a client's adapter."""
    return {
        "evaluate": ["evaluate", str(run), "--json"],
        "predict": ["predict", str(run), str(home / "seven.png"), "--client", CLIENT, "--json"],
        "export": ["export", str(run), "--client", CLIENT, "--out", str(run.parent / "one.safetensors")],
    }
