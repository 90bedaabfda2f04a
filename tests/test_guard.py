"""The guard of distillation: which student is kept, and who judges it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from small import ONE, adam_by_hand, double, lanes_of, pixel_model, small, weights_of
from torch import Tensor

from perada.config import build
from perada.data.federation import Federation
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State, gather, stack
from perada.server.aggregate import ABSURD
from perada.server.distill import Distill
from perada.server.guard import Server

Judge = Callable[[State], Tensor]


def server(round: int = 0, **set: Any) -> Server:
    options = Distill(**{"steps": 4, "lr": 0.05, "candidates": (1, 2), "guard": "clients", **set})
    return Server(pixel_model(0.0, 0.0), [ONE], options, False, round, 0)


def guarded(server: Server, judge: Judge | None) -> tuple[State, dict[str, Any]]:
    """Proposes, scores and chooses, as a round does; returns the chosen state and the log."""
    state, proposed = server.distill(AVERAGE, TEACHERS), server.candidates
    assert proposed is not None
    best, log = proposed.choose(judge(proposed.states) if judge else None)
    return proposed.pick(state, best), log


TEACHERS = lanes_of([2.0, -1.0], [1.0, 1.0])
AVERAGE = lanes_of([0.1 + 0.2, -0.2])  # 0.30000000000000004: a copy through arithmetic would show


def losses(*rows: list[float]) -> Judge:
    def judge(candidates: State) -> Tensor:
        assert candidates.lanes == len(rows), "the average and every snapshot are judged"
        assert weights_of(candidates)[0] == weights_of(AVERAGE)[0], "the average comes first"
        return double(*rows)

    return judge


def test_a_guard_that_likes_the_average_best_keeps_it_bit_for_bit() -> None:
    found, log = guarded(server(), losses([0.1], [0.2], [0.3], [0.4]))
    assert_same_tensors(found.params, AVERAGE.params)
    assert log["guard_chose"] == 0
    assert log["guard_steps"] == [0, 1, 2, 4]
    assert log["guard_losses"] == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(("best", "steps"), [(1, 1), (2, 2), (3, 4)])
def test_a_guard_keeps_the_candidate_with_the_least_mean_loss(best: int, steps: int) -> None:
    rows = [[1.0, 1.0] for _ in range(4)]
    rows[best] = [1.4, 0.5]  # worse for one judge, better on average
    found, log = guarded(server(), losses(*rows))
    candidates = server().distill(AVERAGE, TEACHERS)
    assert_same_tensors(found.params, gather(candidates, [best]).params)
    assert log["guard_chose"] == steps


def test_a_tie_keeps_the_average() -> None:
    found, _ = guarded(server(), losses([0.5], [0.5], [0.5], [0.5]))
    assert_same_tensors(found.params, AVERAGE.params)


def test_judges_without_data_have_no_vote() -> None:
    nan = math.nan
    _, log = guarded(server(), losses([0.5, nan, 0.5], [0.6, nan, 0.3], [0.6, nan, 0.6], [0.9, nan, 0.9]))
    assert log["guard_chose"] == 1
    assert log["guard_losses"] == pytest.approx([0.5, 0.45, 0.6, 0.9])


@pytest.mark.parametrize("judges", [0, 2])
def test_no_judge_at_all_keeps_the_average(judges: int) -> None:
    found, log = guarded(server(), lambda c: torch.full((4, judges), math.nan, dtype=torch.float64))
    assert_same_tensors(found.params, AVERAGE.params)
    assert log["guard_losses"] == [None] * 4, "NaN has no place in a JSON file"


def test_a_candidate_that_is_not_finite_is_never_kept() -> None:
    """A student that diverged scores NaN at every judge: that must not silence the judges of the others."""
    nan = math.nan
    _, log = guarded(server(), losses([0.5, 0.5], [0.4, 0.4], [nan, nan], [nan, nan]))
    assert log["guard_chose"] == 1


def test_a_student_that_diverged_is_not_broadcast_even_without_a_guard() -> None:
    """One NaN in w would stop every client of every later round."""
    found, log = guarded(server(guard="none", lr=1e308, schedule="constant", steps=6), None)
    assert all(t.isfinite().all() for t in found.tensors())
    assert_same_tensors(found.params, AVERAGE.params)
    assert log["diverged"] is True


@pytest.mark.parametrize("guard", ["none", "clients"])
def test_a_round_whose_students_all_diverged_does_not_count_as_distilled(guard: str) -> None:
    sim = build(small(distill__guard=guard, distill__lr=1e38, distill__schedule="constant"))
    sim.round()
    assert sim.now.last["distill"]["diverged"] is True
    json.dumps(sim.now.last, allow_nan=False)
    assert (sim.now.counters["distilled"], sim.now.counters["accepted"]) == (0, 0)


def test_without_a_guard_the_last_student_is_kept() -> None:
    found, log = guarded(server(guard="none"), None)
    assert found.lanes == 1
    wanted = adam_by_hand(
        weights_of(AVERAGE)[0], [1.5, 0.0], [0.05 * (1 + math.cos(math.pi * r / 4)) / 2 for r in range(4)]
    )
    assert np.allclose(weights_of(found), wanted[-1:], rtol=0, atol=1e-12)
    assert "guard_chose" not in log


@pytest.mark.parametrize(("rounds", "round", "distils"), [(0, 99, True), (3, 2, True), (3, 3, False)])
def test_distillation_stops_after_its_rounds(rounds: int, round: int, distils: bool) -> None:
    s = server(round, rounds=rounds)
    assert (s.distill(AVERAGE, TEACHERS) is not AVERAGE) == distils
    assert (s.candidates is not None) == distils


def test_no_steps_is_no_distillation() -> None:
    s = server(steps=0)
    assert s.distill(AVERAGE, TEACHERS) is AVERAGE
    assert s.candidates is None


def test_a_temperature_whose_square_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"Distill.temperature must be at most 1000, not 1e\+308"):
        Distill(temperature=1e308)


# The guards of a real round.


@pytest.fixture(scope="module")
def sims() -> dict[str, Experiment]:
    return {g: build(small(distill__guard=g, run__precision="fp64")) for g in ("server", "clients")}


def candidate_states(sim: Experiment) -> State:
    one = sim.now.broadcast
    return stack(one, State({n: p * 1.01 for n, p in one.params.items()}, one.buffers))


def by_plain_module(sim: Experiment, candidates: State, index: np.ndarray) -> list[float]:
    """Mean cross-entropy of each candidate, one plain module after another."""
    f: Federation = sim.federation
    images = ((f.images[index].double() / 255 - 0.3) / 0.35).repeat(1, 3, 1, 1)
    out = []
    for k in range(candidates.lanes):
        net = sim.model.plain(candidates.map(lambda t, k=k: t[k : k + 1]))  # type: ignore[misc]
        out.append(float(torch.nn.functional.cross_entropy(net(images), f.targets[index])))
    return out


def test_clients_judge_with_their_own_validation_data(sims: dict[str, Experiment]) -> None:
    sim = sims["clients"]
    sim.gather()  # those who trained last are asked
    candidates = candidate_states(sim)
    found = sim.judge(candidates)
    assert found is not None
    assert found.shape == (2, 2)
    for j, m in enumerate(sim.sampled(0)):
        wanted = by_plain_module(sim, candidates, sim.federation.clients[m].val)
        assert_close_norm(found[:, j], torch.tensor(wanted, dtype=torch.float64), 1e-9)


def test_a_judge_has_a_number_for_every_candidate_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a site reports them: a candidate that overflows somewhere loses there, and silences nobody."""
    sim, nan = build(small(train__cohort=4)), math.nan
    raw = double([1.0, nan, math.inf, 0.5], [nan, nan, 0.7, 3e6], [math.inf, nan, nan, 0.4])
    monkeypatch.setattr(type(sim.method), "client_score", lambda self, trainer, candidates: raw)
    sim.gather()
    scores = sim.cohort.score(sim.now, candidate_states(sim))
    known = double([1.0, nan, ABSURD, 0.5], [ABSURD, nan, 0.7, ABSURD], [ABSURD, nan, ABSURD, 0.4])
    assert torch.equal(scores.nan_to_num(-1), known.nan_to_num(-1))


