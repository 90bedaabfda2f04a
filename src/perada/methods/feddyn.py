"""FedDyn: a dynamic regulariser that lets every client's optimum meet the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1. With g_m
the client's own estimate of its gradient (kept by it) and P the sampled of all M clients:

    θ_m ← argmin_θ L_m(θ) − ⟨g_m, θ⟩ + α/2 ‖θ − w‖²        E epochs of SGD from w; θ_m is uploaded
    g_m ← g_m − α (θ_m − w)                                so that g_m = ∇L_m(θ_m) at that minimum
    h   ← h − α/M Σ_{m∈P} (θ_m − w)                        at the server
    w   ← mean_{m∈P} θ_m − h/α

The linear and the quadratic term together are one pull, towards w + g_m/α.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import LaneModel, State, join, part, repeat
from ..server.guard import Server
from .contract import Parts


@dataclass(frozen=True)
class FedDyn:
    alpha: float = 0.1  # α

    parts: ClassVar[Parts] = Parts()

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        w = model.initial()
        zero = State({n: p.mul(0) for n, p in w.params.items()})
        return join(w=w, h=zero), w, zero

    def client_update(self, trainer: Trainer, w: State, g: State) -> tuple[State, State]:
        centre = State({n: w.params[n] + p / self.alpha for n, p in g.params.items()})
        theta = trainer.sgd(repeat(w, g.lanes), pull=(centre, self.alpha))
        return theta, State({n: p - self.alpha * (theta.params[n] - w.params[n]) for n, p in g.params.items()})

    def server_update(self, server: Server, state: State, theta: State) -> tuple[State, State]:
        w, h, average = part(state, "w").params, part(state, "h").params, server.mean(theta)
        drift = server.mean(theta, weighted=False).params  # h is not weighted
        taking_part = theta.lanes / server.clients
        h = {n: p - self.alpha * taking_part * (drift[n] - w[n]) for n, p in h.items()}
        new = State({n: p - h[n] / self.alpha for n, p in average.params.items()}, average.buffers)
        return join(w=new, h=State(h)), new

    def personal(self, w: State, g: State) -> State:
        return w
