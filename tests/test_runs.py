"""The checkpoint format: what a kill or a damaged file may do to it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_tensors
from small import damage

from perada.errors import InputError
from perada.lanes import State
from perada.runs.files import write_atomic
from perada.runs.folder import RunFolder
from perada.runs.moment import Checkpoint
from perada.runs.states import load_state, save_state

# The checkpoint format, on states of a few numbers.


def state(value: float) -> State:
    return State({"a.weight": torch.full((1, 2), value)}, {"a.running_mean": torch.full((1, 3), -value)})


NAMES = ("north", "south", "west")


def note(round: int) -> dict[str, Any]:
    counters = {"bytes_up": round, "bytes_down": 0, "distilled": 0, "accepted": 0}
    return {"counters": counters, "last": {}, "seconds": 1.0, "finished": False}


def checkpoint(round: int, clients: int = 3) -> Checkpoint:
    kept = {NAMES[m]: state(100.0 * m + round) for m in range(clients)}
    return Checkpoint(round, state(round), state(round + 0.5), kept, note(round))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "[train]\nrounds = 3\n", overwrite=False)


def rounds_in(folder: RunFolder) -> list[str]:
    return sorted(p.name for p in folder.checkpoints.iterdir())


def test_a_state_survives_the_disk_bit_for_bit(tmp_path: Path) -> None:
    before = State({"w": torch.randn(2, 3, dtype=torch.float64)}, {"s": torch.randn(2, 1)})
    save_state(tmp_path / "x.safetensors", before, lane=1)
    found = load_state(tmp_path / "x.safetensors")
    assert_same_tensors(found.params, {"w": before.params["w"][1:]})
    assert_same_tensors(found.buffers, {"s": before.buffers["s"][1:]})


def test_a_checkpoint_comes_back_as_it_was(folder: RunFolder) -> None:
    folder.save(checkpoint(7), NAMES)
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert warnings == []
    assert (found.round, found.note) == (7, note(7))
    wanted = checkpoint(7)
    assert found.clients.keys() == wanted.clients.keys()
    pairs = [(found.clients[n], wanted.clients[n]) for n in NAMES]
    for a, b in ((found.server, wanted.server), (found.broadcast, wanted.broadcast), *pairs):
        assert_same_tensors(a.params, b.params)
        assert_same_tensors(a.buffers, b.buffers)


def test_a_method_that_keeps_nothing_and_one_that_sends_nothing_have_checkpoints(folder: RunFolder) -> None:
    folder.save(Checkpoint(1, State(), State(), {"a": state(1.0)}, note(1)), ["a"])
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.server.lanes == found.broadcast.lanes == 0
    folder.save(Checkpoint(2, state(1.0), state(2.0), {}, note(2)), [])
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.clients == {}


def test_only_the_last_two_checkpoints_are_kept(folder: RunFolder) -> None:
    for round in range(1, 6):
        folder.save(checkpoint(round), NAMES)
    assert rounds_in(folder) == ["round-0004", "round-0005"]


def test_the_ten_thousandth_round_is_newer_than_the_one_before(folder: RunFolder) -> None:
    """Names sort as text: round-10000 comes before round-9999."""
    for round in (9998, 9999, 10000, 10001):
        folder.save(checkpoint(round), NAMES)
    assert rounds_in(folder) == ["round-10000", "round-10001"]
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.round == 10001


def later(before: Checkpoint, *changed: str) -> Checkpoint:
    """The next round, in which only these clients trained."""
    fresh = checkpoint(before.round + 1)
    clients = {n: fresh.clients[n] if n in changed else before.clients[n] for n in NAMES}
    return replace(fresh, clients=clients)


def values(folder: RunFolder) -> list[float]:
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert warnings == []
    return [float(found.clients[n].params["a.weight"][0, 0]) for n in NAMES]


def inodes(folder: RunFolder) -> dict[str, list[int]]:
    return {p.name: [f.stat().st_ino for f in sorted(p.glob("*.safetensors"))] for p in folder.checkpoints.iterdir()}


def test_two_checkpoints_share_no_file(folder: RunFolder) -> None:
    """One damaged file would break both."""
    now = checkpoint(1)
    folder.save(now, NAMES)
    for changed in ((), ("south",), (), (), ("north", "west")):
        now = later(now, *changed)
        folder.save(now, changed)
        one, two = inodes(folder).values()
        assert not set(one) & set(two)
        assert values(folder) == [float(now.clients[n].params["a.weight"][0, 0]) for n in NAMES]


def test_a_state_that_does_not_change_is_written_twice_and_then_never_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = write_atomic

    def counted(path: Path, data: bytes) -> None:
        written.append(path.name)
        real(path, data)

    for module in ("checkpoints", "states"):
        monkeypatch.setattr(f"perada.runs.{module}.write_atomic", counted)
    now, counts = checkpoint(1), []
    folder.save(now, NAMES)
    for changed in ((), (), ("south",), (), ()):
        now = later(now, *changed)
        written.clear()
        folder.save(now, changed)
        counts.append(sum(name.startswith("kept-") for name in written))
    assert counts == [3, 0, 1, 1, 0]


def test_clients_are_taken_from_a_checkpoint_that_was_loaded(folder: RunFolder) -> None:
    folder.save(checkpoint(1), NAMES)
    folder.save(later(checkpoint(1)), ())
    again = RunFolder.open(folder.path)
    now, _ = again.load()
    assert now is not None
    before = inodes(folder)
    again.save(later(now, "south"), ["south"])
    after = inodes(folder)["round-0003"]
    assert [a == b for a, b in zip(after[1:4], before["round-0001"][1:4], strict=True)] == [True, False, True]


@pytest.mark.parametrize("where", ["round-0001", "round-0002"])
def test_a_damaged_file_is_not_taken_into_the_next_checkpoint(folder: RunFolder, where: str) -> None:
    """It was damaged while the run was stopped (the older checkpoint) or is running (the newest)."""
    now = later(checkpoint(1), "south")
    folder.save(checkpoint(1), NAMES)
    folder.save(now, ["south"])
    again = RunFolder.open(folder.path)
    again.load()
    for file in ("kept-0000.safetensors", "kept-0001.safetensors"):
        damage(folder.checkpoints / where / file, "one bit")
    again.save(later(now), ())
    assert values(again) == [1.0, 102.0, 201.0]


def test_a_file_system_without_links_copies(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no links here")

    folder.save(checkpoint(1), NAMES)
    monkeypatch.setattr(os, "link", refuse)
    folder.save(later(checkpoint(1)), ())
    folder.save(later(later(checkpoint(1))), ())
    assert values(folder) == [1.0, 101.0, 201.0]


def test_a_leftover_part_is_ignored_and_swept_away(folder: RunFolder) -> None:
    folder.save(checkpoint(1), NAMES)
    for name in (".round-0002.part", ".round-0002.0a1b2c.part"):  # an older version's name, and today's
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "server.safetensors").write_bytes(b"half")
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert (found.round, warnings) == (1, [])
    folder.save(checkpoint(2), NAMES)
    assert rounds_in(folder) == ["round-0001", "round-0002"]


@pytest.mark.parametrize("file", ["server.safetensors", "broadcast.safetensors", "kept-0001.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "one bit", "empty"])
def test_a_damaged_newest_checkpoint_falls_back_with_a_warning(folder: RunFolder, file: str, how: str) -> None:
    folder.save(checkpoint(1), NAMES)
    folder.save(checkpoint(2), NAMES)
    damage(folder.checkpoints / "round-0002" / file, how)
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.round == 1
    assert len(warnings) == 1
    assert "round-0002" in warnings[0]


def test_when_every_checkpoint_is_damaged_it_is_said(folder: RunFolder) -> None:
    for round in (1, 2):
        folder.save(checkpoint(round), NAMES)
        damage(folder.checkpoints / f"round-{round:04d}" / "server.safetensors", "cut")
    with pytest.raises(InputError, match=r"no checkpoint is whole.*: remove that folder and train again"):
        RunFolder.open(folder.path).load()


def test_a_new_folder_has_no_checkpoint(folder: RunFolder) -> None:
    assert folder.load() == (None, [])


def test_a_half_written_last_line_of_metrics_is_passed_over(folder: RunFolder) -> None:
    assert folder.metrics() == []
    for round in (1, 2, 3):
        folder.append_metrics({"round": round, "text": "ä"})
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 4, "loc')
    assert [r["round"] for r in folder.metrics()] == [1, 2, 3]
    folder.cut_metrics(2)
    folder.append_metrics({"round": 3})
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")

    def die(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
