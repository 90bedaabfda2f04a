"""The rules that make one state of many uploads, beside byzfl's; and the guard's judges under attack."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byzantine import byzfl
from helpers import assert_close_norm, assert_same_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from small import adapters, after, everything, plain, small
from torch import Tensor

import perada
from perada.client.trainer import Train
from perada.config import build
from perada.errors import InputError
from perada.lanes import State, gather, join, merge, mix, stack
from perada.methods import REGISTRY
from perada.server.aggregate import CLIP, HISTORY, Rule, clipped, positive

NORM, TRIM, MEDIAN = Rule("norm_clip"), Rule("trimmed_mean"), Rule("median")


def vectors(lanes: int, seed: int, size: int = 40) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((lanes, size)) ** 3)


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(1, 13), st.integers(0, 10**6))
def test_the_rules_are_byzfls(lanes: int, seed: int) -> None:
    x = vectors(lanes, seed)
    left_out = min(math.ceil(0.2 * lanes - 1e-9), (lanes - 1) // 2)
    wanted = byzfl.TrMean(f=left_out)(x.numpy()) if left_out else byzfl.Average()(x.numpy())
    assert_close_norm(TRIM.of_lanes(x)[0], torch.from_numpy(wanted))
    assert_close_norm(MEDIAN.of_lanes(x)[0], torch.from_numpy(byzfl.Median()(x.numpy())))
    distances = x.norm(dim=1)
    bound = float(distances.median())
    ours = clipped(State({"w": 2 + x}), State({"w": torch.full((1, 40), 2.0).double()}), {})
    near = [k for k in range(lanes) if k not in ours.left_out]
    assert_close_norm(ours.states.params["w"] - 2, torch.from_numpy(byzfl.Clipping(c=CLIP * bound)(x.numpy()[near])))
    assert ours.norms["params"] == pytest.approx([bound])


def test_a_rule_leaves_out_as_many_as_the_share_says() -> None:
    assert [TRIM.left_out(k) for k in (1, 2, 3, 5, 8, 10, 15)] == [0, 0, 1, 1, 2, 2, 3]
    assert [Rule("trimmed_mean", 0.0).left_out(k) for k in (1, 5)] == [0, 0]
    assert [MEDIAN.left_out(k) for k in (1, 2, 3, 4)] == [0, 0, 1, 1]


def state(lanes: int, seed: int) -> State:
    x = vectors(lanes, seed)
    return State({"w": x[:, :20], "c/w": x[:, 20:30]}, {"n.running_mean": x[:, 30:35], "n.running_var": x[:, 35:] ** 2})


def test_parts_are_clipped_separately_and_short_updates_are_left_alone() -> None:
    reference, uploads = state(1, 1), state(5, 2)
    uploads.params["c/w"][3] *= 1e6
    uploads.params["w"][2] = reference.params["w"][0] + 9.0
    done = clipped(uploads, reference, {})
    ours = done.states
    assert done.norms.keys() == {"params", "params/c", "buffers"}
    distances = (uploads.params["w"] - reference.params["w"]).norm(dim=1)
    short = distances <= CLIP * distances.median()
    assert torch.equal(ours.params["w"][short], uploads.params["w"][short]), "bit for bit"
    new = (ours.params["w"] - reference.params["w"]).norm(dim=1)
    assert torch.allclose(new[~short], CLIP * distances.median())
    assert 0 < short.sum() < len(short)
    assert (ours.params["c/w"] - reference.params["c/w"]).norm(dim=1).max() < 100


def test_the_bound_remembers_the_rounds_before() -> None:
    """Two of three send a large update: without a memory they would set the bound themselves."""
    reference = State({"w": torch.zeros(1, 4)})
    honest = State({"w": torch.ones(3, 4)})
    norms: dict[str, list[float]] = {}
    for _ in range(HISTORY + 5):
        norms = dict(clipped(honest, reference, norms).norms)
    assert norms == {"params": [2.0] * HISTORY}
    done = clipped(State({"w": torch.tensor([[1.0], [500.0], [500.0]]).expand(3, 4)}), reference, norms)
    assert done.states.params["w"].max() == CLIP
    assert done.norms["params"][-1] == 1000.0
    done = clipped(State({"w": torch.full((2, 4), 1e38)}), reference, norms)
    assert torch.allclose(done.states.params["w"], torch.full((2, 4), CLIP)), "no overflow on the way"


def test_an_upload_far_beyond_the_median_is_left_out_and_named() -> None:
    uploads = State({"w": torch.tensor([[1.0], [0.1], [1.2], [-5.0], [2.9]]).expand(5, 4)})
    done = clipped(uploads, State({"w": torch.zeros(1, 4)}), {})
    assert done.left_out == {3: "its update is 4.17 times as long as the median"}
    assert done.states.params["w"][:, 0].tolist() == pytest.approx([1.0, 0.1, 1.2, CLIP * 1.2])
    two = State({"w": torch.tensor([[0.1], [1.0]]).expand(2, 4)})
    assert not clipped(two, State({"w": torch.zeros(1, 4)}), {}).left_out
    sim = hostile(build(small(method__name="fedavg", train__cohort=4, train__aggregate="norm_clip")), far)
    sim.round()
    assert list(sim.now.last["refused"]) == ["client-01"]
    assert sim.evaluate().refused.keys() == {"client-01"}  # type: ignore[union-attr]


def test_a_variance_stays_positive_with_every_rule() -> None:
    reference, uploads = state(1, 3), state(5, 4)
    uploads.buffers["n.running_var"][:4] *= -30
    for rule in (NORM, TRIM, MEDIAN):
        admitted = rule.admit(uploads, reference, {})
        assert (rule.mean(admitted.states).buffers["n.running_var"] > 0).all()
    healthy = state(5, 5)
    assert_same_tensors(positive(healthy, reference).buffers, healthy.buffers)


def test_samples_count_at_most_twice_the_median_where_uploads_are_clipped() -> None:
    assert NORM.weights([10.0, 20.0, 1e6]) == [10.0, 20.0, 40.0]
    assert Rule().weights([10.0, 20.0, 1e6]) == [10.0, 20.0, 1e6]
    assert NORM.weights(None) is None
    for kind in ("trimmed_mean", "median"):
        with pytest.raises(InputError, match=rf"Train.aggregate={kind} takes all clients alike"):
            Train(aggregate=kind, weighting="samples")
    with pytest.raises(InputError, match=r"Train.trim must be below 0\.5"):
        Train(trim=0.5)


# In a round

KINDS = ("norm_clip", "trimmed_mean", "median")
AVERAGING = [name for name in REGISTRY if name != "standalone"]


def hostile(sim: Any, change: Callable[[State, State], State], who: int = 1) -> Any:
    """Lets a client send something else: `change(its upload, the others')`."""
    real = type(sim.method).client_update

    def update(trainer: Any, received: State, kept: State) -> tuple[State, State]:
        upload, kept = real(sim.method, trainer, received, kept)
        one, others = gather(upload, [who]), gather(upload, [k for k in range(upload.lanes) if k != who])
        lanes = [gather(upload, [k]) for k in range(upload.lanes)]
        lanes[who] = change(one, others)
        return stack(*lanes), kept

    object.__setattr__(sim.method, "client_update", update)
    return sim


def far(upload: State, others: State) -> State:
    return upload.map(lambda t: t * 1e6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", AVERAGING)
def test_every_averaging_method_bears_a_far_upload(method: str, kind: str) -> None:
    """One of four clients sends a million times its upload. The mean would be 250,000 times too long."""
    sim = build(small(method__name=method, train__cohort=4, train__aggregate=kind, distill__steps=0))
    before = sim.now.broadcast
    hostile(sim, far).round()
    for name, tensor in sim.now.broadcast.params.items():
        assert tensor.norm() < 10 * before.params[name].norm() + 10, name
    assert all((t > 0).all() for n, t in sim.now.broadcast.buffers.items() if n.endswith("running_var"))


@pytest.mark.parametrize("kind", KINDS)
def test_teachers_are_as_robust_as_the_mean(kind: str) -> None:
    clean = build(small(train__cohort=4, train__aggregate=kind, distill__guard="none"))
    sim = build(small(train__cohort=4, train__aggregate=kind, distill__guard="none"))
    clean.round()
    hostile(sim, far).round()
    assert sim.now.last["distill"]["kl_first"] < 10 * clean.now.last["distill"]["kl_first"] + 1
    usual = hostile(build(small(train__cohort=4, distill__guard="none")), far)
    usual.round()
    assert not usual.now.last["distill"]["kl_first"] < 100, "the same upload ruins the mean's teachers"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "attack", [byzfl.SignFlipping(), byzfl.ALittleIsEnough(1.5), byzfl.InnerProductManipulation(5.0)]
)
def test_an_attack_of_byzfl_moves_the_average_no_further_than_the_clients_disagree(kind: str, attack: Any) -> None:
    """Two of ten clients follow the attack on the others' updates."""
    x, reference = 1 + 0.3 * vectors(8, 0), torch.zeros(1, 40, dtype=torch.float64)
    all_ten = State({"w": torch.cat([x, attack(x).expand(2, -1)])})
    admitted = Rule(kind).admit(all_ten, State({"w": reference}), {})
    moved = (Rule(kind).mean(admitted.states).params["w"] - x.mean(0)).norm()
    assert moved <= (x - x.mean(0)).norm(dim=1).mean()


