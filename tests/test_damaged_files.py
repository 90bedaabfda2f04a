"""Files of a run, a comparison or a search that are not what was written: one line that says what to do, or what was
saved before is used; never a traceback."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from commands import strict, train
from small import flags, tree

import perada
from perada.cli import main as cli
from perada.errors import InputError

SETTINGS = {"method__name": "perada-no-kd", "train__rounds": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damaged") / "whole"
    assert train(out, **SETTINGS) == 0
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    capsys.readouterr()
    return tmp_path / "run"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line of a command that ends with code 2."""
    capsys.readouterr()
    assert cli.main(list(words)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("text", ["{", "{}", "[]", ""])
def test_a_damaged_summary_is_told_of_and_can_be_written_again(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(text)
    line = refused(capsys, "report", str(run))
    assert f"{run / 'summary.json'} is damaged: write it again with " in line
    assert cli.main(shlex.split(line.split(" with ")[1])[1:]) == 0
    found = json.loads((run / "summary.json").read_text())
    assert found["local_test"] == before["local_test"]


def test_a_comparison_with_a_damaged_summary_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both"
    words = ["compare", "digits", "--methods", "perada-no-kd", *flags(train__rounds=1), "--out", str(out)]
    assert cli.main(words) == 0
    (out / "perada-no-kd-0" / "summary.json").write_text("{}")
    line = refused(capsys, "compare", "--out", str(out), "--resume")
    assert f"{out / 'perada-no-kd-0' / 'summary.json'} is damaged" in line
    assert cli.main(shlex.split(line.split(" with ")[1])[1:]) == 0
    assert cli.main(["compare", "--out", str(out), "--resume"]) == 0


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"classes": [], "clients": {}, "source": "digits"}'])
def test_a_damaged_data_json_is_told_of(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "data.json").write_text(text)
    for words in (["evaluate", str(run)], ["train", "digits", "--out", str(run), "--resume"]):
        assert f"{run / 'data.json'} is damaged: delete it if " in refused(capsys, *words)
    (run / "data.json").unlink()
    assert cli.main(["evaluate", str(run)]) == 0


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"round": 2, "sha256": [], "note": {}}'])
def test_a_checkpoint_that_is_described_otherwise_is_passed_over(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "round-0002" / "state.json").write_text(text)
    for words in (["evaluate", str(run), "--json"], ["train", "--out", str(run), "--resume", "--json"]):
        assert cli.main(words) == 0
        found = capsys.readouterr()
        assert "round-0002 is damaged and skipped" in found.err
        strict(found.out)


def test_other_names_among_the_checkpoints_are_nothing_to_us(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "checkpoints" / "round-0001", run / "checkpoints" / "round-copy")
    assert cli.main(["evaluate", str(run)]) == 0
    assert train(run, "--resume", **{**SETTINGS, "train__rounds": 3}) == 0
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["round-0002", "round-0003", "round-copy"]
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", '{"round": "two"}'])
def test_a_last_row_of_metrics_that_is_none_is_measured_again(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = perada.load(run).metrics
    (run / "metrics.jsonl").write_text(f"{json.dumps(before[0])}\n{text}\n")
    assert cli.main(["report", str(run)]) == 0
    assert train(run, "--resume", **SETTINGS) == 0
    assert [r["local_test"] for r in perada.load(run).metrics] == [r["local_test"] for r in before]


def test_a_row_of_metrics_between_others_that_is_none_is_told_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind it must not be lost in silence."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([rows[0], "{}", rows[1]]) + "\n")
    before = tree(run)
    for words in (["report", str(run)], ["train", "--out", str(run), "--resume", "--set", "train.rounds=3"]):
        assert f"{run / 'metrics.jsonl'} is damaged in line 2: copy the file again" in refused(capsys, *words)
    assert tree(run) == before
    with pytest.raises(InputError, match="damaged in line 2"):
        perada.load(run, say=lambda line: None).table()


def test_a_half_line_of_a_searchs_results_is_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "search"
    words = ["--methods", "perada-no-kd", "--grid", "train.lr=0.01,0.02", "--grid", "method.lam=1"]
    assert cli.main(["tune", "digits", *words, *flags_without_lr(), "--out", str(out)]) == 0
    path = out / "results.jsonl"
    before = path.read_text()
    path.write_text(before[:-20])
    assert cli.main(["tune", "--out", str(out), "--resume"]) == 0
    assert path.read_text() == before


def flags_without_lr() -> list[str]:
    words = flags(train__rounds=1)
    at = next(i for i, w in enumerate(words) if w.startswith("train.lr="))
    return words[: at - 1] + words[at + 1 :]
