"""FedDF: FedAvg whose server distils the clients' models into the average.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithm 1
with its Eq. (AvgLogits), for models of one architecture:

    θ ← θ − η ∇L_m(θ)                        at each sampled client, from w
    w ← mean_m θ_m, then R steps of w ← w − η_g ∇_w KL(σ(mean_m f(θ_m; x)) ‖ σ(f(w; x)))    at the server

The distillation, its settings and its guard are PerAda's (`[distill]`), as in the PerAda paper's comparison;
here full models are distilled.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class FedDF:
    parts: ClassVar[Parts] = Parts(distils=True)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return State(), model.initial(), State()

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        return trainer.sgd(repeat(w, len(trainer.clients))), kept

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        return state, server.distill(student=server.mean(theta), teachers=theta)

    def client_score(self, trainer: Trainer, candidates: State) -> Tensor:
        return trainer.validation_losses(candidates)

    def personal(self, w: State, kept: State) -> State:
        return w
