"""The round loop: folded against one lane at a time, against plain loops, and its random draws."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from lanes import oracle
from small import everything, small
from torch import Tensor, nn

import perada.trainer
from perada import rounds, simulate
from perada.data.batches import ClientBatches, sample_stream
from perada.errors import InputError, RunError
from perada.lanes import Result, State, bytes_per_lane, gather, memory, sgd
from perada.models import build_backbone
from perada.rounds import Saver
from perada.runs import RunFolder
from perada.simulate import Simulation, lanes_at_once, precision_of, prepare
from perada.trainer import Trainer

METHODS = ["perada", "perada-no-kd", "standalone", "fedavg"]


def after(rounds: int, **set: Any) -> Simulation:
    sim = prepare(small(**set))
    for _ in range(rounds):
        sim.step()
    return sim


def assert_close(a: Simulation, b: Simulation, tolerance: float = 1e-9) -> None:
    """Server, broadcast and kept, tensor by tensor."""
    found, wanted = everything(a), everything(b)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if wanted[name].numel() and float(wanted[name].abs().max()) > 0:  # inert biases are exactly zero
            assert_close_norm(found[name], wanted[name], tolerance, name)


# Three clients are six lanes of PerAda: groups of four cut across the personal and the local lanes.
WHOLE_ROUNDS: dict[str, dict[str, Any]] = {
    "perada": {"method__name": "perada", "distill__guard": "none", "train__cohort": 3},
    "perada, guarded": {"method__name": "perada", "distill__guard": "clients"},
    "perada-no-kd": {"method__name": "perada-no-kd", "train__cohort": 3},
    "standalone": {"method__name": "standalone", "train__cohort": 3},
    "fedavg": {"method__name": "fedavg", "train__cohort": 3},
}


@pytest.fixture(scope="module")
def one_at_a_time() -> dict[str, Simulation]:
    """Two rounds of each, no two lanes ever in one training pass."""
    return {k: after(2, run__precision="fp64", run__lanes=1, **settings) for k, settings in WHOLE_ROUNDS.items()}


@pytest.mark.parametrize("what", WHOLE_ROUNDS)
@pytest.mark.parametrize("lanes", [0, 4])
def test_folded_rounds_equal_one_lane_at_a_time(what: str, lanes: int, one_at_a_time: dict[str, Simulation]) -> None:
    """Dropout, ragged clients, distillation and the guard included."""
    folded, single = after(2, run__precision="fp64", run__lanes=lanes, **WHOLE_ROUNDS[what]), one_at_a_time[what]
    assert_close(folded, single)
    assert folded.now.counters == single.now.counters
    assert math.isclose(folded.now.last["train_loss"], single.now.last["train_loss"], rel_tol=1e-9)
    found, wanted = (sim.now.last["distill"] or {} for sim in (folded, single))
    assert found.get("guard_losses", []) == pytest.approx(wanted.get("guard_losses", []), rel=1e-9)


def test_the_rounds_that_were_compared_did_distil(one_at_a_time: dict[str, Simulation]) -> None:
    """Had nothing been distilled or judged, the comparison would be one of plain averages."""
    guarded = one_at_a_time["perada, guarded"].now
    assert guarded.counters["distilled"] == 2
    assert guarded.counters["accepted"] == 1, "one round with the student, one with the plain average"
    assert len(set(guarded.last["distill"]["guard_losses"])) == 3
    with_, without = (one_at_a_time[k].now.broadcast.params["fc.weight"] for k in ("perada", "perada-no-kd"))
    assert float((with_ - without).norm()) > 1e-3


@pytest.mark.parametrize("method", ["perada", "standalone"])
def test_float32_losses_of_twenty_steps_agree_for_any_grouping(method: str) -> None:
    """Rounding differs by grouping; over twenty steps no loss of any lane may show it.

    Later a ReLU may flip on it and the runs part, in float32 alone: in float64 they agree to the last step.
    """
    traces: dict[tuple[str, int], Tensor] = {}
    for precision in ("fp32", "fp64"):
        for lanes in (0, 1, 3):
            traces[precision, lanes] = training_losses(method, run__lanes=lanes, run__precision=precision)
    assert min(int((~t.isnan()).sum(0).min()) for t in traces.values()) >= 20
    for lanes in (1, 3):
        found, wanted = traces["fp32", lanes][:20], traces["fp32", 0][:20]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
        found, wanted = traces["fp64", lanes], traces["fp64", 0]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0, equal_nan=True)


def training_losses(method: str, **set: Any) -> Tensor:
    """The loss of every lane at every step of one round of two clients, `[steps, lanes]`."""
    sim = prepare(small(method__name=method, train__batch=4, train__epochs=2, distill__steps=0, **set))
    found: list[Tensor] = []

    def listen(*args: Any, **kwargs: Any) -> Result:
        result = sgd(*args, **kwargs)
        found.append(result.trace)
        return result

    with mock.patch.object(perada.trainer, "sgd", listen):
        sim.method.client_update(sim.trainer([0, 3]), sim.now.broadcast, gather(sim.now.kept, [0, 3]))
    longest = max(len(t) for t in found)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, longest - len(t)), value=torch.nan) for t in found]
    return torch.cat(padded, 1)


# Against loops of ordinary torch, one client after another.


def plain_network(sim: Simulation, adapters: bool) -> nn.Module:
    net, _ = build_backbone("resnet8", 10, "embedded", sim.config.run.seed)
    return (oracle.with_adapters(net) if adapters else net).double()


def lane(state: State, k: int = 0) -> dict[str, Tensor]:
    return {n: t[k] for n, t in {**state.params, **state.buffers}.items()}


def batches_of(sim: Simulation, round: int, client: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Full batches from the client's permutations of this round, normalised by hand."""
    options, f = sim.config.train, sim.federation
    train = f.clients[client].train
    steps = options.epochs * max(1, math.ceil(len(train) / options.batch))
    order = sample_stream(train, steps * options.batch, sim.config.run.seed, round, sim.federation.clients[client].name)
    out = []
    for index in np.split(order, steps):
        grey = (f.images[index].double() / 255 - 0.3) / 0.35
        out.append((grey.repeat(1, 3, 1, 1), f.targets[index], torch.ones(len(index), dtype=torch.float64)))
    return out


