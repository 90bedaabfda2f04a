"""SCAFFOLD: control variates that correct for the drift of clients with unlike data.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1,
option II. With c_m the control variate that client m keeps, c the server's, K steps and M clients, S of them sampled:

    y_m ← y_m − η_l (∇L_m(y_m) − c_m + c)          K steps from x
    c_m⁺ ← c_m − c + (x − y_m) / (K η_l)           stays with the client; c_m⁺ − c_m is uploaded, and y_m
    x ← x + η_g (mean_m y_m − x)                    at the server
    c ← c + S/M · mean_m (c_m⁺ − c_m)

Clients of unlike size take unlike numbers of steps: K is each client's own. Sample weights apply to the mean of y_m
only: c stays the plain mean of all c_m. The server can add up what a client uploads, so c_m is not hidden from it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..client.trainer import Trainer
from ..lanes import Gradient, LaneModel, State, join, merge, part, repeat, scale
from ..server.guard import Server
from .contract import Parts, not_negative


@dataclass(frozen=True)
class Scaffold:
    server_lr: float = 1.0  # η_g

    parts: ClassVar[Parts] = Parts(own_step=True)

    def __post_init__(self) -> None:
        not_negative(self, "server_lr")

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        x = model.initial()
        zero = State({n: p.mul(0) for n, p in x.params.items()})
        both = merge(x, join(c=zero))
        return both, both, zero

    def upload(self, model: LaneModel) -> State:
        x = model.initial()
        return merge(x, join(dc=State({n: p.mul(0) for n, p in x.params.items()})))

    def client_update(self, trainer: Trainer, received: State, own: State) -> tuple[State, State]:
        x, c, rate = trainer.model.part_of(received), part(received, "c").params, trainer.options.lr
        shift = State({n: c[n] - p for n, p in own.params.items()})  # c − c_m

        def step(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
            y, shift = states
            slopes, moved = gradient(y)
            new = {n: p - rate * (slopes[n] + shift.params[n]) for n, p in y.params.items()}
            return State(new, moved.buffers), shift

        y, _ = trainer.loop((repeat(x, own.lanes), shift), step, key=("scaffold", rate))
        like = next(iter(y.params.values()))
        each = (1 / (rate * torch.tensor(trainer.steps, dtype=torch.float64))).to(like)  # 1 / (K η_l)
        dc = {n: scale(x.params[n] - p, each) - c[n] for n, p in y.params.items()}
        return merge(y, join(dc=State(dc))), State({n: p + dc[n] for n, p in own.params.items()})

    def server_update(self, server: Server, state: State, uploads: State) -> tuple[State, State]:
        x, y = server.model.part_of(state), server.mean(server.model.part_of(uploads))
        dc, share = server.mean(part(uploads, "dc"), weighted=False).params, uploads.lanes / server.clients
        new = State({n: p + self.server_lr * (y.params[n] - p) for n, p in x.params.items()}, y.buffers)
        c = State({n: p + share * dc[n] for n, p in part(state, "c").params.items()})
        both = merge(new, join(c=c))
        return both, both

    def personal(self, received: State, own: State) -> State:
        return received.only(own.params, received.buffers)
