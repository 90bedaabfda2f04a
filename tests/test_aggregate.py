"""The rules that make one state of many uploads, beside byzfl's; and the guard's judges under attack."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byzantine import byzfl
from helpers import assert_close_norm, assert_same_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from small import adapters, plain, small
from torch import Tensor

import perada
from perada.client.trainer import Train
from perada.config import build
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State, gather, join, mean, merge, stack
from perada.methods import REGISTRY
from perada.server.aggregate import CLIP, HISTORY, Rule, clipped, positive
from perada.server.checks import MIN_OTHERS, refused_lanes

NORM, TRIM, MEDIAN = Rule("norm_clip"), Rule("trimmed_mean"), Rule("median")


def vectors(lanes: int, seed: int, size: int = 40) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((lanes, size)) ** 3)


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.integers(1, 13), st.integers(0, 10**6))
def test_the_rules_are_byzfls(lanes: int, seed: int) -> None:
    x = vectors(lanes, seed)
    cut = min(math.ceil(0.2 * lanes - 1e-9), (lanes - 1) // 2)
    expected = byzfl.TrMean(f=cut)(x.numpy()) if cut else byzfl.Average()(x.numpy())
    assert_close_norm(TRIM.of_lanes(x)[0], torch.from_numpy(expected))
    assert_close_norm(TRIM.of_lanes(x.T.contiguous(), 1)[:, 0], torch.from_numpy(expected))
    assert_close_norm(MEDIAN.of_lanes(x)[0], torch.from_numpy(byzfl.Median()(x.numpy())))
    bound = float(x.norm(dim=1).median())
    ours = clipped(State({"w": 2 + x}), State({"w": torch.full((1, 40), 2.0).double()}), {})
    clipping = byzfl.Clipping(c=CLIP * bound if lanes >= MIN_OTHERS else 1e9)
    kept = [k for k in range(lanes) if k not in ours.left_out]
    assert 2 * len(kept) > lanes
    assert_close_norm(ours.states.params["w"] - 2, torch.from_numpy(clipping(x.numpy()))[kept])
    assert ours.norms["params"] == pytest.approx([bound])


def test_a_rule_cuts_off_as_many_as_the_share_says() -> None:
    assert [TRIM.cut(k) for k in (1, 2, 3, 5, 8, 10, 15)] == [0, 0, 1, 1, 2, 2, 3]
    assert [Rule("trimmed_mean", 0.0).cut(k) for k in (1, 5)] == [0, 0]
    assert [MEDIAN.cut(k) for k in (1, 2, 3, 4)] == [0, 0, 1, 1]


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


def updates(*lengths: float) -> State:
    return State({"w": torch.tensor(lengths, dtype=torch.float64).unsqueeze(1).expand(-1, 4)})


ZERO = updates(0.0)


def test_an_upload_that_equals_the_broadcast_says_nothing_about_the_bound() -> None:
    """One of two would make the bound zero, for this round and for those after it."""
    two = clipped(updates(0.0, 3.0), ZERO, {})
    assert two.states.params["w"][:, 0].tolist() == [0.0, 3.0]
    assert two.norms == {"params": [6.0]}
    assert clipped(updates(0.0, 0.0), ZERO, two.norms).norms == two.norms
    many = clipped(updates(0.0, 0.0, 0.0, 1.0, 1.0, 2.0), ZERO, {"params": [0.0, 2.0]})
    assert many.states.params["w"][:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, CLIP]
    assert many.norms == {"params": [2.0, 2.0]}


def test_fewer_than_three_uploads_are_clipped_by_the_last_rounds_alone() -> None:
    assert clipped(updates(1.0, 500.0), ZERO, {}).states.params["w"].max() == 500.0
    two = clipped(updates(1.0, 500.0), ZERO, {"params": [2.0] * 3})
    assert two.states.params["w"][:, 0].tolist() == pytest.approx([1.0, CLIP])
    assert not two.left_out
    one = clipped(updates(500.0), ZERO, {"params": [2.0] * 3})
    assert one.states.params["w"].max() == CLIP
    assert not one.left_out


def test_an_upload_far_beyond_the_median_is_left_out_and_named() -> None:
    done = clipped(updates(1.0, 0.1, 1.2, -25.0, 9.0), ZERO, {})
    assert done.left_out == {3: "its update is 20.8 times as long as the median"}
    assert done.states.params["w"][:, 0].tolist() == pytest.approx([1.0, 0.1, 1.2, CLIP * 1.2])
    assert list(clipped(updates(1.0, 1.0, 3.0), ZERO, {"params": [0.2] * 9}).left_out) == [2], "by the last rounds too"
    assert not clipped(updates(9.0, 9.0, 0.2), ZERO, {"params": [0.2] * 9}).left_out, "never half of all"
    sim = hostile(build(small(method__name="fedavg", train__cohort=4, train__aggregate="norm_clip")), far)
    sim.round()
    assert list(sim.now.last["refused"]) == ["client-01"]
    assert sim.evaluate().refused.keys() == {"client-01"}  # type: ignore[union-attr]


def test_a_long_update_is_left_out_only_if_it_points_against_the_others() -> None:
    """A sign flip costs too much if it is only clipped; an honest update that is as long is not against the others."""
    done = clipped(updates(1.0, 1.0, 1.2, 1.1, -5.0, 5.0, -2.9), ZERO, {})
    assert done.left_out == {4: "its update is 4.17 times as long as the median and points against the others"}
    assert done.states.params["w"][:, 0].tolist() == pytest.approx([1.0, 1.0, 1.2, 1.1, 1.44, -1.44])


def test_a_client_that_is_left_out_has_no_part_in_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a weight, nor a vote in the guard, nor bytes."""
    clients = {"train__cohort": 4, "train__aggregate": "norm_clip", "train__weighting": "samples"}
    sim, other = hostile(build(small(**clients)), far), build(small(**clients))
    other.sampled = lambda round: [0, 2, 3]  # type: ignore[method-assign]
    ballots: list[Tensor | None] = []
    monkeypatch.setattr(sim, "judge", lambda states: ballots.append(Experiment.judge(sim, states)) or ballots[-1])
    sim.round()
    other.round()
    assert [b.shape for b in ballots if b is not None] == [(2 + 1, 3)]
    assert sim.now.counters == other.now.counters
    for name, tensor in sim.now.broadcast.params.items():
        assert torch.allclose(tensor, other.now.broadcast.params[name], rtol=1e-3, atol=1e-5), name