def averaged(lanes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([one[n] for one in lanes]).mean(0) for n in lanes[0]}


def assert_lane_is(state: State, k: int, wanted: dict[str, Tensor]) -> None:
    for name, tensor in lane(state, k).items():
        if float(wanted[name].abs().max()) > 0:
            assert_close_norm(tensor, wanted[name], 1e-9, f"lane {k}: {name}")


def test_perada_without_distillation_equals_a_plain_loop() -> None:
    """Two rounds of Algorithm 1's client and server steps, one client and one adapter at a time."""
    settings = {"run__precision": "fp64", "model__dropout": 0.0, "method__lam": 0.7, "train__epochs": 2}
    sim = prepare(small(method__name="perada-no-kd", **settings))
    plain = plain_network(sim, adapters=True)
    names = [n for n in sim.now.broadcast.params if n not in sim.model.inert]
    w, v = lane(sim.now.broadcast), [lane(sim.now.kept, m) for m in range(4)]
    for round in range(2):
        theta = []
        for m in sim.cohort(round):
            data = batches_of(sim, round, m)
            v[m], _ = oracle.train(plain, v[m], names, data, oracle.Sgd(0.02, lam=0.7), centre=w)
            theta.append(oracle.train(plain, w, names, data, oracle.Sgd(0.02))[0])
        v = [{n: one[n] for n in w} for one in v]
        w = averaged([{n: one[n] for n in w} for one in theta])
        sim.step()
    assert_lane_is(sim.now.server, 0, w)
    assert_lane_is(sim.now.broadcast, 0, w)
    for m in range(4):
        assert_lane_is(sim.now.kept, m, v[m])


