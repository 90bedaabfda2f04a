"""FedBN: everything is shared but the batch norms.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1 (appendix C). With b_m the batch norms of client m, affines and running statistics, and w the rest:

    (w, b) ← (w, b) − η ∇L_m(w, b)          from w and its own b_m
    w ← mean_m w_m                          at the server; b_m stays with the client

Every norm's statistics stay, those of the downsample norms too, whose affines are shared.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, divide, merge, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class FedBN:
    parts: ClassVar[Parts] = Parts(withholds="batch_norm")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        norms, rest = divide(model.initial(), model.group("batch_norm"))
        return State(), rest, norms

    def client_update(self, trainer: Trainer, w: State, norms: State) -> tuple[State, State]:
        lanes = trainer.sgd(merge(repeat(w, len(trainer.clients)), norms))
        norms, w = divide(lanes, trainer.model.group("batch_norm"))
        return w, norms

    def server_update(self, server: Server, state: State, w: State) -> tuple[State, State]:
        return state, server.mean(w)

    def personal(self, w: State, norms: State) -> State:
        return merge(repeat(w, norms.lanes), norms) if norms.lanes else w
