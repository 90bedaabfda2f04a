"""sgd() over K ragged lanes against the plain loop over one, and against itself in other groupings."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors

from perada.lanes import Options, Pull, Result, gather, mean, sgd

from . import oracle
from .problems import LENGTHS, K, Problem, cross_entropy, noisy, problem

RATES = [0.05, 0.1, 0.2, 0.02]
STRENGTHS = [0.5, 0.0, 2.0, 0.1]
HOW = {"momentum": 0.9, "weight_decay": 5e-2, "clip": 0.5}


def assert_lane_is(result: Result, k: int, wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in {**result.state.params, **result.state.buffers}.items():
        assert_close_norm(tensor[k], wanted[name], what=f"lane {k}, {name}")


def assert_equals_oracle(p: Problem, plain: torch.nn.Module, options: Options, pull: Pull | None) -> None:
    result = sgd(p.model, p.start, p.batches, cross_entropy, RATES, LENGTHS, pull, options)
    assert result.failed == ()
    assert result.trace.shape == (max(LENGTHS), K)
    trained = [n for n in p.start.params if n not in p.model.inert]
    for k in range(K):
        strength = pull.strength[k] if pull else 0.0
        how = oracle.Sgd(RATES[k], options.momentum, options.weight_decay, options.clip, strength)
        centre = None
        if pull:
            own = 0 if pull.towards.lanes == 1 else k
            centre = {n: t[own] for n, t in pull.towards.params.items()}
        wanted, losses = oracle.train(plain, p.lane(k), trained, p.of_lane(k, LENGTHS[k]), how, centre)
        assert_lane_is(result, k, wanted)
        trace = result.trace[:, k]
        assert_close_norm(trace[: LENGTHS[k]].double(), torch.tensor(losses, dtype=torch.float64), 1e-6)
        assert bool(trace[LENGTHS[k] :].isnan().all()), "nothing is written after a lane's last step"


OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 5e-2},
    "clip": {"clip": 0.5},
    "all": HOW,
    "all, masked": {**HOW, "widths": (4,)},
    "all, two widths": {**HOW, "widths": (2, 4)},
}


@pytest.mark.parametrize("net", ["resnet8", "tiny"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adapters_equal_the_oracle(net: str, options: dict) -> None:
    p = problem(net)
    pull = Pull(noisy(p.model.initial(), 0.2), STRENGTHS)
    assert_equals_oracle(p, oracle.with_adapters(p.net), Options(**options), pull)


def test_adapters_without_a_pull() -> None:
    p = problem()
    assert_equals_oracle(p, oracle.with_adapters(p.net), Options(), None)


def test_a_centre_for_each_lane() -> None:
    p = problem("tiny")
    centres = noisy(p.model.initial(K), 0.3)
    assert_equals_oracle(p, oracle.with_adapters(p.net), Options(widths=(2, 4)), Pull(centres, STRENGTHS))


@pytest.mark.parametrize("trained", ["full", "everything", "output", "input", "batch_norm"])
@pytest.mark.parametrize("widths", [None, (4,), (2, 4)])
def test_other_groups_equal_the_oracle(trained: str, widths: tuple[int, ...] | None) -> None:
    p = problem("tiny", trained, adapter=None)
    pull = Pull(mean(p.start), STRENGTHS)
    assert_equals_oracle(p, p.net, Options(**HOW, widths=widths), pull)


def test_full_resnet8_equals_the_oracle() -> None:
    p = problem("resnet8", "full", adapter=None)
    assert_equals_oracle(p, p.net, Options(**HOW), Pull(mean(p.start), STRENGTHS))


def test_clipping_does_clip() -> None:
    # Otherwise the cases above would compare two loops that never clip.
    p = problem()
    bound, free = (
        sgd(p.model, p.start, p.batches, cross_entropy, RATES, LENGTHS, options=Options(clip=c)).state
        for c in (0.5, None)
    )
    assert not torch.equal(bound.params["fc.weight"], free.params["fc.weight"])


def run(p: Problem, lanes: list[int], **options: object) -> Result:
    start, batches = p.part(lanes)
    pull = Pull(mean(p.start), [STRENGTHS[k] for k in lanes])
    how = Options(**{**HOW, **options})
    rates, lengths = [RATES[k] for k in lanes], [LENGTHS[k] for k in lanes]
    return sgd(p.model, start, batches, cross_entropy, rates, lengths, pull, how)


@pytest.mark.parametrize("trained", ["adapter", "full"])
def test_any_grouping_of_lanes_gives_the_same(trained: str) -> None:
    p = problem("resnet8", trained, "residual" if trained == "adapter" else None, dropout=0.3)
    whole = run(p, [0, 1, 2, 3])
    others = [([k], {}) for k in range(K)]
    others += [
        ([2, 0], {"widths": (2,)}),
        ([3, 1], {}),
        ([3, 2, 1, 0], {"widths": (4,)}),
        ([1, 3, 0], {"widths": (2,)}),
    ]
    for group, options in others:
        part, wanted = run(p, group, **options), gather(whole.state, group)
        for ours, theirs in ((part.state.params, wanted.params), (part.state.buffers, wanted.buffers)):
            for name in theirs:
                assert_close_norm(ours[name], theirs[name], what=f"{group}, {name}")


def test_dropout_is_on_in_training() -> None:
    # The same start and data with and without: the grouping test means nothing if dropout is off.
    on, off = (run(problem(dropout=d), [0, 1, 2, 3]).trace[0] for d in (0.3, 0.0))
    assert (on - off).abs().min() > 1e-6


@pytest.mark.parametrize("trained", ["adapter", "full"])
def test_float32_losses(trained: str) -> None:
    p = problem("resnet8", trained, "residual" if trained == "adapter" else None, 0.3, torch.float32)
    whole = run(p, [0, 1, 2, 3])
    for k in range(K):
        ours, alone = whole.trace[: LENGTHS[k], k], run(p, [k]).trace[:, 0]
        assert ((ours - alone).abs() / alone).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_calls_are_bit_identical(dtype: torch.dtype) -> None:
    p = problem(dropout=0.3, dtype=dtype)
    before = copy.deepcopy(p.start)
    a, b = run(p, [0, 1, 2, 3]), run(p, [0, 1, 2, 3])
    assert_same_tensors(a.state.params, b.state.params)
    assert_same_tensors(a.state.buffers, b.state.buffers)
    assert torch.equal(a.trace.nan_to_num(-1.0), b.trace.nan_to_num(-1.0))
    # `start` is a caller's round state: training must leave it as it was.
    assert_same_tensors(p.start.params, before.params)
    assert_same_tensors(p.start.buffers, before.buffers)


def test_start_is_not_changed_when_lanes_are_already_in_order() -> None:
    # Equal lengths need no sorting: the tempting place to train the caller's own tensors.
    p = problem("tiny")
    before = copy.deepcopy(p.start)
    sgd(p.model, p.start, p.batches, cross_entropy, RATES, [2] * K)
    assert_same_tensors(p.start.params, before.params)
    assert_same_tensors(p.start.buffers, before.buffers)


@pytest.mark.parametrize("wrong", ["lr", "steps", "strength"])
@pytest.mark.parametrize("count", [K - 1, K + 1])
def test_one_number_for_each_lane(wrong: str, count: int) -> None:
    # A short `steps` would drop a lane, a long `lr` would hide that somebody's lists do not line up.
    p = problem("tiny")
    given = {"lr": K, "steps": K, "strength": K, wrong: count}
    pull = Pull(mean(p.start), [0.1] * given["strength"])
    with pytest.raises(ValueError, match="lanes"):
        sgd(p.model, p.start, p.batches, cross_entropy, [0.1] * given["lr"], [1] * given["steps"], pull)


def test_the_trace_has_the_dtype_of_the_state() -> None:
    assert run(problem(), [2]).trace.dtype == torch.float64


def test_a_lane_of_no_steps_is_left_alone() -> None:
    p = problem("tiny")
    how = Options(**HOW, widths=(4,))
    result = sgd(p.model, p.start, p.batches, cross_entropy, RATES, [2, 0, 1, 0], options=how)
    for ours, theirs in ((result.state.params, p.start.params), (result.state.buffers, p.start.buffers)):
        for name in theirs:
            assert torch.equal(ours[name][[1, 3]], theirs[name][[1, 3]])
    none = sgd(p.model, p.start, p.batches, cross_entropy, RATES, [0] * K)
    assert none.trace.shape == (0, K)
    assert_same_tensors(none.state.params, p.start.params)


def test_the_adapter_norms_bias_is_inert() -> None:
    p = problem()
    biases = {n for n in p.start.params if n.endswith("adapter.norm.bias")}
    assert p.model.inert == biases
    # With dropout 0 the block's norm subtracts the constant it adds: no gradient but rounding.
    leaves = {n: t.detach().requires_grad_() for n, t in p.start.params.items()}
    batch = p.batches(0, torch.arange(K))
    state = dataclasses.replace(p.start, params=leaves, buffers={n: b.clone() for n, b in p.start.buffers.items()})
    loss = cross_entropy(p.model(state, batch.images, norm="train"), batch.targets).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    largest = max(g.norm() for g in grads.values())
    assert all(grads[n].norm() < 1e-12 * largest for n in biases)
    assert all(grads[n].norm() > 1e-9 * largest for n in grads if n not in biases)
    # Not even weight decay or the pull move it, so it stays what the server sent.
    trained = run(p, [0, 1, 2, 3]).state.params
    assert all(torch.equal(trained[n], p.start.params[n]) for n in biases)
    assert all(not torch.equal(trained[n], p.start.params[n]) for n in trained if n not in biases)


def poisoned(p: Problem, lane: int, step: int, value: float) -> Problem:
    images = p.images.clone()
    images[lane, step, 0, 0, 0, 0] = value
    return dataclasses.replace(p, images=images)


def assert_neighbours_are_bit_identical(sick: Result, healthy: Result, lane: int) -> None:
    others = [k for k in range(K) if k != lane]
    a, b = gather(sick.state, others), gather(healthy.state, others)
    assert_same_tensors(a.params, b.params)
    assert_same_tensors(a.buffers, b.buffers)
    assert torch.equal(sick.trace[:, others].nan_to_num(-1.0), healthy.trace[:, others].nan_to_num(-1.0))
    assert sick.failed == (lane,)
    assert healthy.failed == ()
    assert all(bool(t.isfinite().all()) for t in sick.state.tensors())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("trained", ["adapter", "full"])
@pytest.mark.parametrize("widths", [None, (4,), (2, 4)])
def test_a_poisoned_lane_harms_no_neighbour(value: float, trained: str, widths: tuple[int, ...] | None) -> None:
    p = problem("resnet8", trained, "residual" if trained == "adapter" else None, 0.3, torch.float32)
    sick, healthy = (run(q, [0, 1, 2, 3], widths=widths) for q in (poisoned(p, 1, 3, value), p))
    assert_neighbours_are_bit_identical(sick, healthy, 1)
    # What it keeps is its state after the three steps that were sound.
    start, batches = p.part([1])
    pull = Pull(mean(p.start), [STRENGTHS[1]])
    sound = sgd(p.model, start, batches, cross_entropy, [RATES[1]], [3], pull, Options(**HOW)).state
    for name, t in sick.state.params.items():
        assert_close_norm(t[1], sound.params[name][0], 1e-4, name)


@pytest.mark.parametrize("rate", [1e10, 1e12, 1e30, 1e38])  # from a variance that overflows to a parameter
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 10.0}, HOW], ids=str)
def test_a_lane_that_explodes_harms_no_neighbour(rate: float, options: dict) -> None:
    p = problem("resnet8", "adapter", "residual", 0.3, torch.float32)
    pull = Pull(mean(p.start), STRENGTHS)
    sick, healthy = (
        sgd(p.model, p.start, p.batches, cross_entropy, rates, [7, 9, 1, 8], pull, Options(**options))
        for rates in ([rate, *RATES[1:]], RATES)
    )
    assert_neighbours_are_bit_identical(sick, healthy, 0)


def test_a_lane_that_explodes_in_its_last_step_is_named() -> None:
    # lr·g overflows in the only step: no later loss can give it away.
    p = problem("resnet8", dtype=torch.float32)
    rates, decay = [3e38, *RATES[1:]], Options(weight_decay=1e3)
    result = sgd(p.model, p.start, p.batches, cross_entropy, rates, [1] * K, options=decay)
    assert result.failed == (0,)
    assert all(bool(t.isfinite().all()) for t in result.state.tensors())


def test_a_poisoned_lane_that_had_finished_is_not_named() -> None:
    # Lane 2 has one step; with one width its slot goes on being computed, on data that is no longer its own.
    p = poisoned(problem(dropout=0.3), 2, 5, float("nan"))
    sick, healthy = (run(q, [0, 1, 2, 3], widths=(4,)) for q in (p, problem(dropout=0.3)))
    assert sick.failed == ()
    assert_same_tensors(sick.state.params, healthy.state.params)
    assert_same_tensors(sick.state.buffers, healthy.state.buffers)
