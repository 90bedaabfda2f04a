"""Differential privacy of whole clients (McMahan et al., "Learning Differentially Private Recurrent Language Models",
ICLR 2018): the server clips every upload's change, adds noise to their sum and divides by a public constant.

    w ← w + (Σ_m Δ_m · min(1, C / ‖Δ_m‖) + N(0, σ²C²)) / cohort        with Δ_m = θ_m − w

Clients take part by Poisson sampling, so their number differs from round to round. A round without any adds the noise
alone: a model that stayed as it was would tell that nobody took part.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from ..lanes import State, like, rng_of
from ..privacy import Privacy, cohort_plan
from ..privacy.randomness import Randomness, drawn, randomness_of, secret_generator
from .aggregate import distances, shrink


class ClientPrivacy:
    """The draws and the noise of one training. `cohort` is the expected number of clients in a round; 0 is all."""

    def __init__(self, privacy: Privacy, cohort: int, seed: int) -> None:
        self.privacy, self.cohort, self.seed = privacy, cohort, seed
        self._drawn: dict[int, list[int]] = {}  # the last rounds' clients: what is secret is drawn once

    def sampled(self, clients: int, round: int) -> list[int]:
        """Returns who takes part in a round: each client independently of the others."""
        if round not in self._drawn:
            draw = rng_of(self.seed, round, "cohort") if self.privacy.deterministic else secret_generator()
            before = {r: names for r, names in self._drawn.items() if r == round - 1}
            self._drawn = {**before, round: drawn(draw, cohort_plan(clients, self.cohort, 1, self.privacy)).tolist()}
        return self._drawn[round]

    def mean(self, uploads: State, broadcast: State, clients: int, round: int, inert: Container[str]) -> State:
        """Returns the noisy mean of a round's uploads; clients: how many there are, sampled or not."""
        device = next(iter(broadcast.tensors())).device
        randomness = randomness_of(self.privacy, device, [(self.seed, round, "clients")])
        return private_mean(uploads, broadcast, self.privacy, self.cohort or clients, randomness, inert)


@torch.no_grad()
def private_mean(
    uploads: State,
    broadcast: State,
    privacy: Privacy,
    cohort: int,
    randomness: Randomness,
    inert: Container[str] = (),
) -> State:
    """Returns what the server makes of the uploads, as one lane.

    broadcast: one lane, what the clients trained from. cohort: how many clients are expected. inert: parameters that no
    client changes. Running statistics stay as they were, because no noise is added to them.
    """
    names = [n for n in sorted(broadcast.params) if n not in inert]
    old = {n: broadcast.params[n] for n in names}
    noise = randomness.normal(list(old.values()), (0,), 0)
    sums = {n: privacy.noise * privacy.clip * z for n, z in zip(names, noise, strict=True)}
    if uploads.lanes:
        far = distances(uploads.params, old, names)
        factors = shrink(far, torch.tensor(privacy.clip, dtype=far.dtype, device=far.device))
        factors = torch.where(far.isfinite(), factors, 0.0)
        for name in names:
            moves = uploads.params[name] - old[name]
            shorter = (moves * like(factors.to(moves.dtype), moves)).nan_to_num(0.0, 0.0, 0.0)
            sums[name] = sums[name] + shorter.sum(0, keepdim=True)
    return State({**broadcast.params, **{n: old[n] + s / cohort for n, s in sums.items()}}, dict(broadcast.buffers))