def test_a_client_with_many_images_is_clipped_but_never_left_out() -> None:
    """It takes more steps than the others, so its honest update is longer: more than 3 times the median here."""
    config = small(method__name="fedavg", data__clients=6, train__cohort=6, train__aggregate="norm_clip")
    federation = build(config).federation
    pool, sizes = np.sort(federation.server_val), [400, 32, 32, 32, 32, 32]
    parts = np.split(np.random.default_rng(0).permutation(pool)[: sum(sizes)], np.cumsum(sizes)[:-1])
    clients = tuple(replace(c, train=p) for c, p in zip(federation.clients, parts, strict=True))
    sim, longest = build(config, federation=replace(federation, clients=clients)), 0.0
    for _ in range(3):
        uploads, reference = sim.gather(), sim.now.broadcast.params
        lengths = sum((t - reference[n]).double().flatten(1).square().sum(1) for n, t in uploads.states.params.items())
        assert isinstance(lengths, Tensor)
        longest = max(longest, float((lengths / lengths.median()).max().sqrt()))
        sim.update(uploads)
        assert "refused" not in sim.now.last
    assert longest > 3


def test_a_network_checks_an_upload_alone_and_then_beside_the_others() -> None:
    """One that is refused by itself is not among those whose median the others are measured by."""
    uploads, reference = stack(*[state(1, 1)] * 5), state(1, 1)
    uploads.buffers["n.running_var"][:2] *= -1
    uploads.buffers["n.running_var"][4] *= 1e4
    refused = refused_lanes(uploads, reference, 1e9)
    assert {k: why.split(" 1")[0] for k, why in refused.items()} == {
        0: "its statistics n.running_var hold a negative variance",
        1: "its statistics n.running_var hold a negative variance",
        4: "its statistics n.running_var are",
    }


def test_masks_counts_and_a_variance_without_its_mean_are_uploads_too() -> None:
    def upload(lanes: int, weight: float) -> State:
        buffers = {
            "mask": torch.ones(lanes, 4, dtype=torch.bool),
            "count": torch.full((lanes, 1), 7 * lanes, dtype=torch.uint8),
            "steps": torch.full((lanes, 1), 10**6 * lanes),
            "norm.running_var": torch.ones(lanes, 4),
        }
        return State({"w": torch.full((lanes, 4), weight)}, buffers)

    reference, uploads = upload(1, 0.0), upload(3, 1.0)
    done = NORM.admit(uploads, reference, {})
    assert_same_tensors(done.states.buffers, uploads.buffers)
    assert done.norms == {"params": [2.0], "buffers": []}, "no whole number is part of a length"
    assert refused_lanes(uploads, reference, 1e9) == {}
    only_counts = State({}, {"count": torch.ones(3, 1, dtype=torch.uint8)})
    assert NORM.admit(only_counts, only_counts, {}).norms == {}


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
        with pytest.raises(InputError, match=rf"Train.aggregate={kind} counts all clients alike"):
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
def test_a_far_upload_ruins_no_averaging_method(method: str, kind: str) -> None:
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
    ("attack", "times"), [(byzfl.SignFlipping(), 5.0), (byzfl.InnerProductManipulation(50.0), 1.0)]
)
def test_an_attack_of_byzfl_moves_the_average_less_than_it_moves_the_mean(kind: str, attack: Any, times: float) -> None:
    """Two of ten clients follow the attack on the others' updates."""
    x, reference = 1 + 0.3 * vectors(8, 0), torch.zeros(1, 40, dtype=torch.float64)
    all_ten = State({"w": torch.cat([x, times * attack(x).expand(2, -1)])})

    def moved(rule: Rule) -> float:
        admitted = rule.admit(all_ten, State({"w": reference}), {})
        return float((rule.mean(admitted.states).params["w"] - x.mean(0)).norm())

    assert moved(Rule()) > x.mean(0).norm(), "the mean goes backwards"
    assert moved(Rule(kind)) < 0.7 * x.mean(0).norm()


