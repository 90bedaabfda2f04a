"""The round loop: folded against one lane at a time, against plain loops, and its random draws."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors, build_backbone
from lanes import oracle
from small import after, everything, small
from torch import Tensor, nn

import perada.client.trainer
from perada.config import build
from perada.data.batches import ClientBatches, sample_stream
from perada.experiment import Experiment
from perada.lanes import Result, State, gather, sgd

METHODS = ["perada", "perada-no-kd", "standalone", "fedavg"]


def assert_close(a: Experiment, b: Experiment, tolerance: float = 1e-9) -> None:
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
def one_at_a_time() -> dict[str, Experiment]:
    """Two rounds of each, no two lanes ever in one training pass."""
    return {k: after(2, run__precision="fp64", run__lanes=1, **settings) for k, settings in WHOLE_ROUNDS.items()}


@pytest.mark.parametrize("what", WHOLE_ROUNDS)
@pytest.mark.parametrize("lanes", [0, 4])
def test_folded_rounds_equal_one_lane_at_a_time(what: str, lanes: int, one_at_a_time: dict[str, Experiment]) -> None:
    """Dropout, ragged clients, distillation and the guard included."""
    folded, single = after(2, run__precision="fp64", run__lanes=lanes, **WHOLE_ROUNDS[what]), one_at_a_time[what]
    assert_close(folded, single)
    assert folded.now.counters == single.now.counters
    assert math.isclose(folded.now.last["train_loss"], single.now.last["train_loss"], rel_tol=1e-9)
    found, wanted = (sim.now.last["distill"] or {} for sim in (folded, single))
    assert found.get("guard_losses", []) == pytest.approx(wanted.get("guard_losses", []), rel=1e-9)


def test_the_rounds_that_were_compared_did_distil(one_at_a_time: dict[str, Experiment]) -> None:
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
    sim = build(small(method__name=method, train__batch=4, train__epochs=2, distill__steps=0, **set))
    found: list[Tensor] = []

    def listen(*args: Any, **kwargs: Any) -> Result:
        result = sgd(*args, **kwargs)
        found.append(result.trace)
        return result

    with mock.patch.object(perada.client.trainer, "sgd", listen):
        sim.method.client_update(sim.trainer([0, 3]), sim.now.broadcast, gather(sim.now.kept, [0, 3]))
    longest = max(len(t) for t in found)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, longest - len(t)), value=torch.nan) for t in found]
    return torch.cat(padded, 1)


# Against loops of ordinary torch, one client after another.


def plain_network(sim: Experiment, adapters: bool) -> nn.Module:
    net, _ = build_backbone("resnet8", 10, "embedded", sim.config.run.seed)
    return (oracle.with_adapters(net) if adapters else net).double()


def lane(state: State, k: int = 0) -> dict[str, Tensor]:
    return {n: t[k] for n, t in {**state.params, **state.buffers}.items()}


def batches_of(sim: Experiment, round: int, client: int) -> list[tuple[Tensor, Tensor, Tensor]]:
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
    sim = build(small(method__name="perada-no-kd", **settings))
    plain = plain_network(sim, adapters=True)
    names = [n for n in sim.now.broadcast.params if n not in sim.model.inert]
    w, v = lane(sim.now.broadcast), [lane(sim.now.kept, m) for m in range(4)]
    for round in range(2):
        theta = []
        for m in sim.sampled(round):
            data = batches_of(sim, round, m)
            v[m], _ = oracle.train(plain, v[m], names, data, oracle.Sgd(0.02, lam=0.7), centre=w)
            theta.append(oracle.train(plain, w, names, data, oracle.Sgd(0.02))[0])
        v = [{n: one[n] for n in w} for one in v]
        w = averaged([{n: one[n] for n in w} for one in theta])
        sim.round()
    assert_lane_is(sim.now.server, 0, w)
    assert_lane_is(sim.now.broadcast, 0, w)
    for m in range(4):
        assert_lane_is(sim.now.kept, m, v[m])


@pytest.mark.parametrize("extra", [{}, {"train__momentum": 0.9, "train__weight_decay": 0.01, "train__clip": 0.5}])
def test_fedavg_equals_a_plain_loop(extra: dict[str, float]) -> None:
    sim = build(small(method__name="fedavg", run__precision="fp64", **extra))
    plain = plain_network(sim, adapters=False)
    how = oracle.Sgd(
        0.02, extra.get("train__momentum", 0), extra.get("train__weight_decay", 0), extra.get("train__clip")
    )
    w = lane(sim.now.broadcast)
    for round in range(2):
        theta = [
            oracle.train(plain, w, sim.now.broadcast.params, batches_of(sim, round, m), how)[0]
            for m in sim.sampled(round)
        ]
        w = averaged([{n: one[n] for n in w} for one in theta])
        sim.round()
    assert_lane_is(sim.now.broadcast, 0, w)
    assert sim.now.kept.lanes == 0


def test_fedavg_weighted_by_samples_is_the_weighted_mean() -> None:
    sim = build(small(method__name="fedavg", run__precision="fp64", train__weighting="samples"))
    plain = plain_network(sim, adapters=False)
    w, cohort = lane(sim.now.broadcast), sim.sampled(0)
    theta = [
        oracle.train(plain, w, sim.now.broadcast.params, batches_of(sim, 0, m), oracle.Sgd(0.02))[0] for m in cohort
    ]
    sizes = [len(sim.federation.clients[m].train) for m in cohort]
    assert sizes[0] != sizes[1]
    wanted = {n: sum(s * t[n] for s, t in zip(sizes, theta, strict=True)) / sum(sizes) for n in w}
    sim.round()
    assert_lane_is(sim.now.broadcast, 0, wanted)


def test_standalone_equals_a_plain_loop_and_sends_nothing() -> None:
    sim = build(small(method__name="standalone", run__precision="fp64"))
    plain = plain_network(sim, adapters=False)
    v = [lane(sim.now.kept, m) for m in range(4)]
    for round in range(2):
        for m in sim.sampled(round):  # it trains whenever it would have been sampled
            found, _ = oracle.train(plain, v[m], sim.now.kept.params, batches_of(sim, round, m), oracle.Sgd(0.02))
            v[m] = {n: found[n] for n in v[m]}
        sim.round()
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
    sims = [build(small(data__clients=10, train__cohort=4, method__name=m)) for m in ("perada-no-kd", "fedavg")]
    cohorts = [sims[0].sampled(r) for r in range(50)]
    assert cohorts == [sims[1].sampled(r) for r in range(50)]
    assert all(c == sorted(set(c)) and len(c) == 4 and c[0] >= 0 and c[-1] < 10 for c in cohorts)
    assert len({tuple(c) for c in cohorts}) > 30
    assert {m for c in cohorts for m in c} == set(range(10))
    other = build(small(data__clients=10, train__cohort=4, method__name="fedavg", run__seed=1))
    assert cohorts != [other.sampled(r) for r in range(50)]


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

    monkeypatch.setattr(perada.client.trainer, "ClientBatches", Recording)
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
