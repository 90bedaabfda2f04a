"""FedProx: FedAvg whose local training is held back by a proximal term.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. (2) and Algorithm 2:

    θ ← θ − η (∇L_m(θ) + μ (θ − w))          at each sampled client, from w
    w ← mean_m θ_m                           at the server
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class FedProx:
    mu: float = field(default=0.1, metadata={"grid": (0.1, 1.0)})  # μ

    parts: ClassVar[Parts] = Parts()

    def __post_init__(self) -> None:
        not_negative(self, "mu")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), State()

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        return trainer.sgd(repeat(w, len(trainer.clients)), pull=(w, self.mu)), kept

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        return state, server.mean(theta)

    def personal(self, w: State, kept: State) -> State:
        return w
