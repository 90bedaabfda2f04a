"""The command line as tests call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import flags

from perada.cli import main as cli


def train(out: Path, *words: str, **set: Any) -> int:
    """`perada train` of the small digits run; its exit code."""
    return cli.main(["train", "digits", *flags(**set), "--out", str(out), "--device", "cpu", *words])


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints on standard output; it must succeed."""
    capsys.readouterr()
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def strict(text: str) -> Any:
    """Exactly one JSON document, of JSON's own values only."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
