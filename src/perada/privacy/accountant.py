"""What noisy steps cost: ε at δ, of any counts of steps. `dp_accounting` does the arithmetic.

A step is a draw of samples, the sum of their clipped gradients, and Gaussian noise on it. Neighbouring data sets differ
in one sample (one client, at level `client`), which is in one of them and not in the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ..errors import InputError
from .sampling import Sampling

Accountant = Literal["pld", "rdp"]
FINEST, COARSEST = 1e-5, 1e-3  # the grid on which a step's privacy loss is rounded up
MOST_NOISE, LEAST_NOISE = 1e4, 1e-2  # between which `solve` looks
EXACT = 1e-4  # the relative precision of the noise that `solve` returns
MISSING = "differential privacy needs dp-accounting: pip install 'perada[dp]'"


@dataclass(frozen=True, order=True)
class Step:
    """One noisy step, as the accountant sees it: the fields of `Sampling`, and σ."""

    samples: int
    probability: float
    most: int
    noise: float

    @classmethod
    def of(cls, sampling: Sampling, noise: float) -> Step:
        return cls(sampling.samples, sampling.probability, sampling.most, noise)


Steps = Mapping[Step, int]  # how many of each


def _library() -> Any:
    """Returns `dp_accounting`, which only differential privacy needs."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise InputError(MISSING) from error
    return dp_accounting


def check_installed() -> None:
    """Refuses to go on without the library, before anything is trained."""
    _library()


def epsilon(steps: Steps, delta: float, accountant: Accountant = "pld") -> float:
    """Returns ε at δ of all these steps together; 0 without any."""
    spent = tuple(sorted((step, count) for step, count in steps.items() if count))
    return _epsilon(spent, delta, accountant) if spent else 0.0


@lru_cache(maxsize=100_000)
def _epsilon(spent: tuple[tuple[Step, int], ...], delta: float, accountant: Accountant) -> float:
    if any(step.noise <= 0 for step, _ in spent):
        return math.inf
    found = _pld(spent, delta) if accountant == "pld" else _rdp(spent, delta)
    return max(0.0, float(found))


# Privacy loss distributions


def _pld(spent: Sequence[tuple[Step, int]], delta: float) -> float:
    grid = min(_grid(step) for step, _ in spent)  # distributions on different grids cannot be composed
    first, *others = (_distribution(step, grid).self_compose(count) for step, count in spent)
    for one in others:
        first = first.compose(one)
    return float(first.get_epsilon_for_delta(delta))


def _grid(step: Step) -> float:
    """Returns the power of ten that is fine enough for the privacy loss of one step."""
    usual = step.probability / step.noise  # its usual size
    return float(10.0 ** math.floor(math.log10(min(COARSEST, max(FINEST, usual / 20)))))


@lru_cache(maxsize=10_000)
def _distribution(step: Step, grid: float) -> Any:
    """Returns the privacy loss of one step, on a grid."""
    pld = _library().pld.privacy_loss_distribution
    if step.most < step.samples:
        return pld.from_truncated_subsampled_gaussian_mechanism(
            step.samples, step.probability, step.most, step.noise, value_discretization_interval=grid
        )
    return pld.from_gaussian_mechanism(step.noise, sampling_prob=step.probability, value_discretization_interval=grid)


# Rényi differential privacy


def _rdp(spent: Sequence[tuple[Step, int]], delta: float) -> float:
    rdp = _library().rdp
    orders = _orders()
    total = sum(count * _divergences(step) for step, count in spent)
    return float(rdp.compute_epsilon(orders, total, delta)[0])


def _orders() -> list[float]:
    """Returns the library's orders from 2 on: below, its series often does not converge."""
    return [float(order) for order in _library().rdp.RdpAccountant().orders if order >= 2]


@lru_cache(maxsize=10_000)
def _divergences(step: Step) -> Any:
    """Returns the Rényi divergence of one step, per order.

    `dp_accounting` has no truncated event for RDP, so this bounds it by the two cases that it consists of. Either fewer
    than `most` of the other samples come: then the step is a plain Poisson draw. Or at least `most` of them come, with
    probability p: then the sample takes the place of another, which changes the sum by up to 2 C, with the
    probability that it is drawn and stays. Which case it is does not depend on the sample, so the moments
    exp((α − 1) D_α) of the cases have the mean (1 − p, p).
    """
    from scipy.stats import binom

    dp = _library()

    def of(probability: float, noise: float) -> Any:
        counter = dp.rdp.RdpAccountant(_orders())
        counter.compose(dp.PoissonSampledDpEvent(probability, dp.GaussianDpEvent(noise)))
        return counter.rdp

    n, q, most = step.samples, step.probability, step.most
    plain = of(q, step.noise)
    crowded = float(binom.sf(most - 1, n - 1, q)) if most < n else 0.0
    if not crowded:
        return plain
    stays = float(binom.sf(most, n, q)) * most / n / crowded
    replaced = of(min(1.0, stays), step.noise / 2)
    if crowded >= 1:
        return replaced
    more = np.asarray(_orders()) - 1
    return np.logaddexp(math.log1p(-crowded) + more * plain, math.log(crowded) + more * replaced) / more


# The noise of a target


def solve(steps: Callable[[float], Sequence[Steps]], target: float, delta: float, accountant: Accountant) -> float:
    """Returns the least noise σ with which nobody's ε is above the target.

    steps: everybody's planned steps, with a given noise. Only the one who pays most is followed from noise to noise;
    in the end all are looked at, and whoever would pass the target is followed, too.
    """

    def cost(who: int, noise: float) -> float:
        return epsilon(steps(noise)[who], delta, accountant)

    def most(who: Iterable[int], noise: float) -> int:
        return max(who, key=lambda one: cost(one, noise))

    everybody = range(len(steps(1.0)))
    followed, low, high = {most(everybody, 1.0)}, LEAST_NOISE, 1.0
    while True:
        while cost(most(followed, high), high) > target:
            low, high = high, 2 * high
            if high > MOST_NOISE:
                raise InputError(
                    f"no noise up to {MOST_NOISE:g} reaches Privacy.target={target:g}: raise it, or train fewer rounds"
                )
        while high > low * (1 + EXACT):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cost(most(followed, middle), middle) > target else (low, middle)
        worst = most(everybody, high)
        if cost(worst, high) <= target:
            return high
        followed.add(worst)