@pytest.mark.parametrize("extra", [{}, {"train__momentum": 0.9, "train__weight_decay": 0.01, "train__clip": 0.5}])
def test_fedavg_equals_a_plain_loop(extra: dict[str, float]) -> None:
    sim = prepare(small(method__name="fedavg", run__precision="fp64", **extra))
    plain = plain_network(sim, adapters=False)
    how = oracle.Sgd(
        0.02, extra.get("train__momentum", 0), extra.get("train__weight_decay", 0), extra.get("train__clip")
    )
    w = lane(sim.now.broadcast)
    for round in range(2):
        theta = [
            oracle.train(plain, w, sim.now.broadcast.params, batches_of(sim, round, m), how)[0]
            for m in sim.cohort(round)
        ]
        w = averaged([{n: one[n] for n in w} for one in theta])
        sim.step()
    assert_lane_is(sim.now.broadcast, 0, w)
    assert sim.now.kept.lanes == 0


def test_fedavg_weighted_by_samples_is_the_weighted_mean() -> None:
    sim = prepare(small(method__name="fedavg", run__precision="fp64", train__weighting="samples"))
    plain = plain_network(sim, adapters=False)
    w, cohort = lane(sim.now.broadcast), sim.cohort(0)
    theta = [
        oracle.train(plain, w, sim.now.broadcast.params, batches_of(sim, 0, m), oracle.Sgd(0.02))[0] for m in cohort
    ]
    sizes = [len(sim.federation.clients[m].train) for m in cohort]
    assert sizes[0] != sizes[1]
    wanted = {n: sum(s * t[n] for s, t in zip(sizes, theta, strict=True)) / sum(sizes) for n in w}
    sim.step()
    assert_lane_is(sim.now.broadcast, 0, wanted)


def test_standalone_equals_a_plain_loop_and_sends_nothing() -> None:
    sim = prepare(small(method__name="standalone", run__precision="fp64"))
    plain = plain_network(sim, adapters=False)
    v = [lane(sim.now.kept, m) for m in range(4)]
    for round in range(2):
        for m in sim.cohort(round):  # it trains whenever it would have been sampled
            found, _ = oracle.train(plain, v[m], sim.now.kept.params, batches_of(sim, round, m), oracle.Sgd(0.02))
            v[m] = {n: found[n] for n in v[m]}
        sim.step()
    for m in range(4):
        assert_lane_is(sim.now.kept, m, v[m])
    assert sim.now.broadcast.lanes == sim.now.server.lanes == 0
    assert sim.now.counters["bytes_up"] == sim.now.counters["bytes_down"] == 0


# Random draws.


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_with_one_seed_are_bit_identical(method: str) -> None:
    assert_same_tensors(everything(after(2, method__name=method)), everything(after(2, method__name=method)))


def test_another_seed_gives_another_run_on_the_same_split() -> None:
    a, b = after(1, run__seed=0, train__cohort=4), after(1, run__seed=1, train__cohort=4)
    assert not torch.equal(a.now.broadcast.params["fc.weight"], b.now.broadcast.params["fc.weight"])
    for x, y in zip(a.federation.clients, b.federation.clients, strict=True):
        assert np.array_equal(x.train, y.train)


def test_a_cohort_is_a_pure_function_of_seed_and_round() -> None:
    sims = [prepare(small(data__clients=10, train__cohort=4, method__name=m)) for m in ("perada-no-kd", "fedavg")]
    cohorts = [sims[0].cohort(r) for r in range(50)]
    assert cohorts == [sims[1].cohort(r) for r in range(50)]
    assert all(c == sorted(set(c)) and len(c) == 4 and c[0] >= 0 and c[-1] < 10 for c in cohorts)
    assert len({tuple(c) for c in cohorts}) > 30
    assert {m for c in cohorts for m in c} == set(range(10))
    other = prepare(small(data__clients=10, train__cohort=4, method__name="fedavg", run__seed=1))
    assert cohorts != [other.cohort(r) for r in range(50)]


