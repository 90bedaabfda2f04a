"""FedAvg+FT: FedAvg, then every client fine-tunes the global model on its own data, once, at the end.

Wang et al., "Federated Evaluation of On-device Personalization", arXiv 2019; Yu et al., "Salvaging Federated
Learning by Local Adaptation", arXiv 2020. Rounds as in FedAvg (Algorithm 1 of McMahan et al.); then

    v ← v − η ∇L_m(v)          at EVERY client, from w; v_m stays with the client
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class FedAvgFT:
    personal_epochs: int = 0  # of the fine-tuning; 0: as Train.epochs
    personal_lr: float = 0.0  # of the fine-tuning; 0: as train.lr

    parts: ClassVar[Parts] = Parts()

    def __post_init__(self) -> None:
        not_negative(self, "personal_epochs", "personal_lr")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), State()

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        return trainer.sgd(repeat(w, len(trainer.clients))), kept

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        return state, server.mean(theta)

    def finish(self, trainer: Trainer, w: State, kept: State) -> State:
        v = repeat(w, len(trainer.clients))
        return trainer.sgd(v, lr=self.personal_lr or None, epochs=self.personal_epochs or None)

    def personal(self, w: State, v: State) -> State:
        return v if v.lanes else w  # nothing is kept before the last stage
