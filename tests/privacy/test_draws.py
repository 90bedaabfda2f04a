"""Truncated Poisson sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import perada
from perada.privacy import Privacy, Sampling, cohort_plan, plan
from perada.privacy.draws import PoissonBatches
from perada.privacy.randomness import Repeatable, Secret, drawn


def draws(sampling: Sampling, many: int = 4000) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [drawn(draw, sampling) for _ in range(many)]


def test_the_plan():
    assert plan(2250, 64, 10, Privacy(noise=1.0)) == Sampling(2250, 64 / 2250, 96, 360)
    assert plan(30, 64, 2, Privacy(noise=1.0)) == Sampling(30, 1.0, 30, 2)
    assert plan(2250, 64, 1, Privacy(noise=1.0, most=70)).most == 70
    assert cohort_plan(20, 8, 50, Privacy(noise=1.0, level="client")) == Sampling(20, 0.4, 20, 50)
    assert cohort_plan(20, 0, 50, Privacy(noise=1.0, level="client")).probability == 1.0


def test_every_sample_comes_equally_often_and_independently():
    found = draws(Sampling(50, 0.2, 50, 1))
    counts = np.array([len(d) for d in found])
    assert abs(counts.mean() - 10) < 0.2
    assert abs(counts.var() - 50 * 0.2 * 0.8) < 0.8  # binomial
    often = np.bincount(np.concatenate(found), minlength=50) / len(found)
    assert np.abs(often - 0.2).max() < 0.03
    assert all(len(set(d.tolist())) == len(d) for d in found)
    both = np.mean([0 in d and 1 in d for d in found])
    assert abs(both - 0.04) < 0.012


def test_a_large_draw_is_cut_to_a_random_subset():
    found = draws(Sampling(50, 0.2, 8, 1))
    counts = np.array([len(d) for d in found])
    assert counts.max() == 8
    whole = np.array([min(len(d), 8) for d in draws(Sampling(50, 0.2, 50, 1))])
    assert abs(counts.mean() - whole.mean()) < 0.05
    often = np.bincount(np.concatenate(found), minlength=50) / len(found)
    assert np.abs(often - often.mean()).max() < 0.03


def federation(samples: int = 40) -> perada.Federation:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (samples, 3, 4, 4), dtype=np.uint8)
    return perada.Federation.from_arrays({"north": (x, draw.integers(0, 2, samples))})


@pytest.mark.parametrize("secret", [True, False])
def test_copies_draw_apart(secret):
    fed = federation()
    plans = [plan(len(fed.clients[0].train), 8, 1, Privacy(noise=1.0))] * 2
    randomness = Secret(torch.device("cpu")) if secret else Repeatable([("a", "0"), ("a", "1")])
    batches = PoissonBatches(fed, [0, 0], plans, randomness, torch.float32)
    seen = []
    for step in range(5):
        batch = batches(step, torch.arange(2))
        first, second = batch.images.split(batch.counts)
        seen += [first, second]
        assert len(batch.images) == sum(batch.counts) == len(batch.targets) == len(batch.keys)
        assert len(batch.keys.unique()) == len(batch.keys)
    assert not any(a.equal(b) for i, a in enumerate(seen) for b in seen[:i] if len(a))


def test_repeatable_draws_do_not_depend_on_the_other_lanes():
    fed, privacy = federation(), Privacy(noise=1.0)
    plans = [plan(len(fed.clients[0].train), 8, 1, privacy)] * 2
    both = PoissonBatches(fed, [0, 0], plans, Repeatable([("a",), ("b",)]), torch.float32)
    one = PoissonBatches(fed, [0], plans[:1], Repeatable([("b",)]), torch.float32)
    batch, alone = both(3, torch.arange(2)), one(3, torch.arange(1))
    assert batch.images[batch.counts[0] :].equal(alone.images)
    assert batch.keys[batch.counts[0] :].equal(alone.keys)


def test_a_sample_keeps_its_dropout_whoever_else_is_drawn():
    """Else leaving a sample out would change the gradients of others by more than the clipping bounds."""
    fed = federation()
    whole = Sampling(len(fed.clients[0].train), 1.0, 40, 1)
    randomness = Repeatable([("a",)])
    everyone = PoissonBatches(fed, [0], [whole], randomness, torch.float32)(0, torch.arange(1))
    some = PoissonBatches(fed, [0], [Sampling(whole.samples, 0.3, 40, 1)], randomness, torch.float32)
    batch = some(0, torch.arange(1))
    assert 0 < len(batch.keys) < len(everyone.keys)
    assert set(batch.keys.tolist()) <= set(everyone.keys.tolist())


def test_nobody_drawn_is_a_batch_too():
    fed = federation()
    none = Sampling(len(fed.clients[0].train), 0.0, 8, 1)
    batch = PoissonBatches(fed, [0], [none], Secret(torch.device("cpu")), torch.float32)(0, torch.arange(1))
    assert batch.counts == (0,)
    assert not len(batch.images)
