"""Audits DP-SGD: an empirical lower bound on ε, for the mechanism as it is and with planted bugs.

    python benchmarks/audit.py [--out benchmarks/audit.json]

The rule, written before the mechanism was audited (19 November 2026; numbers of canaries and guesses were chosen on
made-up Gaussian numbers, without the mechanism):

1. 50 clients have 1,024 canaries each, so m = 51,200. δ = 1e-6. 400 guesses, half at each end. Confidence 95%.
2. Two regimes: `full` (every sample in the one step) and `sampled` (50 steps, q = 0.02: amplification makes it cheap).
3. Every training is attacked twice, each with 97.5%: by the likelihood ratio of secret Poisson draws, and as if batches
   followed the order that the library's plain training would have, which whoever knows the run's seed knows.
   The greater of the two bounds counts.
4. A training passes if the bound is at most the accountant's ε. Sound: σ = 0.8, 1, 1.5 in both regimes, two seeds of
   coins.
5. Planted bugs, σ = 1.5, two seeds: gradients that are not clipped and half the noise in `full`; batches of fixed size,
   in the order of the run's seed, accounted as Poisson draws in `sampled`. Each must fail, with both seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from perada.lanes import Gradient, Group, State, rng_of
from perada.lanes.ways import way_for
from perada.privacy.accountant import Step, epsilon
from perada.privacy.audit import Canaries, audit, known_order, likelihood
from perada.privacy.mechanism import Mechanism
from perada.privacy.randomness import Randomness, Repeatable, Secret
from perada.privacy.sampling import Sampling

CLIENTS, SIDE, DELTA, GUESSES, CONFIDENCE, RUN_SEED = 50, 32, 1e-6, 400, 0.95, 0
REGIMES = {"full": (1.0, 1), "sampled": (0.02, 50)}  # q, steps
SIGMAS, COINS, PLANTED = (0.8, 1.0, 1.5), (0, 1), 1.5
BUGS = {"no clipping": "full", "half the noise": "full", "fixed-size batches": "sampled"}


class Unclipped(Mechanism):
    """A planted bug: gradients keep their length."""

    def __call__(self, gradient: Gradient, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
        with patch("perada.privacy.mechanism.clipping", lambda squares, bound: torch.ones_like(squares)):
            return super().__call__(gradient, state, of)


@dataclass(frozen=True)
class FixedSize:
    """A planted bug: batches of one size, permutation after permutation, in the order of the run's seed."""

    noise: Randomness

    def positions(self, lane: int, step: int, plan: Sampling) -> np.ndarray:
        batch = math.ceil(plan.samples * plan.probability)
        return order(lane, plan)[step * batch : (step + 1) * batch]

    def key(self, lane: int) -> int:
        return self.noise.key(lane)

    def normal(self, like: list[Tensor], lanes: list[int], step: int) -> list[Tensor]:
        return self.noise.normal(like, lanes, step)


def order(lane: int, plan: Sampling) -> np.ndarray:
    """Returns the order that follows from the seed."""
    return rng_of(RUN_SEED, 0, f"client-{lane}", "permutation", 0).permutation(plan.samples)


def steps_of(plan: Sampling) -> np.ndarray:
    """Returns the step of each place in that order, per client."""
    batch, steps = math.ceil(plan.samples * plan.probability), np.empty((CLIENTS, plan.samples), np.int64)
    for lane in range(CLIENTS):
        steps[lane, order(lane, plan)] = np.arange(plan.samples) // batch
    return np.minimum(steps, plan.steps - 1)


def audited(regime: str, sigma: float, coins: int, bug: str = "", secret: bool = False) -> dict[str, object]:
    """Returns the accountant's ε and the audit's lower bound for one training."""
    probability, steps = REGIMES[regime]
    canaries = Canaries(CLIENTS, SIDE, coins)
    plan = Sampling(canaries.each, probability, canaries.each, steps)
    keys = [("audit", coins, lane) for lane in range(CLIENTS)]
    randomness: Randomness = Secret(torch.device("cpu")) if secret else Repeatable(keys)
    if bug == "fixed-size batches":
        randomness = FixedSize(randomness)
    kind = Unclipped if bug == "no clipping" else Mechanism
    batch = max(1, round(canaries.each * probability))
    slopes = kind(
        sigma / 2 if bug == "half the noise" else sigma, 1.0, batch, randomness, way_for(canaries.model, (SIDE, SIDE))
    )
    updates, included = canaries.updates(slopes, plan, randomness), canaries.included.reshape(-1)
    each = 1 - (1 - CONFIDENCE) / 2
    bounds = [
        audit(included, scores, GUESSES, DELTA, each)
        for scores in (likelihood(updates, sigma, probability), known_order(updates, steps_of(plan)))
    ]
    accounted = epsilon({Step.of(plan, sigma): steps}, DELTA)
    return {
        "regime": regime,
        "sigma": sigma,
        "coins": coins,
        "bug": bug,
        "epsilon": round(accounted, 4),
        "bound": round(max(bounds), 4),
        "passes": max(bounds) <= accounted,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--secret", action="store_true", help="noise that nobody can repeat, instead of a fixed seed's")
    options = parser.parse_args()
    rows = [
        audited(regime, sigma, coins, secret=options.secret)
        for regime in REGIMES
        for sigma in SIGMAS
        for coins in COINS
    ]
    rows += [audited(regime, PLANTED, coins, bug, options.secret) for bug, regime in BUGS.items() for coins in COINS]
    for row in rows:
        print(
            "{regime:8} σ {sigma:<4} coins {coins}  ε {epsilon:6.3f}  bound {bound:6.3f}  {0}  {bug}".format(
                "passes" if row["passes"] else "CAUGHT", **row
            )
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["passes"] != bool(row["bug"]) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
