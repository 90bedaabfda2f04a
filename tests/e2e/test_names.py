"""Names that come from data: on a terminal, in JSON and on a page they are text and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import said, strict
from own_images import words
from PIL import Image

from perada.callbacks import Callback
from perada.cli import console
from perada.cli import main as cli
from perada.cli.watch import Watch
from perada.runs.moment import Progress

ESCAPE, BIDI = "a\x1b[2Jb", "c\u202ed"
SITES = ["[red]x[/red]", "[/]", ":smile:", ESCAPE, BIDI, "e\nf\r\tg", "<script>h</script>", '"i",=1+1']
CLASSES = ["[bold]cat[/]", f"dog{ESCAPE}"]
SHOWN = ["[red]x[/red]", "[/]", ":smile:", "a\\x1b[2Jb", "c\\u202ed", "<script>h</script>", '"i",=1+1']


def harmless(text: str) -> None:
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    n = 10 * len(SITES)
    x = np.random.default_rng(0).integers(0, 256, (n, 8, 8), np.uint8)
    labels, site = np.arange(n) % 2, np.repeat(SITES, 10)
    np.savez(root / "mine.npz", x=x, y=labels, classes=CLASSES, site=site)
    out = root / "run"
    assert cli.main(["train", "--data", str(root / "mine.npz"), *words(), "--out", str(out)]) == 0
    return out


def test_names_on_a_terminal(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (said(capsys, "evaluate", str(run)), said(capsys, "partition", "--data", str(run.parent / "mine.npz"))):
        harmless(text)
        for name in SHOWN:
            assert name in text
    monkeypatch.setattr(console.out, "_width", 100)  # a narrow window, and a long path
    deep = run.parent / ("long" * 20)
    deep.mkdir()
    Image.new("L", (8, 8)).save(deep / f"{ESCAPE}.png")
    text = said(capsys, "predict", str(run), "--client", ESCAPE, str(deep / f"{ESCAPE}.png"))
    harmless(text)
    assert "[bold]cat[/]" in text
    assert "doga\\x1b[2Jb" in text


def test_names_in_json_and_on_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "evaluate", str(run), "--json")
    harmless(text)
    sets = [part for part in strict(text).values() if "per_client" in part]
    assert sets
    assert all(set(part["per_client"]) == set(SITES) for part in sets)
    assert json.loads((run / "data.json").read_text())["classes"] == CLASSES
    assert "<script>h" not in (run / "report.html").read_text()


def test_names_in_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (
        ["predict", str(run), "--client", "\x1b[2J", "x.png"],
        ["predict", str(run), "--client", ESCAPE, "\x1b[2J\n.png"],
        ["train", "--data", "\x1b[2J\u202e"],
        ["train", "\x1b[2J\u202e"],
        ["\x1b[2J\u202e"],
        ["train", "--\x1b[2J\u202e"],
        ["report", "\x1b[2J\u202e"],
        ["train", "digits", "--set", "train.lr=" + "x" * 100_000],
    ):
        capsys.readouterr()
        assert cli.main(typed) == 2
        found = capsys.readouterr()
        harmless(found.err)
        assert len(found.err) < 5000
        assert len(found.err.splitlines()) == 1


def test_names_in_progress(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    assert isinstance(watch, Callback)
    watch.run(0, 2, f"[/]{ESCAPE}")
    watch.round(Progress(1, 2, row=None, failed=("[/]\n\x1b[2J",)))
    watch.bar.refresh()
    watch.bar.stop()
    text = capsys.readouterr().err
    assert "warning: [/]\\n\\x1b[2J: training" in text
    assert "[/]a\\x1b[2Jb" in text
