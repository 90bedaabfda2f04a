"""FedAvg: one global model, averaged over the clients' local training.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1: `θ ← θ − η ∇L_m(θ)` from w at each sampled client, `w ← mean_m θ_m` at the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..distill import Server
from ..lanes import LaneModel, State, mean, repeat
from ..trainer import Trainer


@dataclass(frozen=True)
class FedAvg:
    adapters: ClassVar[bool] = False
    distils: ClassVar[bool] = False
    trains: ClassVar[str] = "full"
    copies: ClassVar[int] = 1
    shares: ClassVar[str | None] = "full"
    withholds: ClassVar[str | None] = None

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return model.initial(), model.initial(), State()

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        return trainer.sgd(repeat(w, len(trainer.clients))), kept

    def server_update(self, server: Server, w: State, theta: State) -> tuple[State, State]:
        w = mean(theta, server.weights)
        return w, w

    def personal(self, w: State, kept: State) -> State:
        return w
