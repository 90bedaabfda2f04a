"""MTL: multi-task learning, every client's model pulled towards the mean of all models.

Evgeniou & Pontil, "Regularized Multi-Task Learning", KDD 2004: equivalent to penalising Σ‖v_m‖² and
Σ‖v_m − v̄‖² (Lemma 2.2), of which the second is kept here (Train.weight_decay is the first). It is the
mean-regularised case of Smith et al., "Federated Multi-Task Learning", NeurIPS 2017, Eqs. (1)-(2):

    min_{v_1..v_M} Σ_m L_m(v_m) + λ/2 ‖v_m − v̄‖²
    v ← v − η (∇L_m(v) + λ (v − v̄))      at each sampled client, from its own v_m
    v̄ ← mean_m v_m                       at the server, over the sampled clients

The regulariser needs the mean of the clients' models, so here a personal model leaves its client, by definition. The
mean is a centre, trained on no data: as in the PerAda paper's comparison it is not tested as a global model.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class MTL:
    lam: float = field(default=1.0, metadata={"grid": (0.1, 1.0)})  # λ

    parts: ClassVar[Parts] = Parts(global_model=False)

    def __post_init__(self) -> None:
        not_negative(self, "lam")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), model.initial()

    def client_update(self, trainer: Trainer, average: State, v: State) -> tuple[State, State]:
        v = trainer.sgd(v, pull=(average, self.lam))
        return v, v

    def server_update(self, server: Server, state: State, v: State) -> tuple[State, State]:
        return state, server.mean(v)

    def personal(self, average: State, v: State) -> State:
        return v
