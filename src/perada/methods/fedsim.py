"""FedSim: a part of the model is personal; both parts are trained at once.

Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022: FedSim, the
simultaneous one of its two algorithms (local procedure LocalSim). With u the shared part and v_m the personal one
(input layers, head or adapters):

    v ← v − γ ∇_v F_m(u, v)   and   u ← u − γ ∇_u F_m(u, v)     both gradients at the same (u, v), τ steps
    u ← mean_m u_m                                              at the server; v_m stays with the client

FedSA is the same on LoRA alone, with v_m the second matrices B and u the first matrices A, norms and head (Guo et al.,
"Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025).
"""

from dataclasses import dataclass, field

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, divide, merge, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class FedSim:
    own: str | None = field(default="output", metadata={"fixed": True})  # the personal group: the registry's choice

    @property
    def parts(self) -> Parts:
        return Parts.all_but(self.own)

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        v, u = divide(model.initial(), self.parts.withheld(model.groups))
        return State(), u, v

    def client_update(self, trainer: Trainer, u: State, v: State) -> tuple[State, State]:
        lanes = trainer.sgd(merge(repeat(u, len(trainer.clients)), v))
        v, u = divide(lanes, self.parts.withheld(trainer.model.groups))
        return u, v

    def server_update(self, server: Server, state: State, u: State) -> tuple[State, State]:
        return state, server.mean(u)

    def personal(self, u: State, v: State) -> State:
        return merge(repeat(u, v.lanes), v) if v.lanes else u
