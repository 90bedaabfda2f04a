"""What `perada evaluate` measures after a training stays in the run folder and is in its report. Its progress too."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import said, strict, train
from own_images import refused

import perada
from perada.cli import main as cli
from perada.cli.watch import Watch
from perada.runs import further
from perada.runs.moment import Progress


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("further") / "run"
    assert train(out, run__shifts=False) == 0
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def text_of(run: Path) -> str:
    assert cli.main(["report", str(run)]) == 0
    return " ".join(re.sub(r"<[^>]*>", " ", (run / "report.html").read_text()).split())


def test_later_scores_are_in_the_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Further test sets" not in text_of(run)
    found = strict(said(capsys, "evaluate", str(run), "--on", "local,shifted:1,fog:3", "--json"))
    kept = json.loads((run / "evaluations.json").read_text())["sets"]
    assert kept == {name: {"round": 2, **found[name]} for name in ("shifted:1", "fog:3")}, "not local"
    page = text_of(run)
    assert "Further test sets" in page
    for name in ("shifted:1", "fog:3"):
        assert f"{name} {found[name]['mean']:.2f} ± {found[name]['std']:.2f} 2" in page
    assert cli.main(["evaluate", str(run), "--on", "fog:2"]) == 0
    assert "perada report" in capsys.readouterr().err
    assert further.further_scores(run).keys() == {"shifted:1", "fog:3", "fog:2"}


def test_shifted_scores_of_the_same_round_are_the_runs_own(run: Path) -> None:
    """They are shown where a training that measures them shows its own."""
    before = text_of(run)
    opened = perada.load(run, device="cpu")
    scores = perada.client.scores.Scores(dict.fromkeys(opened.clients, 12.34))
    further.add_scores(run, 1, {"shifted": scores})
    old = text_of(run)
    assert old.count("12.34") == 1, "of another round: in the table of further sets only"
    further.add_scores(run, 2, {"shifted": scores})
    assert text_of(run).count("12.34") > 3
    assert "12.34" not in before


def test_a_folder_with_them_is_a_run_folder_as_any_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "evaluate", str(run), "--on", "fog:3")
    assert train(run, "--resume", run__shifts=False, train__rounds=3) == 0
    assert "fog:3" in text_of(run)
    (run / "evaluations.json").write_text((run / "evaluations.json").read_text().replace('"round": 2', '"round": 3'))
    assert "evaluations.json is damaged: delete it" in refused(capsys, "report", str(run))
    assert train(run, "--overwrite", run__shifts=False) == 0
    assert not (run / "evaluations.json").exists()


def test_where_nothing_can_be_written_a_line_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(further, "write_atomic", full)
    assert "fog:3" in said(capsys, "evaluate", str(run), "--on", "fog:3", "--json")
    assert cli.main(["evaluate", str(run), "--on", "fog:3"]) == 0
    assert "its report will not show these scores" in capsys.readouterr().err


def test_the_clock_of_a_training_begins_after_the_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have two rounds: a bar that was full once would show that time for ever."""
    now = [100.0]
    watch = Watch()
    monkeypatch.setattr(watch.bar, "get_time", lambda: now[0])
    task = watch.bar.tasks[0]
    task._get_time, task.start_time = lambda: now[0], now[0]
    for stage in ("pretraining", "training"):
        for round in range(3):
            watch.round(Progress(round, 2, None, (), stage=stage))
            assert task.description == stage
            assert task.elapsed == 10.0 * round
            now[0] += 10
    watch.bar.stop()
