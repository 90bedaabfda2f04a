"""PerAda: personal adapters pulled towards a distilled global adapter.

Xie et al., "PerAda: Parameter-Efficient Federated Learning Personalization with Generalization Guarantees",
CVPR 2024, Algorithm 1. With u the frozen backbone, for each sampled client m:

    v ← v − η_p (∇L_m(u, v) + λ (v − w))        S times from v_m, which stays with the client
    θ ← θ − η_l ∇L_m(u, θ)                      E times from w; θ_m is uploaded
    w ← mean_m θ_m, then R steps of w ← w − η_g ∇_w KL(σ(mean_m f(u, θ_m; x)) ‖ σ(f(u, w; x)))  at the server

"PerAda w/o KD" is the same without the R steps.
"""

from dataclasses import dataclass, field

from torch import Tensor

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, repeat, split, stack
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class PerAda:
    lam: float = field(default=1.0, metadata={"grid": (0.1, 1.0)})  # λ
    personal_epochs: int = 0  # epochs of the S personal steps; 0: as Train.epochs
    personal_lr: float = 0.0  # η_p; 0: as train.lr
    distils: bool = field(default=True, metadata={"fixed": True})  # the registry's choice, not a setting

    def __post_init__(self) -> None:
        not_negative(self, "lam", "personal_epochs", "personal_lr")

    @property
    def parts(self) -> Parts:
        return Parts(trains="adapter", copies=2, shares="adapter", adapters=True, distils=self.distils, private=True)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return model.initial(), model.initial(), model.initial()  # w at the server, w sent, v_m kept

    def client_update(self, trainer: Trainer, w: State, v: State) -> tuple[State, State]:
        lanes = trainer.sgd(
            stack(v, repeat(w, v.lanes)),  # personal lanes over local lanes, one frozen backbone
            pull=(w, (self.lam, 0.0)),
            lr=(self.personal_lr or trainer.options.lr, trainer.options.lr),
            epochs=(self.personal_epochs or trainer.options.epochs, trainer.options.epochs),
        )
        v, theta = split(lanes, 2)
        return theta, v  # upload θ; v stays

    def server_update(self, server: Server, w: State, theta: State) -> tuple[State, State]:
        w = server.mean(theta)
        if self.distils:
            w = server.distill(student=w, teachers=theta)
        return w, w

    def client_score(self, trainer: Trainer, candidates: State) -> Tensor:
        return trainer.validation_losses(candidates)

    def personal(self, w: State, v: State) -> State:
        return v
