"""What a run's results depend on is under checksums, and clients have names: nothing is lost or exchanged unsaid."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said, train
from helpers import assert_same_tensors
from PIL import Image
from safetensors.torch import load_file, save_file
from small import adapters, as_older, tree

import perada
from perada.cli import main as cli
from perada.errors import InputError, RunError
from perada.lanes import State
from perada.models.resnet import resnet
from perada.runs.files import write_atomic
from perada.runs.folder import RunFolder
from perada.runs.moment import Checkpoint, Moment

CLIENT = "client-01"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a backbone file, and an image."""
    path = tmp_path_factory.mktemp("integrity")
    save_file(resnet("resnet8", 10, seed=5).state_dict(), path / "mine.safetensors")
    settings = {"method__name": "perada-no-kd", "model__weights": str(path / "mine.safetensors")}
    assert train(path / "whole", **settings, train__rounds=2) == 0
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(path / "seven.png")
    return path


@pytest.fixture
def run(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(home / "whole", tmp_path / "run")
    capsys.readouterr()
    return tmp_path / "run"


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
    found = capsys.readouterr()
    assert found.out == wanted
    assert f"{run / 'data.json'} is missing" in found.err


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
            assert "metrics.jsonl is damaged: copy it again, or delete it" in refused(capsys, "report", run)
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


# Formats


def test_an_older_folder_is_used_as_before(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {name: said(capsys, *words) for name, words in commands(run, home).items()}
    exported = load_file(run.parent / "one.safetensors")
    as_older(run)
    found = {name: said(capsys, *words) for name, words in commands(run, home).items()}
    assert found == wanted
    assert_same_tensors(load_file(run.parent / "one.safetensors"), exported)
    assert cli.main(["report", str(run)]) == 0
    assert "missing" not in capsys.readouterr().err
    assert cli.main(["train", "--out", str(run), "--resume", "--set", "train.rounds=3"]) == 0
    longer = run.parent / "longer"
    settings = {"method__name": "perada-no-kd", "model__weights": str(home / "mine.safetensors")}
    assert train(longer, **settings, train__rounds=3) == 0
    assert adapters(run) == adapters(longer)
    assert (run / "manifest.json").is_file()


def test_an_older_folder_without_data_json_has_its_clients_in_the_order_of_its_rows(run: Path, home: Path) -> None:
    wanted = perada.load(run).state(CLIENT).params
    as_older(run)
    (run / "data.json").unlink()
    found = perada.load(run).state(CLIENT).params
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_lost_manifest_is_said(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = said(capsys, *commands(run, home)["predict"])
    (run / "manifest.json").unlink()
    capsys.readouterr()
    assert cli.main(commands(run, home)["predict"]) == 0
    found = capsys.readouterr()
    assert found.out == wanted
    assert f"{run / 'manifest.json'} is missing: the other files are used unchecked" in found.err


@pytest.mark.parametrize("file", ["manifest.json", "checkpoints/round-0002/state.json"])
def test_a_newer_format_is_refused(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / file, lambda content: content.update(format=3))
    assert "was written by a newer version of perada (format 3): update it" in refused(capsys, "evaluate", run)


# Files of other kinds, and names that another user could guess


@pytest.mark.parametrize("file", ["data.json", "metrics.jsonl", "backbone.safetensors", "manifest.json", "state.json"])
def test_a_pipe_in_place_of_a_file_never_blocks(
    run: Path, home: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(run.rglob(file))
    path.unlink()
    os.mkfifo(path)
    code, text = cli.main(commands(run, home)["predict"]), capsys.readouterr().err
    assert code in (0, 2)
    assert file in text or "round-000" in text


@pytest.mark.parametrize("older", [False, True])
def test_a_folder_or_a_link_to_itself_is_one_line(run: Path, older: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if older:
        as_older(run)
    for path in (run / "summary.json", run / "data.json", run / "metrics.jsonl"):
        path.rename(run / "aside")
        path.mkdir()
        assert str(path) in refused(capsys, "report", run)
        path.rmdir()
        path.symlink_to(path)
        assert str(path) in refused(capsys, "report", run)
        path.unlink()
        (run / "aside").rename(path)


def test_a_half_written_file_has_a_name_that_nobody_can_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of a shared folder would put a link there, and have the file behind it overwritten."""
    target, names = tmp_path / "x.json", list[str]()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".x.json.{os.getpid()}.part").symlink_to(victim)
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(Path(a).name), real(a, b)))
    for _ in range(2):
        write_atomic(target, b"new")
    assert victim.read_text() == "precious"
    assert len(set(names)) == 2


def test_a_file_keeps_its_mode_and_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_atomic(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o600

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"newer")
    assert (path.read_bytes(), len(list(tmp_path.iterdir()))) == (b"new", 1)


def test_what_a_killed_process_left_is_swept_on_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / ".summary.json.0a1b2c.part").write_text("{")
    assert cli.main(["train", "--out", str(run), "--resume"]) == 0
    assert not list(run.rglob("*.part"))


# Reading while another process writes


def test_reading_while_a_run_is_saved_never_finds_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # so that there are many rounds

    def state(value: float) -> State:
        return State({"w": torch.full((1, 50), float(value))}, {})

    def checkpoint(round: int) -> Checkpoint:
        counters = dict.fromkeys(("bytes_up", "bytes_down", "distilled", "accepted"), 0)
        note = {"counters": counters, "last": {}, "seconds": 1.0, "finished": False}
        return Checkpoint(round, state(round), state(round), {n: state(round) for n in ("a", "b")}, note)

    def write() -> None:
        folder = RunFolder(tmp_path / "run")
        folder.load()
        for round in range(2, 10_000):
            folder.save(checkpoint(round), ["a"])
            folder.append_metrics({"round": round})
            if stop.is_set():
                return

    stop = threading.Event()
    folder = RunFolder.create(tmp_path / "run", "[train]\nrounds = 3\n", overwrite=False)
    folder.save(checkpoint(1), ["a", "b"])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(300):
            saved, skipped = RunFolder(tmp_path / "run").load()
            assert saved is not None
            assert skipped == []
            assert float(saved.server.params["w"][0, 0]) == saved.round
            RunFolder(tmp_path / "run").metrics()
            seen.add(saved.round)
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 20
