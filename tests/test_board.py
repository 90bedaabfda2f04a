"""TensorBoard shows the numbers of metrics.jsonl."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import train
from small import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import perada
from perada.callbacks import TensorBoard
from perada.cli import main as cli
from perada.report import tensorboard as board
from perada.runs.folder import RunFolder


def shown(folder: Path) -> dict[str, dict[int, float]]:
    """Returns tag -> round -> value, as TensorBoard reads it; fails if it has a round twice."""
    read = EventAccumulator(str(folder)).Reload()
    found = dict[str, dict[int, float]]()
    for tag in read.Tags()["scalars"]:
        steps = [e.step for e in read.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag
        found[tag] = {e.step: e.value for e in read.Scalars(tag)}
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    assert train(out, method__name="perada-no-kd") == 0
    return out


def test_tensorboard_shows_what_was_measured_and_no_round_twice(run: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rows] == [1, 2]
    for _ in range(2):
        assert cli.main(["report", str(run), "--out", str(tmp_path / "a.html"), "--tensorboard", str(tmp_path)]) == 0
    found = shown(tmp_path / "mine")
    for tag, of in {
        "local_test/mean": lambda r: r["local_test"]["mean"],
        "clients/global_test/client-02": lambda r: r["global_test"]["per_client"]["client-02"],
        "global_model/global_test": lambda r: r["global_model"]["global_test"],
        "train_loss": lambda r: r["train_loss"],
        "bytes_up": lambda r: r["bytes_up"],
    }.items():
        assert found[tag] == pytest.approx({r["round"]: of(r) for r in rows}, rel=1e-6), tag
    assert "round" not in found
    read = EventAccumulator(str(tmp_path / "mine")).Reload().Scalars("train_loss")
    assert [e.wall_time for e in read] == pytest.approx([r["seconds"] for r in rows])


def test_events_are_appended_while_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    first, second = RunFolder(run).evaluations()
    board.write_events([("whole", [first, second])], tmp_path)
    writer = board.EventWriter(tmp_path / "live")
    assert shown(tmp_path / "live") == {}
    writer.add(first)
    assert shown(tmp_path / "live")["seconds"] == {1: pytest.approx(first.seconds, rel=1e-6)}
    writer.add(second)
    assert writer.path.read_bytes() == (tmp_path / "whole" / board.NAME).read_bytes()
    writer = board.EventWriter(tmp_path / "live", after=1)  # resumed: round 2 is measured again
    writer.add(replace(second, seconds=99.0))
    found = shown(tmp_path / "live")
    assert (list(found["seconds"]), found["seconds"][2]) == ([1, 2], 99.0)
    board.EventWriter(tmp_path / "live").add(second)  # a new run in its place
    assert list(shown(tmp_path / "live")["seconds"]) == [2]


def test_a_callback_writes_what_a_report_writes(tmp_path: Path) -> None:
    settings = {**SMALL, "train.rounds": 2}
    done = perada.train("digits", set=settings, out=tmp_path / "run", callbacks=[TensorBoard(tmp_path / "tb")])
    board.write_events([("report", done.folder.evaluations())], tmp_path)
    assert (tmp_path / "tb" / board.NAME).read_bytes() == (tmp_path / "report" / board.NAME).read_bytes()


@pytest.mark.parametrize("why", ["no package", "a file in the way", "twice"])
def test_what_cannot_be_written_is_one_line(
    why: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, wanted = tmp_path / "board", {"a file in the way": "cannot write ", "twice": "two runs are called mine"}
    if why == "no package":
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    if why == "a file in the way":
        where.write_text("")
    runs = [str(run)] * (2 if why == "twice" else 1)
    assert cli.main(["report", *runs, "--out", str(tmp_path / "a.html"), "--tensorboard", str(where)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert wanted.get(why, "pip install 'perada[tensorboard]'") in error
    assert not where.is_dir()


def test_numbers_by_their_place_and_nothing_else() -> None:
    row = {"round": 4, "train_loss": None, "failed": [], "method": "x", "global_model": None, "guard_chose": 2}
    row |= {"local_val": {"mean": 50.0, "per_client": {"a": 40.0, "b": None, "per_client": 3.0}}}
    wanted = {"local_val/mean": 50.0, "clients/local_val/a": 40.0, "clients/local_val/per_client": 3.0}
    wanted |= {"local_val/clients": 2.0}  # over so many is the mean
    assert board.scalars(row) == {**wanted, "guard_chose": 2.0}
