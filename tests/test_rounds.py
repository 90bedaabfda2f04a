"""A round beside its arithmetic: what it counts, survives and saves, and how much of the machine it takes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from small import after, everything, small
from torch.utils._python_dispatch import TorchDispatchMode

import perada.client.trainer
from perada.client.trainer import Trainer
from perada.config import build
from perada.data.public import Chunks
from perada.errors import InputError, RunError
from perada.lanes import bytes_per_lane, machine, replay
from perada.lanes.machine import precision_of
from perada.runs import train as rounds
from perada.runs.folder import RunFolder
from perada.runs.train import Saver

# Counting.


def test_bytes_are_those_of_the_shared_group() -> None:
    sim = after(2, method__name="perada-no-kd")
    group = sim.model.group("adapter")
    numbers = sum(sim.now.broadcast.params[n].numel() for n in group.params)
    numbers += sum(sim.now.broadcast.buffers[n].numel() for n in group.buffers)
    assert sim.now.counters["bytes_up"] == sim.now.counters["bytes_down"] == 2 * 2 * numbers * 4


def test_a_guard_at_the_clients_costs_the_candidates_on_the_way_down() -> None:
    """The average and the snapshots after 2 and 4 steps travel to be judged."""
    guarded, blind = after(1, distill__guard="clients"), after(1, distill__guard="none")
    one = guarded.now.broadcast.bytes_per_lane()
    assert blind.now.counters["bytes_down"] == 2 * one
    assert guarded.now.counters["bytes_down"] == 2 * one * (1 + 3)
    assert guarded.now.counters["bytes_up"] == blind.now.counters["bytes_up"] == 2 * one


def test_a_guard_at_the_server_costs_nothing_on_the_wire() -> None:
    sim = after(1, distill__guard="server")
    assert sim.now.counters["bytes_down"] == 2 * sim.now.broadcast.bytes_per_lane()


# Which images.


def test_in_domain_images_are_everybodys_validation_images() -> None:
    sim = after(1, distill__data="validation", distill__batch=16, distill__size=0)
    numbers = np.concatenate([c.val for c in sim.federation.clients])
    assert isinstance(sim.public, Chunks)
    assert torch.equal(sim.public.images, sim.federation.images[torch.from_numpy(numbers)])
    seen = sim.public.chunks.flatten().tolist()
    assert len(set(seen)) == len(seen) == len(numbers) // 16 * 16 > 0
    assert sim.now.counters["distilled"] == 1


# Trouble.


def test_a_client_that_turns_infinite_is_named_and_harms_nobody() -> None:
    """A rate of 1e30 sends every lane to infinity: the round ends, names them, and keeps finite adapters."""
    sim = after(1, method__name="perada-no-kd", train__lr=1e30)
    assert sim.now.last["failed"] == [f"client-{m:02d}" for m in sim.sampled(0)]
    assert [n for n, t in everything(sim).items() if not t.isfinite().all()] == []


def test_distillation_in_the_first_rounds_only() -> None:
    sim = after(2, distill__rounds=1)
    assert sim.now.counters["distilled"] == 1
    assert sim.now.last["distill"] is None


def test_no_distillation_steps_is_perada_without_distillation_bit_for_bit() -> None:
    without = after(2, method__name="perada-no-kd")
    assert_same_tensors(everything(after(2, distill__steps=0)), everything(without))
    assert_same_tensors(everything(after(2, distill__steps=0, distill__data="none")), everything(without))


def test_evaluation_changes_nothing() -> None:
    sim = after(1)
    before = {n: t.clone() for n, t in everything(sim).items()}
    first = sim.evaluate()
    second = sim.evaluate()
    assert first is not None
    assert second is not None
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)
    assert_same_tensors(before, everything(sim))
    sim.round()
    assert_same_tensors(everything(sim), everything(after(2)))


# Saving.


def test_checkpoints_written_beside_the_training_are_written_in_order_and_failures_are_raised() -> None:
    written: list[int] = []
    saver = Saver(background=True)
    for i in range(20):
        saver.take(lambda i=i: written.append(i))  # type: ignore[misc]
    saver.close()
    assert written == list(range(20))

    def full() -> None:
        raise RunError("cannot write: no space")

    saver = Saver(background=True)
    saver.take(full)
    with pytest.raises(RunError, match="no space"):
        saver.take(lambda: None)
    saver.close()
    saver = Saver(background=True)
    saver.take(full)
    with pytest.raises(RunError, match="no space"):
        saver.close()


def test_no_checkpoint_is_due_while_one_is_written() -> None:
    """To take it would be to wait, and on a GPU all that are trained together would."""
    time, go = [0.0], threading.Event()
    saver = Saver(background=True, now=lambda: time[0])
    saver.take(lambda: [go.wait(60)].clear())
    time[0] = 1e6
    assert not saver.due()
    go.set()
    saver.close()
    assert saver.due()


class Patient(Saver):
    """Whether a write is done when the next checkpoint is due is not left to chance."""

    def take(self, write: Callable[[], None]) -> None:
        super().take(write)
        if self._last is not None:
            wait([self._last])


@pytest.mark.parametrize(("background", "saved"), [(True, [3, 6, 7]), (False, [1, 2, 3, 4, 5, 6, 7])])
def test_short_rounds_are_not_all_saved_where_that_stops_a_gpu(
    background: bool, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of two seconds, at least five seconds from one checkpoint to the next; the last one always."""
    sim = build(small(method__name="perada-no-kd", train__rounds=7))
    monkeypatch.setattr(rounds, "PAUSE", 5.0)
    monkeypatch.setattr(rounds, "Saver", lambda **_: Patient(background, now=lambda: 2.0 * sim.now.round))
    seen, real = [], sim.snapshot
    monkeypatch.setattr(sim, "snapshot", lambda folder: seen.append(sim.now.round) or real(folder))
    rounds.train_in(sim, RunFolder(tmp_path))
    assert seen == saved


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    """Written after the next round, it still holds the round it was taken in."""
    sim = build(small(method__name="perada-no-kd"))
    folder = RunFolder(tmp_path)
    sim.round()
    write, then = sim.snapshot(folder), {n: t.clone() for n, t in everything(sim).items()}
    sim.round()
    write()
    other = build(small(method__name="perada-no-kd"))
    saved, _ = folder.load()
    assert saved is not None
    other.restore(saved)
    assert other.now.round == 1
    assert_same_tensors(everything(other), then)


