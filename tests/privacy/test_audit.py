"""The audit: its bound holds, and it finds bugs that are put into the mechanism."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from perada.lanes import Way
from perada.privacy.audit import Canaries, audit, likelihood, lower_bound, p_value
from perada.privacy.mechanism import Mechanism
from perada.privacy.randomness import Repeatable
from perada.privacy.sampling import Sampling

pytest.importorskip("dp_accounting")
FILE = Path(__file__).parents[2] / "benchmarks" / "audit.py"
spec = importlib.util.spec_from_file_location("benchmark_of_audits", FILE)
assert spec is not None
assert spec.loader is not None
rule = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # the rule that was written down
spec.loader.exec_module(rule)


def test_without_delta_the_bound_is_that_of_randomised_response() -> None:
    right, guesses, epsilon = 180, 200, 1.5
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert p_value(1000, guesses, right, epsilon, 0.0) == pytest.approx(binom.sf(right - 1, guesses, q))
    least = lower_bound(1000, guesses, right, 0.0)
    assert p_value(1000, guesses, right, least, 0.0) == pytest.approx(0.05, abs=1e-6)


def test_delta_adds_what_the_theorem_says() -> None:
    canaries, guesses, right, epsilon, delta = 1000, 40, 36, 1.0, 1e-4
    q = math.exp(epsilon) / (1 + math.exp(epsilon))

    def f(v: int) -> float:
        return float(binom.sf(v - 1, guesses, q))

    more = max((f(right - i) - f(right)) / i for i in range(1, right + 1))
    wanted = f(right) + 2 * canaries * delta * more
    assert p_value(canaries, guesses, right, epsilon, delta) == pytest.approx(wanted)
    assert lower_bound(canaries, guesses, right, delta) < lower_bound(canaries, guesses, right, 0.0)


def test_guesses_by_chance_refute_nothing_and_right_ones_refute_much() -> None:
    assert lower_bound(1000, 200, 110, 1e-6) == 0
    assert lower_bound(1000, 200, 0, 1e-6) == 0
    bounds = [lower_bound(1000, 200, right, 1e-6) for right in (140, 170, 190, 200)]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 4


def test_randomised_response_is_bounded_by_its_own_epsilon() -> None:
    """200 trainings whose ε is known: the bound may be wrong in one of twenty."""
    draw, epsilon, wrong = np.random.default_rng(0), 1.0, 0
    for _ in range(200):
        included = draw.random(400) < 0.5
        honest = draw.random(400) < math.exp(epsilon) / (1 + math.exp(epsilon))
        scores = np.where(honest, included, ~included) + 0.01 * draw.random(400)
        wrong += audit(included, scores, 400, 0.0) > epsilon
    assert wrong <= 18


def test_a_canary_moves_its_own_coordinate_by_the_clipping_bound() -> None:
    canaries, plan = Canaries(2, 4), Sampling(16, 1.0, 16, 2)
    randomness = Repeatable([("canary", 0), ("canary", 1)])
    updates = canaries.updates(Mechanism(0.0, 3.0, 16, randomness, Way(8)), plan, randomness)
    assert np.allclose(updates, np.broadcast_to(canaries.included, updates.shape))
    noisy = canaries.updates(Mechanism(2.0, 3.0, 16, randomness, Way(8)), plan, randomness) - updates
    assert 1.5 < noisy.std() < 2.5


def test_the_best_score_is_the_sum_where_nobody_is_left_out() -> None:
    updates = np.random.default_rng(1).normal(size=(3, 2, 5))
    order = np.argsort(updates.sum(0).reshape(-1))
    assert (np.argsort(likelihood(updates, 1.5, 1.0)) == order).all()


@pytest.mark.parametrize("regime", rule.REGIMES)
@pytest.mark.parametrize("sigma", rule.SIGMAS)
def test_the_bound_of_the_sound_mechanism_is_below_the_accountant(regime: str, sigma: float) -> None:
    row = rule.audited(regime, sigma, coins=0)
    assert row["passes"], row


@pytest.mark.parametrize("bug", rule.BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    row = rule.audited(rule.BUGS[bug], rule.PLANTED, coins=0, bug=bug)
    assert not row["passes"], row