Recorded = dict[tuple[int, int], list[Tensor]]  # (round, client) -> the [steps, B] indices of each of its lanes


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Every batch that is asked for while a test runs."""
    seen: Recorded = defaultdict(list)

    class Recording(ClientBatches):
        def __init__(
            self, federation: Any, lane_clients: Any, steps: Any, batch: int, seed: int, round: int, dtype: Any
        ):
            super().__init__(federation, lane_clients, steps, batch, seed, round, dtype)
            for k, client in enumerate(lane_clients):
                seen[round, client].append(self.index[self.row[k], : steps[k]])

    monkeypatch.setattr(perada.trainer, "ClientBatches", Recording)
    return seen


def test_batches_depend_on_seed_round_and_client_alone(recorded: Recorded) -> None:
    """Not on the method, on who else is in the cohort, or on how lanes are grouped; and v and θ share them."""
    runs = [
        {"method__name": "perada-no-kd"},
        {"method__name": "perada-no-kd", "run__lanes": 1},
        {"method__name": "fedavg"},
        {"method__name": "standalone", "train__cohort": 4},
    ]
    for settings in runs:
        after(2, **settings)
    assert len(recorded) == 8  # standalone's cohort is everybody: 4 clients, 2 rounds
    for (round, client), lanes in recorded.items():
        assert all(torch.equal(index, lanes[0]) for index in lanes), f"round {round}, client {client}"
    counts = {key: len(lanes) for key, lanes in recorded.items()}
    # A sampled client has 2 PerAda lanes twice over, FedAvg's and Standalone's; any other Standalone's alone.
    assert sorted(counts.values()) == [1] * 4 + [6] * 4
    assert not torch.equal(recorded[0, 0][0], recorded[1, 0][0])


def test_more_personal_epochs_see_the_same_batches_first(recorded: Recorded) -> None:
    after(1, method__name="perada-no-kd", method__personal_epochs=3)
    for v, theta in recorded.values():
        assert len(v) == 3 * len(theta)
        assert torch.equal(v[: len(theta)], theta)


def test_the_same_draws_for_any_lane_grouping() -> None:
    """Dropout 0.9 makes another mask show at once: one round, float64, three groupings."""
    sims = [after(1, run__precision="fp64", model__dropout=0.9, run__lanes=lanes) for lanes in (0, 1, 3)]
    assert_close(sims[0], sims[1])
    assert_close(sims[2], sims[1])
    other = after(1, run__precision="fp64", model__dropout=0.0, run__lanes=1)
    error = (other.now.server.params["fc.weight"] - sims[1].now.server.params["fc.weight"]).norm()
    assert float(error) > 1e-6


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


# Trouble.


def test_a_client_that_turns_infinite_is_named_and_harms_nobody() -> None:
    """A rate of 1e30 sends every lane to infinity: the round ends, names them, and keeps finite adapters."""
    sim = after(1, method__name="perada-no-kd", train__lr=1e30)
    assert sim.now.last["failed"] == [f"client-{m:02d}" for m in sim.cohort(0)]
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
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in second.items() if k != "seconds"}
    assert_same_tensors(before, everything(sim))
    sim.step()
    assert_same_tensors(everything(sim), everything(after(2)))


def test_checkpoints_written_beside_the_training_are_written_in_order_and_failures_are_raised() -> None:
    written: list[int] = []
    saver = Saver(beside=True)
    for i in range(20):
        saver.take(lambda i=i: written.append(i))  # type: ignore[misc]
    saver.close()
    assert written == list(range(20))

    def full() -> None:
        raise RunError("cannot write: no space")

    saver = Saver(beside=True)
    saver.take(full)
    with pytest.raises(RunError, match="no space"):
        saver.take(lambda: None)
    saver.close()
    saver = Saver(beside=True)
    saver.take(full)
    with pytest.raises(RunError, match="no space"):
        saver.close()


@pytest.mark.parametrize(("beside", "saved"), [(True, [3, 6, 7]), (False, [1, 2, 3, 4, 5, 6, 7])])
def test_short_rounds_are_not_all_saved_where_that_stops_a_gpu(
    beside: bool, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of two seconds, at least five seconds from one checkpoint to the next; the last one always."""
    sim = prepare(small(method__name="perada-no-kd", train__rounds=7))
    monkeypatch.setattr(rounds, "PAUSE", 5.0)
    monkeypatch.setattr(rounds, "Saver", lambda **_: Saver(beside, now=lambda: 2.0 * sim.now.round))
    seen, real = [], sim.snapshot
    monkeypatch.setattr(sim, "snapshot", lambda folder: seen.append(sim.now.round) or real(folder))
    rounds.run(sim, RunFolder(tmp_path))
    assert seen == saved


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    """Written after the next round, it still holds the round it was taken in."""
    sim = prepare(small(method__name="perada-no-kd"))
    folder = RunFolder(tmp_path)
    sim.step()
    write, then = sim.snapshot(folder), {n: t.clone() for n, t in everything(sim).items()}
    sim.step()
    write()
    other = prepare(small(method__name="perada-no-kd"))
    saved, _ = folder.load()
    assert saved is not None
    other.restore(saved)
    assert other.now.round == 1
    assert_same_tensors(everything(other), then)