def test_with_the_mean_a_round_is_the_plain_mean() -> None:
    """Bit for bit; and clipping is something else."""
    usual, other = (
        build(small(method__name="fedavg", train__cohort=4, **a)) for a in ({}, {"train__aggregate": "norm_clip"})
    )
    for sim in (usual, other):
        uploads = sim.gather()
        sim.update(uploads)
        plain_mean = mean(uploads.states)
        same = [torch.equal(t, plain_mean.params[n]) for n, t in sim.now.broadcast.params.items()]
        assert all(same) == (sim is usual)
    assert usual.now.memory == {}
    assert len(other.now.memory["norms"]["params"]) == 1


@pytest.mark.parametrize("kind", ["mean", *KINDS])
def test_teachers_logits_become_one_by_the_rule(kind: str) -> None:
    """With the mean, bit for bit the mean over the teachers' dimension."""
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 7, 16, 10)).astype(np.float32))
    one = Rule(kind).of_lanes(logits, 1)  # type: ignore[arg-type]
    assert torch.allclose(one[:, 0], Rule(kind).of_lanes(logits.transpose(0, 1))[0], atol=1e-6)  # type: ignore[arg-type]
    if kind == "mean":
        assert torch.equal(one.squeeze(1), logits.mean(1))


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


# The guard's judges

FINITE = torch.ones(3, dtype=torch.bool)


def choice(rule: Rule, rows: list[list[float]]) -> int:
    scores = rule.losses(torch.tensor(rows, dtype=torch.float64), FINITE)
    return -1 if scores is None else int(scores.argmin())


HONEST = [[1.0] * 9, [0.8 + 0.01 * k for k in range(9)], [0.9] * 9]  # nine judges prefer the second


@pytest.mark.parametrize("rule", [NORM, TRIM, MEDIAN])
@pytest.mark.parametrize(
    "report",
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
def test_a_hostile_judge_does_not_dictate_the_choice(rule: Rule, report: list[float]) -> None:
    assert choice(rule, HONEST) == 1
    assert choice(rule, [[*row, x] for row, x in zip(HONEST, report, strict=True)]) == 1


@pytest.mark.parametrize("rule", [NORM, TRIM, MEDIAN])
def test_two_of_ten_judges_do_not_dictate_with_a_robust_rule(rule: Rule) -> None:
    rows = [[*row[:8], x, x] for row, x in zip(HONEST, (0.0, 15.0, 10.0), strict=True)]
    assert choice(rule, rows) == 1


@pytest.mark.parametrize("rule", [Rule(), NORM, TRIM, MEDIAN])
def test_a_candidate_that_most_judges_cannot_score_is_out(rule: Rule) -> None:
    """One overflowed at the clients, though its weights are finite: that silences nobody about the others."""
    nan = math.nan
    assert choice(rule, [[1.0, 1.0, 1.0], [nan, nan, 0.1], [0.9, 0.8, 0.9]]) == 2


def test_with_the_mean_every_judge_that_has_data_counts_alike() -> None:
    """The rule of Algorithm 1's guard as it always was: no honest loss is too large or too different to count."""
    rows = torch.from_numpy(np.random.default_rng(0).random((3, 8)))
    rows[:, 2] = math.nan  # no data
    rows[1, 5], rows[2, 6] = 3e6, math.inf
    scores = Rule().losses(rows, FINITE)
    assert scores is not None
    by_hand = rows[:, [0, 1, 3, 4, 5, 6, 7]].mean(1)
    assert torch.equal(scores, by_hand), "bit for bit"
    unlike = [[1.0] * 9 + [50.0], [0.99] * 9 + [50.0], [1.01] * 9 + [45.0]]  # the last judge differs 500 times as much
    assert choice(Rule(), unlike) == 2
    assert choice(NORM, unlike) == 1
    assert Rule().losses(rows[:, 2:3], FINITE) is None
    bad = Rule().losses(torch.tensor([[1.0, 1.0], [0.1, math.nan], [0.1, 0.1]]), torch.tensor([True, True, False]))
    assert bad is not None
    assert bad.tolist() == [1.0, math.inf, math.inf]