# The machine.


@pytest.mark.parametrize(("asked", "free", "wanted"), [(0, 1 << 40, 0), (3, 1 << 40, 3), (9, 1 << 40, 0), (0, 5, 4)])
def test_as_many_lanes_as_there_is_memory_for(
    asked: int, free: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free` in bytes, or in lanes."""
    sim = build(small(method__name="perada-no-kd", run__lanes=asked, train__cohort=4))
    each = bytes_per_lane(sim.model, (8, 8), 8)
    monkeypatch.setattr("perada.client.cohort.free_memory", lambda device: free if free > 100 else free * each)
    line = sim.cohort.fit_lanes(sim.options)
    assert sim.lanes == wanted
    assert ("take turns" in line) == bool(wanted)
    assert "GiB" in line


def test_without_room_for_one_lane_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perada.client.cohort.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"one lane takes about .* lower Train\.batch"):
        build(small(method__name="ditto"))


def test_a_lane_costs_more_with_more_images_and_larger_ones() -> None:
    model = build(small(method__name="perada-no-kd")).model
    small_one, batch, size = (bytes_per_lane(model, (s, s), b) for s, b in ((8, 8), (8, 16), (16, 8)))
    own = 6 * model.initial().bytes_per_lane()
    assert small_one > own
    assert batch - own == pytest.approx(2 * (small_one - own), rel=0.01)
    assert size - own == pytest.approx(4 * (small_one - own), rel=0.1)


def test_a_lane_of_a_whole_model_costs_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a trained convolution keeps a column of its input for every pixel of its output."""
    model, adapters = (build(small(method__name=m)).model for m in ("ditto", "perada-no-kd"))
    before = [bytes_per_lane(m, (8, 8), 10) for m in (model, adapters)]
    monkeypatch.setattr(machine, "choose", lambda *shape: "columns")
    columns = 9 * (64 * (3 + 16 + 16) + 16 * (16 + 32) + 4 * (32 + 64))  # resnet8: 3×3 taps on maps of 8×8, 4×4, 2×2
    found = [bytes_per_lane(m, (8, 8), 10) for m in (model, adapters)]
    assert found[0] - before[0] == pytest.approx(1.3 * 10 * 4 * columns, abs=2)
    assert found[1] == before[1]


@pytest.mark.parametrize(
    ("asked", "device", "capability", "wanted"),
    [
        ("auto", "cpu", None, "fp32"),
        ("auto", "cuda", (9, 0), "bf16"),
        ("auto", "cuda", (7, 5), "fp32"),
        ("fp32", "cuda", (9, 0), "fp32"),
    ],
)
def test_the_precision_is_the_machine_s(
    asked: str, device: str, capability: tuple[int, int] | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was asked for: a run that moves from a GPU to a machine without one goes on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision_of(asked, torch.device(device)) == wanted


def test_clients_validate_together_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; one of them has nothing to validate with."""
    sim = build(small(method__name="perada", run__precision="fp64"))
    clients = list(sim.federation.clients)
    clients[1] = dataclasses.replace(clients[1], val=clients[1].val[:0])
    federation = dataclasses.replace(sim.federation, clients=tuple(clients))
    trainer = Trainer(sim.model, federation, [0, 1, 3], 0, 0, sim.train)
    candidates = sim.model.initial(2).map(lambda t: t * torch.tensor([1.0, 1.1]).to(t).view(2, *[1] * (t.dim() - 1)))
    alone = trainer.validation_losses(candidates)
    monkeypatch.setattr(perada.client.trainer, "TOGETHER", ("cpu",))
    together = trainer.validation_losses(candidates)
    assert alone[:, 1].isnan().all()
    assert_close_norm(together[:, [0, 2]], alone[:, [0, 2]], 1e-12)
    assert together[:, 1].isnan().all()
    assert float(alone[0, 0]) != float(alone[1, 0])


class Reads(TorchDispatchMode):
    """Writes down what needs a number of a tensor: there a GPU would be waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.log.append("read")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("stats", ["average", "student"])
def test_one_thing_is_read_before_the_guard_has_all_its_work(stats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose training stayed finite; then a GPU distils and scores without a pause while all of that is asked for."""
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(perada.client.trainer, "TOGETHER", ("cpu",))
    sim = build(small(method__name="perada", distill__guard="clients", distill__keep_stats=stats))
    log: list[str] = []
    sim.round()  # what is looked up once
    real = perada.client.trainer.logits_on

    def scored(*args: Any) -> torch.Tensor:
        log.append("scored")
        return real(*args)

    monkeypatch.setattr(perada.client.trainer, "logits_on", scored)
    for name in ("tolist", "cpu"):  # which a CPU does without an operation
        held = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, held=held: (log.append("read"), held(t))[1])
    with Reads(log):
        sim.round()
    assert log.count("scored") == 1
    assert log[: log.index("scored")].count("read") == 1
    assert "read" in log[log.index("scored") :]  # the losses, in the end
