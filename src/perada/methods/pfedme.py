"""pFedMe: personal models by Moreau envelopes.

T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.
Each client's objective is the envelope `F_m(w) = min_θ L_m(θ) + λ/2 ‖θ − w‖²`, whose gradient is
`λ (w − θ̂(w))`. For every mini-batch, from w_m = w:

    θ ← w_m, then K times θ ← θ − η_p (∇L_m(θ) + λ (θ − w_m))      the inner problem, Eq. (7), on that batch
    w_m ← w_m − η λ (w_m − θ)                                      line 8
    w ← (1 − β) w + β mean_m w_m                                   at the server

The last θ is the personal model. The inner problem starts at w_m every time (the authors' code goes on from the
last θ of the round), and only sampled clients train. w_m is never run itself, so its running statistics
are those of its θ; β mixes parameters, not statistics.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ..client.trainer import Trainer
from ..lanes import Gradient, LaneModel, State, repeat
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class PFedMe:
    lam: float = field(default=1.0, metadata={"grid": (0.1, 1.0)})  # λ
    inner_steps: int = 3  # K
    eta: float = 0.5  # η of the outer step; ηλ = 1 would replace w_m by θ
    beta: float = 1.0  # β, the server's mixing
    personal_lr: float = 0.0  # η_p; 0: as train.lr

    parts: ClassVar[Parts] = Parts(copies=2, own_step=True)

    def __post_init__(self) -> None:
        not_negative(self, "lam", "eta", "beta", "personal_lr")
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, not {self.inner_steps}")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        return model.initial(), model.initial(), model.initial()

    def client_update(self, trainer: Trainer, received: State, kept: State) -> tuple[State, State]:
        rate = self.personal_lr or trainer.options.lr

        def step(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
            w = theta = states[0]
            for _ in range(self.inner_steps):
                grads, theta = gradient(theta)
                moved = {
                    n: theta.params[n] - rate * (g + self.lam * (theta.params[n] - w.params[n]))
                    for n, g in grads.items()
                }
                theta = State({**theta.params, **moved}, theta.buffers)
            outer = {n: p - self.eta * self.lam * (p - theta.params[n]) for n, p in w.params.items()}
            return State(outer, theta.buffers), theta

        start = repeat(received, kept.lanes)
        w, theta = trainer.loop((start, start), step, key=(self, rate))
        return w, theta

    def server_update(self, server: Server, w: State, uploads: State) -> tuple[State, State]:
        average = server.mean(uploads)
        mixed = {n: (1 - self.beta) * w.params[n] + self.beta * p for n, p in average.params.items()}
        w = State(mixed, average.buffers)
        return w, w

    def personal(self, w: State, theta: State) -> State:
        return theta
