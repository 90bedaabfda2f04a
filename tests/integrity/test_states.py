"""The backbone, the data's facts and checkpoints: what is damaged is refused, or skipped with a line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import said, train
from small import adapters, as_older, tree

import perada
from perada.cli import main as cli
from perada.errors import InputError, RunError
from perada.lanes import State
from perada.runs.files import is_whole, sealed
from perada.runs.folder import RunFolder
from perada.runs.moment import Checkpoint, Moment

from .damage import CLIENT, commands, edit, flip, refused

# The backbone


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_flipped_bit_in_the_backbone_is_refused(
    run: Path, home: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "backbone.safetensors")
    assert f"{run / 'backbone.safetensors'} is damaged: copy it again" in refused(capsys, *commands(run, home)[command])


def test_a_lost_backbone_and_a_stray_one_are_refused(
    run: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert train(other, method__name="perada-no-kd", train__rounds=1) == 0
    shutil.move(run / "backbone.safetensors", other / "backbone.safetensors")
    for path, what in ((run, "is missing"), (other, "is not a part of this run: remove it")):
        for words in (commands(path, home)["predict"], ["train", "--out", str(path), "--resume"]):
            assert f"{path / 'backbone.safetensors'} {what}" in refused(capsys, *words)


def test_what_is_not_a_number_is_not_a_prediction(home: Path) -> None:
    model = perada.load(home / "whole").personal(CLIENT)
    state = State({n: torch.full_like(t, torch.nan) for n, t in model.state.params.items()}, model.state.buffers)
    with pytest.raises(RunError, match=f"the model of {CLIENT} predicts what is not a number"):
        replace(model, state=state).predict([home / "seven.png"])


# The data's facts


def reorder(about: dict[str, Any]) -> None:
    about["clients"] = dict(reversed(about["clients"].items()))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_reordered_clients_never_give_one_another_ones_adapter(
    run: Path, home: Path, command: str, older: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if older:
        as_older(run)
    edit(run / "data.json", reorder)
    line = refused(capsys, *commands(run, home)[command])
    assert ("another order than metrics.jsonl" if older else f"{run / 'data.json'} is damaged") in line


@pytest.mark.parametrize("key", ["mean", "std", "classes"])
def test_changed_facts_of_the_data_are_refused(
    run: Path, home: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / "data.json", lambda about: about[key].reverse() if key == "classes" else about.update({key: [0.9]}))
    assert f"{run / 'data.json'} is damaged: delete it if" in refused(capsys, *commands(run, home)["predict"])


def test_a_lost_data_json_is_said_and_changes_no_answer(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = said(capsys, *commands(run, home)["predict"])
    (run / "data.json").unlink()
    capsys.readouterr()
    assert cli.main(commands(run, home)["predict"]) == 0
    shown = capsys.readouterr()
    assert shown.out == wanted
    assert f"{run / 'data.json'} is missing" in shown.err


def test_a_moment_takes_its_clients_by_name() -> None:
    def state(value: float) -> State:
        return State({"w": torch.full((1, 2), value)}, {})

    note = {"counters": {}, "last": {}, "seconds": 0.0, "finished": False}
    saved = Checkpoint(1, state(0), state(0), {"north": state(1), "south": state(2)}, note)
    assert Moment.of(saved, ["south", "north"], lambda s: s).kept.params["w"][:, 0].tolist() == [2.0, 1.0]
    with pytest.raises(InputError, match="other clients than the data"):
        Moment.of(saved, ["south", "west"], lambda s: s)


# state.json


def forget(content: dict[str, Any]) -> None:
    del content["sha256"]["kept-0001.safetensors"]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an earlier round": lambda c: c.update(round=1),
    "a later round": lambda c: c.update(round=3),
    "a client is missing": forget,
    "the last client is missing": lambda c: c["sha256"].pop("kept-0003.safetensors"),
    "an empty note": lambda c: c.update(note={}),
    "text for a number": lambda c: c["note"].update(seconds="long"),
    "an unknown field": lambda c: c["note"]["last"].update(wrong=1),
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_an_edited_checkpoint_is_skipped_and_said(
    run: Path, change: str, older: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if older:
        as_older(run)
    wanted = adapters(run)
    edit(run / "checkpoints" / "round-0002" / "state.json", CHANGES[change])
    if not older:
        assert cli.main(["evaluate", str(run)]) == 0
        assert "round-0002 is damaged and skipped" in capsys.readouterr().err
    assert cli.main(["train", "--out", str(run), "--resume"]) == 0
    assert "round-0002 is damaged and skipped" in capsys.readouterr().err
    assert adapters(run) == wanted


def test_every_field_of_a_checkpoint_is_covered(run: Path) -> None:
    path = run / "checkpoints" / "round-0002" / "state.json"
    whole = path.read_text()
    for key in json.loads(whole):
        path.write_text(whole)
        edit(path, lambda content, key=key: content.pop(key))  # type: ignore[misc]
        _, skipped = RunFolder(run).load()
        assert len(skipped) == 1, key


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    before = tree(run)
    assert f"{run} is finished, but its checkpoints are gone" in refused(capsys, "train", "--out", run, "--resume")
    assert tree(run) == before


def test_a_lost_newest_checkpoint_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "round-0002")
    assert cli.main(["evaluate", str(run)]) == 0
    assert "round 2 was measured, but the newest checkpoint is of round 1" in capsys.readouterr().err


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_goes_on_from_the_older_checkpoint_and_can_be_resumed_again(
    tmp_path: Path, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With checkpoints of every second round, the newest one is of rows that are trained again."""
    run, rounds = tmp_path / "run", ["--set", "train.rounds=5"]
    settings = {"method__name": "perada-no-kd", "run__checkpoint_every": every}
    assert train(run, **settings, train__rounds=4) == 0
    assert train(tmp_path / "whole", **settings, train__rounds=5) == 0
    flip(run / "checkpoints" / "round-0004" / "kept-0000.safetensors")
    assert cli.main(["train", "--out", str(run), "--resume"]) == 0
    assert "round-0004 is damaged and skipped" in capsys.readouterr().err
    assert [row["round"] for row in perada.load(run).metrics] == [1, 2, 3, 4]
    assert cli.main(["train", "--out", str(run), "--resume", *rounds]) == 0
    assert adapters(run) == adapters(tmp_path / "whole")


def test_rows_are_readable_between_a_fallback_and_the_next_checkpoint(run: Path) -> None:
    """The damaged checkpoint goes before its rows: a process that is killed right then has lost nothing else."""
    flip(run / "checkpoints" / "round-0002" / "kept-0000.safetensors")
    lines: list[str] = []
    saved = RunFolder.open(run).resume(3, lines.append)
    assert saved is not None
    assert saved.round == 1
    assert "round-0002 is damaged and skipped" in lines[0]
    assert [row["round"] for row in RunFolder.open(run).metrics()] == [1]
    again = RunFolder.open(run).resume(3, lines.append)
    assert again is not None
    assert (again.round, len(lines)) == (1, 1)


def test_checksums_do_not_depend_on_keys_being_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(sealed({"sites": {2: "north", 10: "south"}, "none": {None: 1}}))
    assert is_whole(json.loads((tmp_path / "x.json").read_text()))
