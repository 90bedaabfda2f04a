"""The checkpoint format: what a kill or a damaged file may do to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import assert_same_tensors
from small import damage

from perada.errors import InputError
from perada.lanes import State
from perada.runs.folder import RunFolder, load_state, save_state, write_atomic
from perada.runs.moment import Checkpoint

# The checkpoint format, on states of a few numbers.


def state(value: float) -> State:
    return State({"a.weight": torch.full((1, 2), value)}, {"a.running_mean": torch.full((1, 3), -value)})


def checkpoint(round: int, clients: int = 3) -> Checkpoint:
    kept = [state(100.0 * m + round) for m in range(clients)]
    return Checkpoint(round, state(round), state(round + 0.5), kept, {"counters": {"x": round}})


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
    folder.save(checkpoint(7), range(3))
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert warnings == []
    assert (found.round, found.note) == (7, {"counters": {"x": 7}})
    wanted = checkpoint(7)
    for a, b in zip(
        [found.server, found.broadcast, *found.clients], [wanted.server, wanted.broadcast, *wanted.clients], strict=True
    ):
        assert_same_tensors(a.params, b.params)
        assert_same_tensors(a.buffers, b.buffers)


def test_a_method_that_keeps_nothing_and_one_that_sends_nothing_have_checkpoints(folder: RunFolder) -> None:
    folder.save(Checkpoint(1, State(), State(), [state(1.0)], {}), [0])
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.server.lanes == found.broadcast.lanes == 0
    folder.save(Checkpoint(2, state(1.0), state(2.0), [], {}), [])
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.clients == []


def test_only_the_last_two_checkpoints_are_kept(folder: RunFolder) -> None:
    for round in range(1, 6):
        folder.save(checkpoint(round), range(3))
    assert rounds_in(folder) == ["round-0004", "round-0005"]


def test_the_ten_thousandth_round_is_newer_than_the_one_before(folder: RunFolder) -> None:
    """Names sort as text: round-10000 comes before round-9999."""
    for round in (9998, 9999, 10000, 10001):
        folder.save(checkpoint(round), range(3))
    assert rounds_in(folder) == ["round-10000", "round-10001"]
    found, _ = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.round == 10001


def test_clients_that_did_not_change_are_links_to_the_previous_checkpoint(folder: RunFolder) -> None:
    first, second = checkpoint(1), checkpoint(2)
    folder.save(first, range(3))
    folder.save(
        Checkpoint(2, second.server, second.broadcast, [first.clients[0], second.clients[1], first.clients[2]], {}), [1]
    )
    one, two = folder.checkpoints / "round-0001", folder.checkpoints / "round-0002"
    same = [(one / f"kept-{m:04d}.safetensors").samefile(two / f"kept-{m:04d}.safetensors") for m in range(3)]
    assert same == [True, False, True]
    folder.save(
        Checkpoint(3, second.server, second.broadcast, [first.clients[0], second.clients[1], first.clients[2]], {}), []
    )
    found, _ = RunFolder.open(folder.path).load()  # the first checkpoint is gone, its linked files are not
    assert found is not None
    assert [float(c.params["a.weight"][0, 0]) for c in found.clients] == [1.0, 102.0, 201.0]


def test_links_go_on_after_a_checkpoint_was_loaded(folder: RunFolder) -> None:
    folder.save(checkpoint(1), range(3))
    again = RunFolder.open(folder.path)
    again.load()
    again.save(Checkpoint(2, state(2.0), state(2.5), checkpoint(1).clients, {}), [])
    paths = [folder.checkpoints / r / "kept-0001.safetensors" for r in ("round-0001", "round-0002")]
    assert paths[0].samefile(paths[1])


def test_a_file_system_without_links_copies(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no links here")

    folder.save(checkpoint(1), range(3))
    monkeypatch.setattr(os, "link", refuse)
    folder.save(Checkpoint(2, state(2.0), state(2.5), checkpoint(1).clients, {}), [])
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert (found.round, warnings) == (2, [])


def test_a_leftover_part_is_ignored_and_swept_away(folder: RunFolder) -> None:
    folder.save(checkpoint(1), range(3))
    part = folder.checkpoints / ".round-0002.part"
    part.mkdir()
    (part / "server.safetensors").write_bytes(b"half")
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert (found.round, warnings) == (1, [])
    folder.save(checkpoint(2), range(3))
    assert rounds_in(folder) == ["round-0001", "round-0002"]


@pytest.mark.parametrize("file", ["server.safetensors", "broadcast.safetensors", "kept-0001.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "one bit", "empty"])
def test_a_damaged_newest_checkpoint_falls_back_with_a_warning(folder: RunFolder, file: str, how: str) -> None:
    folder.save(checkpoint(1), range(3))
    folder.save(checkpoint(2), range(3))
    damage(folder.checkpoints / "round-0002" / file, how)
    found, warnings = RunFolder.open(folder.path).load()
    assert found is not None
    assert found.round == 1
    assert len(warnings) == 1
    assert "round-0002" in warnings[0]


def test_when_every_checkpoint_is_damaged_it_is_said(folder: RunFolder) -> None:
    for round in (1, 2):
        folder.save(checkpoint(round), range(3))
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
