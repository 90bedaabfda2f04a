"""APFL: a personal model mixed into the global one.

Deng et al., "Adaptive Personalized Federated Learning", arXiv 2020, Algorithm 1 (Local Descent APFL). A client
holds its local version w_m of the global model and a model v_m of its own, and predicts with the mixture
`v̄_m = α v_m + (1 − α) w_m`. On every mini-batch, from w_m = w and its own v_m:

    w_m ← w_m − η ∇L_m(w_m)
    v_m ← v_m − η α ∇L_m(v̄_m)                         the gradient by v_m, of the mixture before this step
    α   ← α − η ⟨v_m − w_m, ∇L_m(v̄_m)⟩, into [0, 1]     where α is adaptive (section 4.2)
    w   ← mean_m w_m                                  at the server

The paper writes the update of α for an iteration; its authors' code does it once a round. Here it is every step.
Running statistics: v_m carries those of the mixture, which starts a round as v̄_m does, in parts α and 1 − α.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..client.trainer import Trainer
from ..lanes import Gradient, LaneModel, State, join, mix, part, repeat, scale
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class APFL:
    alpha: float = field(default=0.5, metadata={"grid": (0.1, 0.3, 0.5, 0.7)})  # α, at the start where adaptive
    adaptive: bool = False

    parts: ClassVar[Parts] = Parts(copies=2, own_step=True)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], not {self.alpha}")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        first = model.initial()
        share = State({"alpha": torch.full_like(next(iter(first.params.values())).flatten(1)[:, :1], self.alpha)})
        return State(), first, join(v=first, w=first, own=share)

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        rate = trainer.options.lr
        w, v, own = repeat(w, kept.lanes), part(kept, "v"), part(kept, "own")
        v = State(v.params, mix(v, w, own.params["alpha"]).buffers)

        def step(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
            w, v, alpha = *states[:2], states[2].params["alpha"]
            local, trained = gradient(w)
            mixture, seen = gradient(State(mix(v, w, alpha).params, v.buffers))
            new_w = {n: p - rate * local[n] if n in local else p for n, p in w.params.items()}
            new_v = {n: p - scale(mixture[n], rate * alpha) if n in mixture else p for n, p in v.params.items()}
            if self.adaptive:
                slopes = [((v.params[n] - w.params[n]) * g).flatten(1).sum(1) for n, g in mixture.items()]
                alpha = (alpha - rate * torch.stack(slopes).sum(0).unsqueeze(1)).clamp(0, 1)
            return State(new_w, trained.buffers), State(new_v, seen.buffers), State({"alpha": alpha})

        w, v, own = trainer.loop((w, v, own), step, key=(self, rate))
        return w, join(v=v, w=w, own=own)

    def server_update(self, server: Server, state: State, w: State) -> tuple[State, State]:
        return state, server.mean(w)

    def personal(self, w: State, kept: State) -> State:
        v, alpha = part(kept, "v"), part(kept, "own").params["alpha"]
        return State(mix(v, part(kept, "w"), alpha).params, v.buffers)
