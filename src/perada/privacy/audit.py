"""An empirical lower bound on ε from one training (Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training
Run", NeurIPS 2023). It does not use the accountant, so it shows mistakes in the mechanism or in the accounting.

m canaries are each included with a fair coin. An auditor who sees the training gives each a score, and guesses
"included" for those with the highest and "not included" for those with the lowest; it abstains on the rest. If the
training is (ε, δ)-differentially private, right guesses are few: their theorem 5.2 says, for r guesses and any v,

    P[at least v are right] ≤ f(v) + 2 m δ · max_{i = 1..v} (f(v − i) − f(v)) / i,     f(v) = P[Binomial(r, q) ≥ v]

with q = e^ε / (1 + e^ε). An ε for which this is below 1 − confidence is refuted by v right guesses. The largest such ε
is the lower bound.

The canaries are those that are easiest to see (Dirac canaries): the loss of canary i is linear in parameter i alone.
So its gradient is a direction of its own, with a norm that clipping brings to C. Coordinate i of the noisy sums is all
that there is to see of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..adapters import adapt
from ..data import Client, Federation
from ..lanes import Gradient, Group, LaneModel, Options, State, repeat, sgd
from .draws import PoissonBatches
from .mechanism import Mechanism
from .randomness import Randomness
from .sampling import Sampling

Numbers = NDArray[np.float64]
STEEP = 10.0  # the norm of a canary's gradient before clipping, in units of C
BISECTIONS, MOST = 40, 40.0


# The bound


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Returns how likely so many right guesses are at most, of a training that is (ε, δ)-differentially private."""
    from scipy.stats import binom

    q = 1 / (1 + math.exp(-epsilon))
    steps = np.arange(1, right + 1)
    between = np.cumsum(binom.pmf(right - steps, guesses, q))  # f(v − i) − f(v)
    more = float((between / steps).max()) if right else 0.0
    return min(1.0, float(binom.sf(right - 1, guesses, q)) + 2 * canaries * delta * more)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """Returns the largest ε that so many right guesses refute; 0 if they refute none."""
    low, high = 0.0, MOST
    if p_value(canaries, guesses, right, low, delta) > 1 - confidence:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        refuted = p_value(canaries, guesses, right, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def audit(included: NDArray[np.bool_], scores: Numbers, guesses: int, delta: float, confidence: float = 0.95) -> float:
    """Returns the lower bound on ε from scores, with half of the guesses at each end.

    guesses: to be chosen before the scores are seen.
    """
    order, half = np.argsort(scores), guesses // 2
    right = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
    return lower_bound(len(included), 2 * half, right, delta, confidence)


# The canaries


class _Line(nn.Module):
    """The loss of an image is its product with the weights."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.head = nn.Linear(pixels, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images[:, 0].flatten(1))  # type: ignore[no-any-return]


def _steep(logits: Tensor, targets: Tensor) -> Tensor:
    return STEEP * logits[..., 0]


@dataclass(frozen=True)
class Canaries:
    """Clients whose samples are canaries, `side²` each. One that is not included is a blank image, without gradient.

    So clients keep their number of samples, and a canary's place in the data does not depend on the others' coins.
    """

    clients: int
    side: int
    seed: int = 0

    @property
    def each(self) -> int:
        """Canaries per client."""
        return self.side**2

    @cached_property
    def included(self) -> NDArray[np.bool_]:
        """The coins, `[clients, each]`."""
        return np.random.default_rng(self.seed).random((self.clients, self.each)) < 0.5

    @cached_property
    def federation(self) -> Federation:
        """The clients. Image i has its i-th pixel lit, and the last image is blank."""
        none = np.zeros(0, np.int64)
        lit = torch.cat([255 * torch.eye(self.each, dtype=torch.uint8), torch.zeros(1, self.each, dtype=torch.uint8)])
        rows = np.where(self.included, np.arange(self.each), self.each)
        clients = tuple(Client(f"client-{k}", row, none, none) for k, row in enumerate(rows))
        images, targets = lit.view(-1, 1, self.side, self.side), torch.zeros(self.each + 1, dtype=torch.int64)
        return Federation("canaries", images, targets, ("canary",), clients, (0.0,), (1.0,))

    @cached_property
    def model(self) -> LaneModel:
        return adapt(_Line(self.each), adapter=None, trained="full").to("cpu", torch.float32)

    def updates(self, slopes: Mechanism, plan: Sampling, randomness: Randomness) -> Numbers:
        """Returns what one training of every client shows of each canary: `[steps, clients, each]`, in units of C.

        The gradients are added to the weights as in any training; these are the numbers that the weights move by.
        """
        seen, owners = np.zeros((plan.steps, self.clients, self.each)), range(self.clients)

        def watched(gradient: Gradient, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
            grads, state = slopes(gradient, state, of)
            batch, (grad,) = gradient.batch, grads.values()
            rows = list(batch.lanes)  # type: ignore[attr-defined]
            seen[batch.step, rows] = grad.flatten(1).double().numpy()  # type: ignore[attr-defined]
            return grads, state

        batches = PoissonBatches(self.federation, owners, [plan] * self.clients, randomness, torch.float32)
        start, rates, steps = (
            repeat(self.model.initial(), self.clients),
            [0.1] * self.clients,
            [plan.steps] * self.clients,
        )
        sgd(self.model, start, batches, _steep, rates, steps, options=Options(norm="running"), slopes_of=watched)
        return seen * slopes.batch / slopes.clip


# The attacks


def likelihood(updates: Numbers, noise: float, probability: float) -> Numbers:
    """Returns per canary how much likelier its numbers are if it is included, for secret Poisson draws.

    The log likelihood ratio is the best score there is; σ and q are those that the accountant is told.
    """
    power = (updates - 0.5) / noise**2
    with np.errstate(over="ignore"):
        each = np.logaddexp(math.log1p(-probability) if probability < 1 else -np.inf, math.log(probability) + power)
    total: Numbers = each.sum(0)
    return total.reshape(-1)


def known_order(updates: Numbers, steps: NDArray[np.int64]) -> Numbers:
    """Returns per canary the sum of its numbers in the steps in which its place would be drawn, if the order is known.

    steps: `[clients, each]`, the step of each place.
    """
    chosen: Numbers = np.take_along_axis(updates, steps[None], 0)[0]
    return chosen.reshape(-1)
