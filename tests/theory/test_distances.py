"""The estimators of Theorems 1 and 2 against answers that are known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from perada.theory.distances import (
    advantage,
    distillation_distance,
    error,
    hoeffding,
    label_variation,
    mean_of_probabilities,
    prediction_distance,
    rademacher,
    risk,
    softmax_of_mean,
    surrogate,
)


def gaussians(apart: float, n: int = 2000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    one, other = draw.normal(size=(2, n, 3)).astype(np.float32)
    other[:, 0] += apart
    return one, other


@pytest.mark.parametrize("apart", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_two_gaussians_with_known_variation_and_divergence(apart: float) -> None:
    """The best set of all is a half-space here, so H-divergence is 2 TV, and TV is 2 F(distance/2) − 1."""
    known = 2 * norm.cdf(apart / 2) - 1
    found = advantage(*gaussians(apart))
    assert found.value == pytest.approx(known, abs=0.04)
    assert found.low <= known
    assert found.low > known - 0.15
    assert found.samples == (2000, 2000)


def test_a_sample_of_unequal_sizes_is_no_easier_to_tell() -> None:
    """A classifier that always names the larger sample has no advantage."""
    one, other = gaussians(0.0)
    assert advantage(one, other[:100]).value < 0.1


def test_the_low_estimate_fails_as_rarely_as_it_says() -> None:
    known = 2 * norm.cdf(0.5) - 1
    assert sum(advantage(*gaussians(1.0, n=100, seed=s), delta=0.2).low > known for s in range(30)) <= 6


def test_phi_is_zero_for_a_student_that_equals_the_ensemble() -> None:
    logits = 3 * torch.randn(5, 40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ensemble = mean_of_probabilities(logits)
    assert distillation_distance(ensemble, ensemble) == 0
    perfect = softmax_of_mean(logits)  # what the distillation aims at
    assert distillation_distance(perfect, softmax_of_mean(logits)) == 0
    assert distillation_distance(perfect, ensemble) > 0.1, "averages of logits and of probabilities differ"
    alike = logits[:1].expand(5, -1, -1)
    assert distillation_distance(softmax_of_mean(alike), mean_of_probabilities(alike)) < 1e-12


def test_distances_by_hand() -> None:
    g = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    p = torch.tensor([[[0.6, 0.4], [0.0, 1.0]], [[0.5, 0.5], [0.9, 0.1]]], dtype=torch.float64)
    assert distillation_distance(g, p[0]) == pytest.approx((0.2 + 2.0) / 2)
    assert prediction_distance(p, g).tolist() == pytest.approx([(0.2 + 1.0) / 2, (0.0 + 0.2) / 2])
    labels = torch.tensor([0, 1])
    assert risk(p, labels).tolist() == pytest.approx([(0.4 + 0.0) / 2, (0.5 + 0.9) / 2])
    assert error(p, labels).tolist() == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_lemma_holds_for_probability_vectors(classes: int) -> None:
    draw = torch.Generator().manual_seed(classes)
    for sharpness in (0.1, 1.0, 10.0):
        vectors = (sharpness * torch.randn(2000, classes, generator=draw, dtype=torch.float64)).softmax(-1)
        labels = torch.randint(classes, (2000,), generator=draw)
        left, right = surrogate(vectors, labels)
        assert (left >= right).all()
        assert right.sum() > 0, "the lemma is not tested by vectors that are always right"
    tight, wrong = surrogate(torch.tensor([[0.5 + 1e-9, 0.5 - 1e-9]], dtype=torch.float64), torch.tensor([1]))
    assert tight.item() == pytest.approx(1.0, abs=1e-6)
    assert wrong.item() == 1


@pytest.mark.parametrize("vector", [[0.9, 0.8], [3.0, 2.0]])
def test_the_lemma_fails_for_other_vectors(vector: list[float]) -> None:
    """The paper states it for any real vector: entries in [0, 1] whose sum is above 1 are enough to break it."""
    left, right = surrogate(torch.tensor([vector], dtype=torch.float64), torch.tensor([1]))
    assert left.item() < right.item()


def test_hoeffding_covers_and_is_not_wasteful() -> None:
    draw = np.random.default_rng(1)
    off = np.abs(draw.binomial(50, 0.5, 4000) / 50 - 0.5)
    assert (off > hoeffding(50, 0.1)).mean() <= 0.1
    assert (off > hoeffding(50, 0.1) / 2).mean() > 0.1
    assert hoeffding(50, 0.1, sides=1) < hoeffding(50, 0.1)


def supremum(signs: np.ndarray, functions: np.ndarray) -> float:
    """The mean over all signs of the largest correlation: the definition of the complexity."""
    return float((signs @ functions.T).max(1).mean() / functions.shape[1])


def test_rademacher_bounds_the_complexity_of_known_classes() -> None:
    n = 10
    signs = np.array(list(itertools.product((-1, 1), repeat=n)))
    steps = np.array([[i >= t for i in range(n)] for t in range(n + 1)], float)  # thresholds: dimension 1
    assert supremum(signs, steps) <= rademacher(1, n)
    every = np.array(list(itertools.product((0, 1), repeat=n)), float)  # fits any labels
    assert supremum(signs, every) == pytest.approx(0.5)
    assert rademacher(n, n) == rademacher(10**6, n) == 0.5
    assert rademacher(3, 10**6) < 0.02


def test_label_variation_by_hand_and_from_above() -> None:
    value, high = label_variation(np.array([30, 10, 0]), np.array([10, 10, 20]), delta=0.05)
    assert value == pytest.approx(0.5)
    assert high > value
    draw = np.random.default_rng(0)
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    known, fails = float(np.abs(p - q).sum() / 2), 0
    for _ in range(200):
        one, other = draw.multinomial(60, p), draw.multinomial(400, q)
        fails += label_variation(one, other, delta=0.2)[1] < known
    assert fails <= 40
    assert label_variation(np.array([10**7, 0]), np.array([0, 10**7]), 0.05)[1] == 1.0
    assert math.isclose(label_variation(np.array([10**9, 10**9]), np.array([10**9, 10**9]), 0.05)[1], 0, abs_tol=1e-3)
