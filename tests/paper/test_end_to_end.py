"""From the first slice to the document, folder by folder: the result is that of one long run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import commands, document, overview
from experiments.__main__ import main as run_experiments
from experiments.plans import experiments, main_trials

from .test_running import Ticking, numbers
from .tiny import experiment


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` with the digits: two seeds, three rounds, four evaluated methods of which one has a last stage."""
    trials = [t for t in main_trials("digits", (0, 1)) if not t.name.startswith(("ditto", "standalone"))]
    held = {**experiments(), "main": replace(experiment(*trials, train__rounds=3), name="main")}
    for module in (commands, overview, document):
        monkeypatch.setattr(module, "experiments", lambda: held)


def go(home: Path, *more: str) -> None:
    assert run_experiments([*more, "--out", str(home / "runs"), "--results", str(home / "results")]) == 0


def written(home: Path) -> dict[str, str]:
    """The document and its figures, less how long it took."""
    out = home / "docs" / "results.md"
    assert run_experiments(["document", "--results", str(home / "results"), "--out", str(out)]) == 0
    text = re.sub(r"[\d.]+ minutes in all", "", out.read_text("utf8"))
    return {"": text, **{p.name: p.read_text("utf8") for p in (home / "docs" / "results").iterdir()}}


@pytest.mark.usefixtures("tiny")
def test_slices_in_moved_folders_make_the_same_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path / "whole", "main")
    whole = capsys.readouterr().out
    assert "main: 8 of 8 runs done" in whole
    at, slices = tmp_path / "0", 0
    monkeypatch.setattr(commands, "Clock", lambda minutes: Ticking(8))
    while True:
        go(at, "main", "--minutes", "9")
        line = capsys.readouterr().out
        if "main: 8 of 8" in line:
            break
        assert "minutes left" in line
        assert "the same command goes on" in line
        slices += 1
        there = tmp_path / str(slices)
        at.rename(there)  # as if the folders were copied to another machine
        at = there
    assert slices >= 2
    assert numbers(at, "main") == numbers(tmp_path / "whole", "main")
    assert written(at) == written(tmp_path / "whole")
    assert "perada − perada-no-kd" in written(at)[""]
