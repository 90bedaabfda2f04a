"""FedAvg: one global model, averaged over the clients' local training.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1:

    θ ← θ − η ∇L_m(θ)          at each sampled client, E epochs from w
    w ← mean_m θ_m             at the server; the paper weighs clients by n_m: Train.weighting="samples"
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class FedAvg:
    parts: ClassVar[Parts] = Parts(private=True)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), State()

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        return trainer.sgd(repeat(w, len(trainer.clients))), kept

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        return state, server.mean(theta)

    def personal(self, w: State, kept: State) -> State:
        return w