@pytest.mark.parametrize(("asked", "free", "wanted"), [(0, 1 << 40, 0), (3, 1 << 40, 3), (9, 1 << 40, 0), (0, 5, 4)])
def test_as_many_lanes_as_there_is_memory_for(
    asked: int, free: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free` in bytes, or in lanes."""
    sim = prepare(small(method__name="perada-no-kd", run__lanes=asked, train__cohort=4))
    each = bytes_per_lane(sim.model, (8, 8), 8)
    monkeypatch.setattr(simulate, "free_memory", lambda device: free if free > 100 else free * each)
    found, line = lanes_at_once(sim)
    assert found == wanted
    assert ("take turns" in line) == bool(wanted)
    assert "GiB" in line


def test_without_room_for_one_lane_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"one lane takes about .* lower train.batch"):
        prepare(small(method__name="ditto"))


def test_a_lane_costs_more_with_more_images_and_larger_ones() -> None:
    model = prepare(small(method__name="perada-no-kd")).model
    small_one, batch, size = (bytes_per_lane(model, (s, s), b) for s, b in ((8, 8), (8, 16), (16, 8)))
    own = 6 * model.initial().bytes_per_lane()
    assert small_one > own
    assert batch - own == pytest.approx(2 * (small_one - own), rel=0.01)
    assert size - own == pytest.approx(4 * (small_one - own), rel=0.1)


def test_a_lane_of_a_whole_model_costs_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a trained convolution keeps a column of its input for every pixel of its output."""
    model, adapters = (prepare(small(method__name=m)).model for m in ("ditto", "perada-no-kd"))
    before = [bytes_per_lane(m, (8, 8), 10) for m in (model, adapters)]
    monkeypatch.setattr(memory, "choose", lambda *shape: "columns")
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
    sim = prepare(small(method__name="perada", run__precision="fp64"))
    clients = list(sim.federation.clients)
    clients[1] = dataclasses.replace(clients[1], val=clients[1].val[:0])
    federation = dataclasses.replace(sim.federation, clients=tuple(clients))
    trainer = Trainer(sim.model, federation, [0, 1, 3], 0, 0, sim.config.train)
    candidates = sim.model.initial(2).map(lambda t: t * torch.tensor([1.0, 1.1]).to(t).view(2, *[1] * (t.dim() - 1)))
    alone = trainer.validation_losses(candidates)
    monkeypatch.setattr(perada.trainer, "TOGETHER", ("cpu",))
    together = trainer.validation_losses(candidates)
    assert alone[:, 1].isnan().all()
    assert_close_norm(together[:, [0, 2]], alone[:, [0, 2]], 1e-12)
    assert together[:, 1].isnan().all()
    assert float(alone[0, 0]) != float(alone[1, 0])
