"""Standalone: every client trains its own full model and speaks to nobody.

    v ← v − η ∇L_m(v)          E epochs whenever the client would have been sampled

so that it spends the same client epochs as other methods.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class Standalone:
    parts: ClassVar[Parts] = Parts(shares=None, private=True)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), State(), model.initial()

    def client_update(self, trainer: Trainer, received: State, v: State) -> tuple[State, State]:
        return State(), trainer.sgd(v)

    def server_update(self, server: Server, state: State, uploads: State) -> tuple[State, State]:
        return state, state

    def personal(self, received: State, v: State) -> State:
        return v
