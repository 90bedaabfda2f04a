"""Run folders: what they say, that they need no file outside, and which of them a run takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import strict, train
from PIL import Image
from safetensors.torch import load_file, save_file
from small import adapters, flags, plain, tree

import perada
from perada.cli import main as cli
from perada.config import build
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State
from perada.models.resnet import resnet
from perada.runs.files import at_work, locked
from perada.runs.folder import RunFolder
from perada.runs.moment import Moment

# What a run folder says.


def test_metrics_are_json_even_when_training_explodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and Infinity are Python's own and break every other reader."""
    out = tmp_path / "run"
    assert train(out, "--json", train__lr=1e30, train__rounds=1, distill__steps=2) == 0
    found = capsys.readouterr()
    assert "training stopped being finite" in found.err
    for text in (found.out, (out / "metrics.jsonl").read_text(), (out / "summary.json").read_text()):
        strict(text)


@pytest.mark.parametrize("key", ["data__val", "data__test"])
@pytest.mark.parametrize("method", ["perada", "fedavg"])
def test_a_run_without_validation_or_test_data_is_trained_or_refused(
    tmp_path: Path, key: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guard has no judge and keeps the average; scores are n/a. A refusal is fine too, a traceback is not."""
    code = train(tmp_path / "run", "--json", **{"method__name": method, key: 0.0, "train__rounds": 1})
    found = capsys.readouterr()
    if code == 2:
        assert found.err.startswith("error: ")
        return
    assert code == 0
    row = json.loads(found.out)
    missing = "local_val" if key == "data__val" else "local_test"
    assert row[missing]["mean"] is None
    if method == "perada" and key == "data__val":
        assert row["distill"]["guard_chose"] == 0


# Weights that the config alone cannot make again travel with the run.


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "seven.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    return path


def test_a_weights_file_may_be_deleted_after_training(
    tmp_path: Path, png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "mine.safetensors"
    net = resnet("resnet8", 10, seed=5)
    save_file({k: t for k, t in net.state_dict().items() if "num_batches" not in k}, given)
    out = tmp_path / "run"
    assert train(out, method__name="perada-no-kd", model__weights=str(given)) == 0
    assert "47 tensors" in capsys.readouterr().err.replace("\n", " ")
    kept = load_file(out / "backbone.safetensors")
    assert torch.equal(kept["layer1.0.conv1.weight"], net.layer1[0].conv1.weight)
    before = perada.load(out).predict("client-00", [png])
    given.unlink()
    assert perada.load(out).predict("client-00", [png]) == before
    assert cli.main(["evaluate", str(out), "--json"]) == 0
    assert train(out, "--resume", method__name="perada-no-kd", model__weights=str(given), train__rounds=3) == 0


def test_weights_pretrained_with_fedavg_travel_with_the_run(
    tmp_path: Path, png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = {"model__weights": "fedavg", "model__pretrain_rounds": 1, "method__name": "perada-no-kd"}
    assert train(out, **settings) == 0
    stderr = capsys.readouterr().err
    assert "pretraining resnet8 with 1 rounds of FedAvg" in stderr.replace("\n", " ")
    kept = load_file(out / "backbone.safetensors")
    assert not torch.equal(kept["layer1.0.conv1.weight"], resnet("resnet8", 10, seed=0).layer1[0].conv1.weight)
    assert perada.load(out).predict("client-00", [png])[0]["client"] == "client-00"
    assert train(out, "--resume", **settings, train__rounds=3) == 0
    assert "pretraining" not in capsys.readouterr().err, "the backbone of the folder serves, it is not made again"
    again = tmp_path / "again"
    assert cli.main(["train", str(out / "config.toml"), "--out", str(again)]) == 0
    assert adapters(again) == adapters(out)


def test_random_weights_come_from_the_seed_and_need_no_file(tmp_path: Path, png: Path) -> None:
    found = {}
    for seed in (0, 1):
        out = tmp_path / f"run-{seed}"
        settings = plain({"method__name": "perada-no-kd", "model__weights": "random", "train__rounds": 1})
        run = perada.train("digits", set=settings, seed=seed, out=out)
        assert not (out / "backbone.safetensors").exists()
        found[seed] = run.model("client-00").state_dict()["layer1.0.conv1.weight"]
        assert perada.load(out).predict("client-00", [png]) == run.predict("client-00", [png])
    assert not torch.equal(found[0], found[1])


# Which folder.


def test_the_default_folder_is_never_an_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = plain({"method__name": "perada-no-kd", "train__rounds": 1})
    paths = [str(perada.train("digits", set=settings).path) for _ in range(3)]
    assert paths == ["runs/digits-perada-no-kd-0", "runs/digits-perada-no-kd-0-2", "runs/digits-perada-no-kd-0-3"]


def test_two_runs_started_together_take_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is free when the first begins to load its data, and taken when it has."""
    monkeypatch.chdir(tmp_path)
    settings = plain({"method__name": "perada-no-kd", "train__rounds": 1})
    others: list[Path] = []

    def slow_build(*words: Any, **more: Any) -> Experiment:
        with monkeypatch.context() as patch:
            patch.setattr("perada.runs.train.build", build)
            others.append(perada.train("digits", set=settings).path)
        return build(*words, **more)

    monkeypatch.setattr("perada.runs.train.build", slow_build)
    assert str(perada.train("digits", set=settings).path) == "runs/digits-perada-no-kd-0-2"
    assert others == [Path("runs/digits-perada-no-kd-0")]


def test_resume_without_a_folder_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", *flags(method__name="perada-no-kd", train__rounds=1)]
    assert cli.main(words) == 0
    assert cli.main(words) == 0
    words = ["train", "digits", *flags(method__name="perada-no-kd", train__rounds=2)]
    assert cli.main([*words, "--resume"]) == 0
    assert json.loads(Path("runs/digits-perada-no-kd-0-2/summary.json").read_text())["round"] == 2
    assert json.loads(Path("runs/digits-perada-no-kd-0/summary.json").read_text())["round"] == 1


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    settings = {"method__name": "perada-no-kd", "train__rounds": 1}
    assert train(out, **settings) == 0
    (out / "notes.txt").write_text("the user's own")
    assert train(out, **settings) == 2
    assert train(out, "--overwrite", **settings) == 2, "a folder with more than a run in it is not deleted"
    assert (out / "notes.txt").exists()
    (out / "notes.txt").unlink()
    old = out / "checkpoints" / "round-0001" / "state.json"
    before = old.stat().st_mtime_ns
    assert train(out, "--overwrite", **settings) == 0
    assert old.stat().st_mtime_ns > before


def test_overwrite_without_out_replaces_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", *flags(method__name="perada-no-kd", train__rounds=1)]
    assert cli.main(words) == 0
    assert cli.main([*words, "--overwrite"]) == 0
    assert [p.name for p in Path("runs").iterdir()] == ["digits-perada-no-kd-0"]


@pytest.mark.parametrize("word", ["", "--overwrite"])
def test_a_folder_that_is_no_run_is_refused_as_such(
    tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither --resume nor --overwrite would do anything with it: the line must not send anybody there."""
    (tmp_path / "notes.txt").write_text("the user's own")
    assert train(tmp_path, *word.split()) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path} exists and is not a run folder, so it is not overwritten: choose another --out\n"
    )


def test_what_a_kill_left_half_written_does_not_keep_a_run_from_being_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = {"method__name": "perada-no-kd", "train__rounds": 1}
    assert train(out, **settings) == 0
    (out / ".summary.json.123.part").write_text("{")
    assert train(out, "--overwrite", **settings) == 0
    assert not list(out.glob(".*"))


# One process at a time.


@pytest.mark.parametrize("word", ["--overwrite", "--resume"])
def test_a_run_that_is_at_work_is_not_touched(tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    settings = {"method__name": "perada-no-kd", "train__rounds": 1}
    assert train(out, **settings) == 0
    before = tree(out)
    with locked(out):
        assert train(out, word, **{**settings, "train__rounds": 2}) == 2
    assert "another process is at work" in capsys.readouterr().err
    assert tree(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_is_locked_from_its_first_write_to_its_last(
    tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced or new: whoever looks while something is written sees that somebody is at work."""
    out, seen = tmp_path / "run", set()
    settings = plain({"method__name": "perada-no-kd", "train__rounds": 1})
    if overwrite:
        perada.train("digits", set=settings, out=out)
    real = os.replace

    def look(source: Path, target: Path) -> None:
        seen.add((target.name, at_work(out)))
        real(source, target)

    monkeypatch.setattr(os, "replace", look)
    perada.train("digits", set=settings, out=out, overwrite=overwrite)
    assert {"config.toml", "data.json", "round-0001", "summary.json", "report.html"} <= {name for name, _ in seen}
    assert {name for name, held in seen if not held} == set()


def test_a_folder_that_keeps_more_checkpoints_goes_back_to_one_of_them(tmp_path: Path) -> None:
    state = State({"w": torch.ones(1, 2)})
    folder = RunFolder(tmp_path, keep=4)
    for round in range(1, 7):
        folder.append_metrics({"round": round})
        folder.save(Moment(round, state, state).checkpoint(1.0, (), False, False), ())
    folder.write_json("summary.json", {})
    assert RunFolder(tmp_path).load(4)[0].round == 4
    with pytest.raises(InputError, match=r"no checkpoint after round 2 \(it has: 3, 4, 5, 6\)"):
        folder.load(2)
    folder.undo(4)
    assert folder.newest_round() == folder.load()[0].round == 4
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3, 4]
    assert not (tmp_path / "summary.json").exists()
