"""Formats of run folders, files of other kinds, temporary files, and reading while another process writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from commands import said, train
from helpers import assert_same_tensors
from safetensors.torch import load_file
from small import adapters, as_older

import perada
from perada.cli import main as cli
from perada.lanes import State
from perada.runs.files import replaced, write_atomic
from perada.runs.folder import RunFolder
from perada.runs.moment import Checkpoint
from perada.temporary import sweep, temporary_path

from .damage import CLIENT, commands, edit, refused

# Formats


def test_an_older_folder_is_used_as_before(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {name: said(capsys, *words) for name, words in commands(run, home).items()}
    exported = load_file(run.parent / "one.safetensors")
    as_older(run)
    answers = {name: said(capsys, *words) for name, words in commands(run, home).items()}
    assert answers == wanted
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
    params = perada.load(run).state(CLIENT).params
    assert all(torch.equal(params[n], wanted[n]) for n in wanted)


def test_a_lost_manifest_is_said(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = said(capsys, *commands(run, home)["predict"])
    (run / "manifest.json").unlink()
    capsys.readouterr()
    assert cli.main(commands(run, home)["predict"]) == 0
    shown = capsys.readouterr()
    assert shown.out == wanted
    assert f"{run / 'manifest.json'} is missing: the other files are used unchecked" in shown.err


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
    for name in ("summary.json", "data.json", "metrics.jsonl"):
        (run / name).rename(run / "aside")
        (run / name).mkdir()
        assert str(run / name) in refused(capsys, "report", run)
        (run / name).rmdir()
        (run / name).symlink_to(run / name)
        assert str(run / name) in refused(capsys, "report", run)
        (run / name).unlink()
        (run / "aside").rename(run / name)


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


# Temporary files


def test_temporary_files_of_others_stay(tmp_path: Path) -> None:
    """`replaced` works in folders that are not locked, and names can begin alike."""
    theirs, live, dead = (
        temporary_path(tmp_path / "a.safetensors"),
        temporary_path(tmp_path / "a"),
        temporary_path(tmp_path / "a"),
    )
    for path in (theirs, live, dead):
        path.mkdir()
    for path in (theirs, dead):
        os.utime(path, (1, 1))
    with replaced(tmp_path / "a") as part:
        (part / "x").touch()
    assert {p.name for p in tmp_path.iterdir()} == {"a", theirs.name, live.name}
    sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a", live.name}
    sweep(tmp_path, idle=0)
    assert {p.name for p in tmp_path.iterdir()} == {"a"}
