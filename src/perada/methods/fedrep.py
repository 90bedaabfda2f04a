"""FedRep: one representation for all, every client its own head; many head updates, then few of the representation.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.
With φ the representation and h_m the head of client m:

    h ← h − η ∇_h L_m(φ, h)          τ_h updates from its own h_m, φ fixed; h_m stays with the client
    φ ← φ − η ∇_φ L_m(φ, h)          then the representation, the new head fixed
    φ ← mean_m φ_m                   at the server

The paper trains the head to near its optimum and the representation for little (its experiments: ten epochs,
then one or five): so here Train.epochs are the head's, and the representation gets one.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, divide, merge, repeat
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class FedRep:
    personal_epochs: int = 0  # of the head; 0: as Train.epochs
    personal_lr: float = 0.0  # of the head; 0: as train.lr
    shared_epochs: int = 1  # of the representation

    parts: ClassVar[Parts] = Parts(withholds="output")

    def __post_init__(self) -> None:
        not_negative(self, "personal_epochs", "personal_lr")
        if self.shared_epochs < 1:
            raise ValueError(f"shared_epochs must be at least 1, not {self.shared_epochs}")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        head, phi = divide(model.initial(), model.group("output"))
        return State(), phi, head

    def client_update(self, trainer: Trainer, phi: State, head: State) -> tuple[State, State]:
        own, rest = trainer.model.group("output"), trainer.model.group("feature_extractor")
        lanes = merge(repeat(phi, head.lanes), head)
        lanes = trainer.sgd(lanes, of=own, lr=self.personal_lr or None, epochs=self.personal_epochs or None)
        lanes = trainer.sgd(lanes, of=rest, epochs=self.shared_epochs)
        head, phi = divide(lanes, own)
        return phi, head

    def server_update(self, server: Server, state: State, phi: State) -> tuple[State, State]:
        return state, server.mean(phi)

    def personal(self, phi: State, head: State) -> State:
        return merge(repeat(phi, head.lanes), head)
