"""DP-SGD's gradient (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1), on lanes.

    g ← (Σ_i g_i · min(1, C / ‖g_i‖) + N(0, σ²C²)) / B        over the samples i that were drawn

B is a public constant, the expected batch: a number that depends on the draw would say something about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lanes import Gradient, Group, Samples, State, Way, exact_products, sample_gradients, sent, trained_names
from .randomness import Randomness

MOST_LOSS = 1e6  # of a sample: a sum of larger ones might overflow, and a lane that fails would tell of its samples


@dataclass(frozen=True)
class Mechanism:
    """Computes private gradients: what `lanes.sgd` takes as `slopes_of`."""

    noise: float  # σ
    clip: float  # C
    batch: int  # B
    randomness: Randomness
    way: Way

    @torch.no_grad()
    def __call__(self, gradient: Gradient, state: State, of: Group | None = None) -> tuple[dict[str, Tensor], State]:
        """Returns the lanes' noisy gradients with weight decay, and the state as it was."""
        batch, model = gradient.batch, gradient.model
        assert isinstance(batch, Samples)
        sums = {n: torch.zeros_like(state.params[n]) for n in trained_names(model, state, of)}
        losses = torch.zeros(len(batch.counts), dtype=next(iter(sums.values())).dtype, device=model.device)
        for piece in sample_gradients(model, state, batch, gradient.loss, self.way, of):
            with exact_products(model.compute):
                factors = clipping(piece.squares(losses.dtype), self.clip)
                each = piece.losses.to(losses.dtype).nan_to_num(0.0, 0.0, 0.0).clamp(-MOST_LOSS, MOST_LOSS)
                if piece.present is not None:
                    factors, each = factors * piece.present, each * piece.present
                losses.index_add_(0, piece.owner, each)
                piece.add_to(sums, factors)
        gradient.losses = losses / sent(torch.tensor(batch.counts).clamp_min(1), model.device)
        noise = self.randomness.normal(list(sums.values()), batch.lanes, batch.step)
        grads = {
            n: (s + self.noise * self.clip * z) / self.batch for (n, s), z in zip(sums.items(), noise, strict=True)
        }
        if decay := gradient.options.weight_decay:
            grads = {n: g + decay * state.params[n] for n, g in grads.items()}
        return grads, state


def clipping(squares: Tensor, bound: float) -> Tensor:
    """Returns the factors that bring norms down to the bound, of their squares; 0 for one that is not finite."""
    return torch.where(squares.isfinite(), (bound / squares.sqrt().clamp_min(1e-30)).clamp_max(1.0), 0.0)
