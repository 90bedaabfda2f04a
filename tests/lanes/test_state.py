"""Stacking, splitting and averaging lanes, on numbers a person can check."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same_tensors

from perada.lanes import State, gather, mean, merge, repeat, scatter, split, stack


def state(*lanes: float) -> State:
    """Lane k: weight [x, 10x], running mean [100x]."""
    x = torch.tensor(lanes, dtype=torch.float64)
    return State({"w": torch.stack([x, 10 * x], 1)}, {"m": 100 * x.unsqueeze(1)})


def assert_same(a: State, b: State) -> None:
    assert_same_tensors(a.params, b.params)
    assert_same_tensors(a.buffers, b.buffers)


def test_sizes() -> None:
    assert state(1, 2, 3).lanes == 3
    assert state(1, 2, 3).parameters_per_lane() == 2
    assert state(1, 2, 3).bytes_per_lane() == 8 * 3
    assert (State().lanes, State().parameters_per_lane(), State().bytes_per_lane()) == (0, 0, 0)
    assert State({}, {"m": torch.zeros(2, 5)}).lanes == 2, "a state of buffers alone has lanes too"


def test_stack_and_split() -> None:
    both = stack(state(1, 2), state(3, 4))
    assert_same(both, state(1, 2, 3, 4))
    first, second = split(both, 2)
    assert_same(first, state(1, 2))
    assert_same(second, state(3, 4))
    assert_same(stack(state(1), state(2, 3)), state(1, 2, 3))


def test_split_needs_equal_parts() -> None:
    with pytest.raises(ValueError, match="3 lanes do not split into 2"):
        split(state(1, 2, 3), 2)


def test_stack_needs_the_same_names() -> None:
    with pytest.raises(ValueError, match="different names"):
        stack(state(1), State(state(1).params, {}))
    with pytest.raises(ValueError, match="different names"):
        stack(state(1), State({"other": torch.ones(1, 2)}, state(1).buffers))


def test_repeat_copies_one_lane() -> None:
    one = state(5)
    three = repeat(one, 3)
    assert_same(three, state(5, 5, 5))
    three.params["w"].zero_()
    assert_same(one, state(5))
    with pytest.raises(ValueError, match="one lane, not 2"):
        repeat(state(1, 2), 3)


def test_gather() -> None:
    assert_same(gather(state(1, 2, 3), [2, 0]), state(3, 1))
    assert_same(gather(state(1, 2, 3), torch.tensor([1, 1])), state(2, 2))
    with pytest.raises((IndexError, RuntimeError)):
        gather(state(1, 2, 3), [3])


def test_scatter_leaves_its_input_alone() -> None:
    whole = state(1, 2, 3)
    before = copy.deepcopy(whole)
    assert_same(scatter(whole, [2, 0], state(30, 10)), state(10, 2, 30))
    assert_same(whole, before)
    assert_same(scatter(whole, [2, 0], gather(whole, [2, 0])), whole)
    with pytest.raises(ValueError, match="different names"):
        scatter(whole, [0], State(state(1).params, {}))


def test_merge_and_only() -> None:
    whole = state(1, 2)
    left, right = whole.only(["w"], []), whole.only([], ["m", "of another model"])
    assert list(left.params) == ["w"]
    assert left.buffers == {}
    assert_same(merge(left, right), whole)
    with pytest.raises(ValueError, match="more than one state"):
        merge(whole, left)


def test_mean() -> None:
    assert_same(mean(state(1, 2, 6)), state(3))
    # (1·1 + 3·2 + 0·6) / 4 = 1.75; weights are shares, whatever they sum to.
    assert_same(mean(state(1, 2, 6), [1, 3, 0]), state(1.75))
    assert_same(mean(state(1, 2, 6), [0.25, 0.75, 0.0]), state(1.75))
    with pytest.raises(ValueError, match="2 weights for 3 lanes"):
        mean(state(1, 2, 6), [1, 1])


def test_map() -> None:
    assert_same(state(1, 2).map(lambda t: 2 * t), state(2, 4))
