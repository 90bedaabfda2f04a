"""Draws are a pure function of (key, element), and look random."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from perada.lanes import fold, key_of, rng_of, uniform
from perada.lanes.layers import LaneDropout
from perada.lanes.random import bits, keep_mask

N = 1 << 17  # elements of a statistical test; all of them are deterministic, so a bound of 5 sigma never flickers


def keys(*numbers: int) -> Tensor:
    return torch.tensor([key_of(0, "client", k) for k in numbers])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1])


def test_key_of_is_pinned() -> None:
    # Literal values: a change here would silently change every run, and would break resuming one.
    assert key_of(0) == 7163381271710615482
    assert key_of(1, 2, 3, "dropout") == 6392145402507871837


def test_key_of_tells_parts_apart() -> None:
    parts = [(1, 23), (12, 3), (123,), ("1", 23), (1, "23"), ("1\x1f23",), (23, 1)]
    assert len({key_of(*p) for p in parts}) == len(parts)
    assert all(-(2**63) <= key_of(i) < 2**63 for i in range(100))


def test_rng_of_is_a_fresh_stream_for_each_key() -> None:
    assert rng_of(0, "a").permutation(50).tolist() == rng_of(0, "a").permutation(50).tolist()
    assert rng_of(0, "a").permutation(50).tolist() != rng_of(0, "b").permutation(50).tolist()


def test_bits_are_pinned() -> None:
    # The integers themselves, so that another device or torch version cannot drift unnoticed.
    assert bits(torch.tensor([0, 1, -1]), 3).tolist() == [
        [0, -1198916144, -814136407],
        [-77188672, 565613404, 1865732337],
        [-401185911, -372521978, 1842780634],
    ]


def test_fold_differs_by_step_and_lane() -> None:
    folded = torch.stack([fold(keys(0, 1, 2), step) for step in range(1000)])
    assert folded.unique().numel() == folded.numel()
    assert torch.equal(fold(keys(0, 1), 7), fold(keys(0, 1), torch.tensor(7))), "a tensor step is the same step"
    # A step counter changes few bits; the folded keys must differ in about half of theirs.
    flipped = fold(keys(0), 4) ^ fold(keys(0), 5)
    assert 16 < bin(int(flipped) & (2**64 - 1)).count("1") < 48


@pytest.mark.parametrize("draw", [bits, uniform, lambda k, n: keep_mask(k, n, 0.3)])
def test_a_lanes_draws_do_not_depend_on_its_neighbours(draw) -> None:
    alone = torch.cat([draw(keys(k), 1000) for k in range(3)])
    assert torch.equal(draw(keys(0, 1, 2), 1000), alone)
    assert torch.equal(draw(keys(2, 0, 1), 1000), alone[[2, 0, 1]])
    assert torch.equal(draw(keys(0), 400), alone[:1, :400]), "a smaller batch is a prefix"


def test_dropout_does_not_depend_on_the_grouping() -> None:
    layer, x = LaneDropout(0.3, "layer"), torch.randn(3, 4, 5, 2, 2)

    def run(lanes: list[int]) -> Tensor:
        return functional_call(layer, {"key": keys(*lanes)}, (x[lanes].flatten(0, 1),)).unflatten(0, (-1, 4))

    alone = torch.cat([run([k]) for k in range(3)])
    assert torch.equal(run([0, 1, 2]), alone)
    assert torch.equal(run([2, 0, 1]), alone[[2, 0, 1]])
    # The place of an element is its logical index: the memory format must not change what is dropped.
    last = x.flatten(0, 1).to(memory_format=torch.channels_last)
    assert torch.equal(functional_call(layer, {"key": keys(0, 1, 2)}, (last,)), alone.flatten(0, 1))


def test_uniform() -> None:
    u = uniform(keys(0, 1), N)
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    u = u.double()
    for i, moment in enumerate((1 / 2, 1 / 3, 1 / 4, 1 / 5), start=1):
        sigma = math.sqrt((1 / (2 * i + 1) - moment**2) / N)
        assert (u.pow(i).mean(1) - moment).abs().max() < 5 * sigma
    counts = (u * 256).long().flatten().bincount(minlength=256).double()
    expected = 2 * N / 256
    chi2 = float(((counts - expected).square() / expected).sum())
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("drop", [0.01, 0.3, 0.5, 0.9])
def test_the_drop_rate(drop: float) -> None:
    rates = 1.0 - keep_mask(keys(0, 1, 2), N, drop).double().mean(1)
    assert (rates - drop).abs().max() < 5 * math.sqrt(drop * (1 - drop) / N)


def test_the_drop_rates_edges() -> None:
    assert bool(keep_mask(keys(0), N, 0.0).all())
    assert not bool(keep_mask(keys(0), N, 1.0).any())


def test_dropout_preserves_the_mean() -> None:
    for p in (0.1, 0.3, 0.7):
        y = functional_call(LaneDropout(p, "layer"), {"key": keys(0, 1)}, (torch.ones(2, N),))
        assert (y.mean(1) - 1.0).abs().max() < 5 * math.sqrt(p / (1 - p) / N)
        assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


def masks(key: Tensor, layer: str) -> Tensor:
    return functional_call(LaneDropout(0.3, layer), {"key": key}, (torch.ones(key.shape[0], N),))


def test_lanes_steps_and_layers_draw_independently() -> None:
    streams = {
        "lanes": masks(keys(0, 1, 2), "a"),
        "steps": torch.cat([masks(fold(keys(0), step), "a") for step in range(3)]),
        "layers": torch.cat([masks(keys(0), name) for name in ("a", "b", "layer1.0.conv1")]),
        "step 1 of one layer, step 0 of another": torch.cat(
            [masks(fold(keys(0), s), n) for s, n in ((1, "a"), (0, "b"))]
        ),
    }
    for what, rows in streams.items():
        for a, b in itertools.combinations(rows, 2):
            assert abs(correlation(a, b)) < 5 / math.sqrt(N), what


def test_samples_of_a_lane_draw_independently() -> None:
    # Lags of an activation's strides: powers of two are where a weak counter hash shows.
    u = uniform(keys(3), N)[0]
    for lag in (1, 2, 3, 7, 16, 49, 64, 512, 1024, 4096, 3 * 32 * 32, 1 << 15, 1 << 16):
        assert abs(correlation(u[:-lag], u[lag:])) < 5 / math.sqrt(N - lag), lag


def test_dropout_without_a_rate_is_the_identity() -> None:
    x = torch.randn(6, 4)
    assert torch.equal(functional_call(LaneDropout(0.0), {"key": keys(0, 1)}, (x,)), x)
