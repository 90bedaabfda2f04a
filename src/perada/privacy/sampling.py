"""What is drawn under differential privacy, as the accountant needs it. `draws.py` makes the draws."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.batches import steps_of
from .options import Privacy


@dataclass(frozen=True)
class Sampling:
    """Draws without memory: each of `samples` takes part in a step with `probability`, independently of the others.

    If more than `most` come, a uniformly random subset of `most` stays. This is the sampling of
    `dp_accounting.TruncatedSubsampledGaussianDpEvent`; where `most` equals `samples` nothing is ever left out.
    """

    samples: int
    probability: float
    most: int
    steps: int  # noisy steps: of one training (one copy) in one round, or, at level client, of all rounds


def plan(samples: int, batch: int, epochs: int, privacy: Privacy) -> Sampling:
    """Returns the draws of one training of one copy in one round, by a client with so many samples."""
    most = min(samples, privacy.capacity(batch))
    return Sampling(samples, min(1.0, batch / samples), most, steps_of(samples, batch, epochs))


def cohort_plan(clients: int, cohort: int, rounds: int, privacy: Privacy) -> Sampling:
    """Returns the draws of clients over all rounds, at level `client`. A cohort of 0 is all of them, every round."""
    return Sampling(clients, min(1.0, (cohort or clients) / clients), clients, rounds)
