"""FedAlt: a part of the model is personal; it is trained first, then the shared part.

Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022: FedAlt, the
alternating one of its two algorithms (local procedure LocalAlt). With u the shared part and v_m the personal one
(input layers, head or adapters):

    v ← v − γ_v ∇_v F_m(u, v)          τ_v steps from v_m, u fixed; v_m stays with the client
    u ← u − γ_u ∇_u F_m(u, v)          then τ_u steps from u, the NEW v fixed; u_m is uploaded
    u ← mean_m u_m                     at the server

Running statistics belong to their module's part and move only while that part is trained.
"""

from dataclasses import dataclass, field

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, divide, merge, repeat
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class FedAlt:
    personal_epochs: int = 0  # of the τ_v steps; 0: as Train.epochs
    personal_lr: float = 0.0  # γ_v; 0: as train.lr
    own: str | None = field(default="output", metadata={"fixed": True})  # the personal group: the registry's choice

    def __post_init__(self) -> None:
        not_negative(self, "personal_epochs", "personal_lr")

    @property
    def parts(self) -> Parts:
        return Parts.all_but(self.own)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        v, u = divide(model.initial(), self.parts.withheld(model.groups))
        return State(), u, v

    def client_update(self, trainer: Trainer, u: State, v: State) -> tuple[State, State]:
        own = self.parts.withheld(trainer.model.groups)
        rest = trainer.model.group(self.parts.trains) - own
        lanes = merge(repeat(u, len(trainer.clients)), v)
        lanes = trainer.sgd(lanes, of=own, lr=self.personal_lr or None, epochs=self.personal_epochs or None)
        lanes = trainer.sgd(lanes, of=rest)
        v, u = divide(lanes, own)
        return u, v

    def server_update(self, server: Server, state: State, u: State) -> tuple[State, State]:
        return state, server.mean(u)

    def personal(self, u: State, v: State) -> State:
        return merge(repeat(u, v.lanes), v) if v.lanes else u