def test_with_the_mean_nothing_changes() -> None:
    """Also where the setting says so explicitly; and clipping is something else."""
    usual, same, other = (after(2, **a) for a in ({}, {"train__aggregate": "mean"}, {"train__aggregate": "norm_clip"}))
    assert_same_tensors(everything(usual), everything(same))
    assert usual.now.memory == {}
    assert len(other.now.memory["norms"]["params"]) == 2
    assert not torch.equal(
        next(iter(usual.now.broadcast.params.values())), next(iter(other.now.broadcast.params.values()))
    )


def test_a_resumed_run_clips_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    settings = plain({"train.aggregate": "norm_clip", "distill.steps": 0})
    perada.train("digits", set={**settings, "train.rounds": 4}, out=tmp_path / "whole")
    perada.train("digits", set={**settings, "train.rounds": 2}, out=tmp_path / "parts")
    perada.train(set={"train.rounds": 4}, out=tmp_path / "parts", resume=True)
    newest = json.loads((tmp_path / "parts/checkpoints/round-0004/state.json").read_text())
    assert adapters(tmp_path / "parts") == adapters(tmp_path / "whole")
    assert "norms" in json.dumps(newest)


def test_a_part_that_is_joined_is_clipped_against_zeros() -> None:
    w = State({"w": torch.ones(3, 4)})
    both = merge(w, join(dc=State({"w": torch.tensor([[1.0], [2.0], [1e6]]).expand(3, 4)})))
    reference = merge(State({"w": torch.ones(1, 4)}), join(dc=State({"w": torch.zeros(1, 4)})))
    ours = clipped(both, reference, {}).states
    assert ours.params["dc/w"][:, 0].tolist() == pytest.approx([1.0, 2.0, 2 * CLIP])
    assert mix(w, w, torch.ones(3)).lanes == 3


