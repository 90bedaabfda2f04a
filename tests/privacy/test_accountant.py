"""ε of counts of steps: known numbers, the library's own accountants, and what must hold of any accountant."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from perada.errors import InputError
from perada.privacy.accountant import Accountant, Step, _divergences, _grid, _orders, epsilon, solve

dp = pytest.importorskip("dp_accounting")
from dp_accounting import pld, rdp  # noqa: E402
from scipy.integrate import trapezoid  # noqa: E402
from scipy.stats import binom, norm  # noqa: E402

DELTA = 1e-5
POISSON = Step(10**6, 0.04, 10**6, 1.5)
CROWDED = Step(2250, 64 / 2250, 96, 1.0)


def test_known_numbers_of_poisson_sampling() -> None:
    assert epsilon({POISSON: 2250}, DELTA) == pytest.approx(6.769, abs=1e-3)
    assert epsilon({POISSON: 2250}, DELTA, "rdp") == pytest.approx(7.329, abs=1e-3)


def test_known_numbers_of_truncated_sampling() -> None:
    plain = Step(CROWDED.samples, CROWDED.probability, CROWDED.samples, CROWDED.noise)
    assert epsilon({CROWDED: 3520}, DELTA) == pytest.approx(11.710, abs=1e-3)
    assert epsilon({plain: 3520}, DELTA) == pytest.approx(11.668, abs=1e-3)


@pytest.mark.parametrize(("step", "count"), [(Step(70, 16 / 70, 32, 2.0), 40), (Step(40, 1.0, 40, 3.0), 12)])
def test_it_is_what_the_library_says_on_a_finer_grid(step: Step, count: int) -> None:
    counter = pld.PLDAccountant()
    event = dp.TruncatedSubsampledGaussianDpEvent(step.samples, step.probability, step.most, step.noise)
    counter.compose(event, count)
    exact = counter.get_epsilon(DELTA)
    assert exact - 1e-6 <= epsilon({step: count}, DELTA) <= exact + 2e-3


@pytest.mark.parametrize("step", [Step(10**5, 0.01, 10**5, 20.0), Step(10**5, 0.001, 10**5, 5.0)])
def test_small_losses_get_a_finer_grid(step: Step) -> None:
    assert epsilon({step: 5000}, DELTA) <= epsilon({step: 5000}, DELTA, "rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_steps_cost_more_and_no_steps_nothing(accountant: Accountant) -> None:
    step = Step(70, 16 / 70, 32, 1.5)
    costs = [epsilon({step: count}, DELTA, accountant) for count in range(0, 40, 3)]
    assert costs[0] == 0
    assert costs == sorted(set(costs))
    assert epsilon({step: 30, CROWDED: 1}, DELTA, accountant) > epsilon({step: 30}, DELTA, accountant)
    assert epsilon({step: 30}, 1e-6, accountant) > epsilon({step: 30}, 1e-4, accountant)


@pytest.mark.parametrize("step", [CROWDED, Step(70, 16 / 70, 24, 1.5)])
def test_truncation_costs_under_rdp_too_and_rdp_is_above_pld(step: Step) -> None:
    plain = Step(step.samples, step.probability, step.samples, step.noise)
    assert epsilon({step: 50}, DELTA, "rdp") > epsilon({plain: 50}, DELTA, "rdp")
    assert epsilon({step: 50}, DELTA, "rdp") >= epsilon({step: 50}, DELTA)


@pytest.mark.parametrize(("n", "q", "most"), [(6, 0.5, 3), (5, 0.3, 1), (8, 0.2, 4), (4, 0.9, 2)])
def test_rdp_of_a_truncated_draw_bounds_the_exact_divergence(n: int, q: float, most: int) -> None:
    """One sample pulls up and all others pull down, which is the worst case: integrated on a grid."""
    grid, noise, chance = np.linspace(-20, 20, 40_001), 1.0, binom(n - 1, q)

    def density(own: bool) -> np.ndarray:
        total = np.zeros_like(grid)
        for others in range(n):
            stay = min(1.0, most / (others + 1))
            for drawn, p in ((True, q), (False, 1 - q)) if own else ((False, 1.0),):
                for kept, share in ((True, stay), (False, 1 - stay)) if drawn else ((False, 1.0),):
                    sums = kept - min(others, most - kept)
                    total += chance.pmf(others) * p * share * norm.pdf(grid, sums, noise)
        return total

    both, found = (density(True), density(False)), _divergences(Step(n, q, most, noise))
    for place, order in enumerate(_orders()):
        if order <= 8:
            for one, other in (both, both[::-1]):
                inside = np.exp(order * np.log(one) + (1 - order) * np.log(other))
                exact = np.log(trapezoid(inside, grid)) / (order - 1)
                assert exact <= found[place] + 1e-9


def test_the_rdp_of_a_plain_draw_is_the_library_s() -> None:
    step, counter = Step(500, 0.1, 500, 1.2), rdp.RdpAccountant()
    counter.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.2)), 100)
    assert epsilon({step: 100}, DELTA, "rdp") == pytest.approx(counter.get_epsilon(DELTA), rel=1e-6)


def test_steps_on_different_grids_are_composed() -> None:
    """A site's ledger adds up runs with different noise; their distributions have different grids."""
    one, other = Step(2000, 0.03, 2000, 1.0), Step(2000, 0.03, 2000, 4.0)
    assert _grid(one) != _grid(other)
    alone = [epsilon({step: 100}, DELTA) for step in (one, other)]
    assert max(alone) < epsilon({one: 100, other: 100}, DELTA) < sum(alone)


def test_a_draw_that_is_always_cut_off_has_a_bound_under_rdp() -> None:
    """All samples are drawn and fewer stay, so one always takes another's place."""
    assert epsilon({Step(20, 1.0, 20, 4.0): 3}, DELTA, "rdp") < epsilon({Step(20, 1.0, 10, 4.0): 3}, DELTA, "rdp") < 40


def test_no_noise_is_no_privacy() -> None:
    assert epsilon({Step(70, 0.2, 70, 0.0): 1}, DELTA) == math.inf


def test_noise_of_a_target_is_the_least_that_keeps_it() -> None:
    def plans(noise: float) -> list[dict[Step, int]]:
        return [{Step(n, 16 / n, 32, noise): 20} for n in (60, 90)]

    noise = solve(plans, 5.0, DELTA, "pld")
    most = [max(epsilon(p, DELTA) for p in plans(s)) for s in (noise, 0.999 * noise)]
    assert most[0] <= 5.0 < most[1]


def test_a_target_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(InputError, match=r"no noise up to 10000 reaches Privacy\.target=1e-06: raise it"):
        solve(lambda noise: [{Step(10, 1.0, 10, noise): 10**6}], 1e-6, DELTA, "rdp")


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'perada\[dp\]'"):
        epsilon({Step(71, 0.3, 71, 1.0): 1}, DELTA)