def test_the_server_judges_with_its_own_validation_data(sims: dict[str, Experiment]) -> None:
    sim = sims["server"]
    candidates = candidate_states(sim)
    found = sim.judge(candidates)
    assert found is not None
    assert found.shape == (2, 1)
    wanted = by_plain_module(sim, candidates, sim.federation.server_val)
    assert_close_norm(found[:, 0], torch.tensor(wanted, dtype=torch.float64), 1e-9)


def test_the_servers_validation_data_are_nobodys(sims: dict[str, Experiment]) -> None:
    f = sims["server"].federation
    held = set(f.server_val.tolist())
    assert held
    for c in f.clients:
        assert not held & set(np.concatenate([c.train, c.val, c.test]).tolist())


@pytest.mark.parametrize("guard", ["server", "clients", "none"])
def test_a_round_logs_what_its_guard_chose(guard: str) -> None:
    sim = build(small(distill__guard=guard))
    sim.round()
    log = sim.now.last["distill"]
    assert sim.now.counters["distilled"] == 1
    assert math.isfinite(log["kl_first"])
    if guard == "none":
        assert sim.now.counters["accepted"] == 0, "nobody was asked"
        assert log["diverged"] is False
        return
    assert log["guard_steps"] == [0, 2, 4]
    best = int(np.argmin(log["guard_losses"]))
    assert log["guard_chose"] == [0, 2, 4][best]
    assert sim.now.counters["accepted"] == int(best > 0)


def test_without_a_guard_no_client_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> Tensor:
        raise AssertionError("guard=none asks nobody")

    sim = build(small(distill__guard="none"))
    monkeypatch.setattr(type(sim.method), "client_score", never)
    monkeypatch.setattr("perada.experiment.logits_on", never)
    sim.round()
    assert sim.now.counters["distilled"] == 1


def test_a_refused_distillation_broadcasts_the_plain_average_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    without = build(small(method__name="perada-no-kd"))
    without.round()
    sim = build(small())
    monkeypatch.setattr(
        type(sim.method),
        "client_score",
        lambda self, trainer, c: torch.arange(c.lanes, dtype=torch.float64).unsqueeze(1),
    )
    sim.round()
    assert sim.now.last["distill"]["guard_chose"] == 0
    assert_same_tensors(sim.now.broadcast.params, without.now.broadcast.params)
    assert_same_tensors(sim.now.broadcast.buffers, without.now.broadcast.buffers)
