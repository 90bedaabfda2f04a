"""Ditto: FedAvg, and for each client a personal model pulled towards the global one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1: `min_v L_m(v) + λ/2 ‖v − w*‖²` with w* the global optimum. For each sampled client m:

    v ← v − η_p (∇L_m(v) + λ (v − w))        from v_m, which stays with the client
    θ ← θ − η_l ∇L_m(θ)                      from w; θ_m is uploaded
    w ← mean_m θ_m                           at the server
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat, split, stack
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class Ditto:
    lam: float = field(default=1.0, metadata={"grid": (0.1, 1.0)})  # λ
    personal_epochs: int = 0  # 0: as Train.epochs
    personal_lr: float = 0.0  # η_p; 0: as train.lr

    parts: ClassVar[Parts] = Parts(copies=2, private=True)

    def __post_init__(self) -> None:
        not_negative(self, "lam", "personal_epochs", "personal_lr")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), model.initial()

    def client_update(self, trainer: Trainer, w: State, v: State) -> tuple[State, State]:
        lanes = trainer.sgd(
            stack(v, repeat(w, v.lanes)),
            pull=(w, (self.lam, 0.0)),
            lr=(self.personal_lr or trainer.options.lr, trainer.options.lr),
            epochs=(self.personal_epochs or trainer.options.epochs, trainer.options.epochs),
        )
        v, theta = split(lanes, 2)
        return theta, v

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        return state, server.mean(theta)

    def personal(self, w: State, v: State) -> State:
        return v