# The guard's judges

FINITE = torch.ones(3, dtype=torch.bool)


def choice(rule: Rule, rows: list[list[float]]) -> int:
    scores = rule.losses(torch.tensor(rows, dtype=torch.float64), FINITE)
    return -1 if scores is None else int(scores.argmin())


HONEST = [[1.0] * 9, [0.8 + 0.01 * k for k in range(9)], [0.9] * 9]  # nine judges prefer the second


@pytest.mark.parametrize("rule", [Rule(), NORM, TRIM, MEDIAN])
@pytest.mark.parametrize(
    "said",
    [
        [0.0, 1e308, 0.0],
        [1e308, 1e308, 0.0],
        [0.0, math.inf, 0.0],
        [1.0, math.nan, 0.0],
        [0.0, 1e5, 1e5],
        [1e5, 1e5, 0.0],
        [0.0, 50.0, 1.0],
    ],
)
def test_a_hostile_judge_does_not_dictate_the_choice(rule: Rule, said: list[float]) -> None:
    assert choice(rule, HONEST) == 1
    assert choice(rule, [[*row, x] for row, x in zip(HONEST, said, strict=True)]) == 1


@pytest.mark.parametrize("rule", [NORM, TRIM, MEDIAN])
def test_two_of_ten_judges_do_not_dictate_with_a_robust_rule(rule: Rule) -> None:
    rows = [[*row[:8], x, x] for row, x in zip(HONEST, (0.0, 15.0, 10.0), strict=True)]
    assert choice(rule, rows) == 1


@pytest.mark.parametrize("rule", [Rule(), NORM, TRIM, MEDIAN])
def test_a_candidate_that_most_judges_cannot_score_is_out(rule: Rule) -> None:
    """One overflowed at the clients, though its weights are finite: that silences nobody about the others."""
    nan = math.nan
    assert choice(rule, [[1.0, 1.0, 1.0], [nan, nan, 0.1], [0.9, 0.8, 0.9]]) == 2


def test_with_the_mean_honest_losses_are_averaged_as_ever() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).random((3, 8)))
    scores = Rule().losses(rows, FINITE)
    assert scores is not None
    assert torch.equal(scores, rows.mean(1)), "bit for bit"
