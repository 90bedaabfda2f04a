"""metrics.jsonl and summary.json: no row and no number that was lost or changed is used unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import as_older

import perada
from perada.cli import main as cli
from perada.lanes import State
from perada.runs.folder import RunFolder
from perada.runs.moment import COUNTERS, Checkpoint, Evaluation

from .damage import CLIENT, commands, edit, refused

# metrics.jsonl


@pytest.mark.parametrize("command", ["evaluate", "report", "train"])
def test_lost_metrics_are_said(run: Path, home: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    words = {**commands(run, home), "report": ["report", str(run)], "train": ["train", "--out", str(run), "--resume"]}
    assert cli.main(words[command]) == 0
    assert f"{run / 'metrics.jsonl'} is missing: copy it again" in capsys.readouterr().err


@pytest.mark.parametrize("line", [0, 1])
def test_changed_rows_are_never_used(run: Path, line: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first row cannot be measured again; the last one can."""
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    wanted = [row["local_test"] for row in perada.load(run).metrics]
    changed = [*whole]
    changed[line] = changed[line].replace('"mean": ', '"mean": 1', 1)
    for text in ("".join(changed), whole[1 - line]):
        (run / "metrics.jsonl").write_text(text)
        assert cli.main(["evaluate", str(run)]) == 0
        assert str(run / "metrics.jsonl") in capsys.readouterr().err
        if line == 0:
            assert "metrics.jsonl is damaged: copy the file again, or" in refused(capsys, "report", run)
            assert "metrics.jsonl is damaged: copy" in refused(capsys, "train", "--out", run, "--resume")
            continue
        assert cli.main(["report", str(run)]) == 0
        assert "the last row is not what was written" in capsys.readouterr().err
        assert cli.main(["train", "--out", str(run), "--resume"]) == 0
        assert "the last row is not what was written" in capsys.readouterr().err
        assert [row["local_test"] for row in perada.load(run).metrics] == wanted


# summary.json


def test_a_changed_summary_is_refused_and_written_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = json.loads((run / "summary.json").read_text())["local_test"]
    edit(run / "summary.json", lambda summary: summary["local_test"].update(mean=99.0))
    assert f"{run / 'summary.json'} is damaged: write it again with " in refused(capsys, "report", run)
    assert cli.main(["train", "--out", str(run), "--resume"]) == 0
    assert perada.load(run).summary["local_test"] == wanted


def test_a_summary_that_links_to_itself_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    (run / "summary.json").symlink_to(run / "summary.json")
    assert f"{run / 'summary.json'} is damaged: write it again with " in refused(capsys, "report", run)


TEXTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "bytes": lambda c: c.update(bytes_up="many"),
    "seconds": lambda c: c.update(seconds="long"),
    "a score": lambda c: c["local_test"]["per_client"].update({CLIENT: "good"}),
    "the server's score": lambda c: c.update(global_model={"global_test": "good"}),
    "clients": lambda c: c.update(failed="all"),
    "a round": lambda c: c.update(round=True),
    "a huge number": lambda c: c.update(bytes_up=10**400),
    "a list": lambda c: c.update(distill=[1]),
}
OF_SUMMARY: dict[str, Callable[[dict[str, Any]], object]] = {
    "parameters": lambda c: c["parameters"].update(trained="few"),
    "cohort": lambda c: c.update(cohort="all"),
    "versions": lambda c: c.update(versions="new"),
}


@pytest.mark.parametrize("change", [*TEXTS, *OF_SUMMARY])
def test_text_for_a_number_in_an_older_folder_is_one_line(
    run: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older folders have no checksums, so the kinds of the values are checked."""
    as_older(run)
    whole = (run / "summary.json").read_text()
    edit(run / "summary.json", {**TEXTS, **OF_SUMMARY}[change])
    assert f"{run / 'summary.json'} is damaged" in refused(capsys, "report", run)
    (run / "summary.json").write_text(whole)
    if change in TEXTS:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        TEXTS[change](rows[0])
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert f"{run / 'metrics.jsonl'} is damaged: remove its line 1" in refused(capsys, "report", run)


def test_endless_nesting_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("summary.json", "data.json", "manifest.json"):
        whole = (run / name).read_bytes()
        (run / name).write_text("[" * 100_000)
        assert f"{run / name} is damaged" in refused(capsys, "report", run)
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("older", [False, True])
def test_advice_about_a_line_never_makes_it_worse(run: Path, older: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a line, the others do not have their checksum any more; older folders have none."""
    if older:
        as_older(run)
    path = run / "metrics.jsonl"
    path.write_text("{" + path.read_text())
    line = refused(capsys, "report", run)
    if older:
        assert line == f"error: {path} is damaged: remove its line 1"
    else:
        assert (
            line
            == f"error: {path} is damaged in line 1: copy the file again, or delete it to continue without its rows"
        )


@pytest.mark.parametrize("loss", [1e18, 1e30, 1e200])
def test_a_huge_loss_is_read_as_it_was_written(tmp_path: Path, loss: float) -> None:
    folder = RunFolder.create(tmp_path / "run", "[train]\nrounds = 3\n", overwrite=False)
    state, counters = State({"w": torch.zeros(1, 2)}, {}), dict.fromkeys(COUNTERS, 0)
    note = {"counters": counters, "last": {"train_loss": loss}, "seconds": 1.0, "finished": False}
    folder.append_metrics(Evaluation(1, {}, train_loss=loss).as_dict())
    folder.save(Checkpoint(1, state, state, {}, note), [])
    again = RunFolder.open(folder.path)
    saved, skipped = again.load()
    assert saved is not None
    assert (saved.note["last"]["train_loss"], skipped) == (loss, [])
    assert [row.train_loss for row in again.evaluations()] == [loss]
