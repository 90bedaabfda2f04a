"""LG-FedAvg: every client its own feature extractor, one head for all.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", arXiv 2020,
Algorithm 1. With ℓ_m the feature extractor of client m and h the head:

    (ℓ, h) ← (ℓ, h) − η ∇L_m(ℓ, h)          from its own ℓ_m and h
    h ← mean_m h_m                          at the server; ℓ_m, running statistics too, stays with the client

The paper may share several top layers; the PerAda paper's table, and this file, share the head.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, divide, merge, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class LGFedAvg:
    parts: ClassVar[Parts] = Parts(shares="output")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        head, features = divide(model.initial(), model.group("output"))
        return State(), head, features

    def client_update(self, trainer: Trainer, head: State, features: State) -> tuple[State, State]:
        lanes = trainer.sgd(merge(repeat(head, features.lanes), features))
        head, features = divide(lanes, trainer.model.group("output"))
        return head, features

    def server_update(self, server: Server, state: State, head: State) -> tuple[State, State]:
        return state, server.mean(head)

    def personal(self, head: State, features: State) -> State:
        return merge(repeat(head, features.lanes), features)
