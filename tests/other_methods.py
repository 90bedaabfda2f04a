"""Methods of another package: one that uploads what is no part of the model, and some that break their word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from perada.client.trainer import Trainer
from perada.lanes import LaneModel, State, join, merge, part, repeat, scale
from perada.methods import FedAvg, Parts
from perada.server.guard import Server


@dataclass(frozen=True)
class FedNova:
    """Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020.

    Clients upload their step counts τ_m: w ← w + (mean_m τ_m) · mean_m (θ_m − w) / τ_m. A client keeps how many steps
    it has taken.
    """

    server_lr: float = 1.0

    parts: ClassVar[Parts] = Parts()

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        w = model.initial()
        return w, w, State({"taken": torch.zeros(1, 1, dtype=torch.int64, device=model.device)})

    def upload(self, model: LaneModel) -> State:
        return merge(model.initial(), join(nova=State({"steps": torch.zeros(1, 1, dtype=torch.int64)})))

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        theta = trainer.sgd(repeat(w, len(trainer.clients)))
        steps = torch.tensor(trainer.steps, device=trainer.model.device).unsqueeze(1)
        return merge(theta, join(nova=State({"steps": steps}))), State({"taken": kept.params["taken"] + steps})

    def server_update(self, server: Server, w: State, uploads: State) -> tuple[State, State]:
        theta, steps = server.model.part_of(uploads), part(uploads, "nova").params["steps"].double()
        share = steps.mean() / steps  # mean τ / τ_m
        moves = State({n: scale(t - w.params[n], share.to(t)) for n, t in theta.params.items()})
        moved = server.mean(moves).params
        new = State({n: p + self.server_lr * moved[n] for n, p in w.params.items()}, server.mean(theta).buffers)
        return new, new

    def personal(self, received: State, kept: State) -> State:
        return received


class Liar(FedNova):
    """Sends what it does not declare, in one of several ways."""

    def __init__(self, how: str) -> None:
        object.__setattr__(self, "server_lr", 1.0)
        object.__setattr__(self, "how", how)

    how: ClassVar[str]

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        sent, kept = FedNova.client_update(self, trainer, w, kept)
        params, buffers = dict(sent.params), dict(sent.buffers)
        steps = params["nova/steps"]
        if self.how == "more":
            params["nova/loss"] = steps
        elif self.how == "fewer":
            del params["nova/steps"]
        elif self.how == "shape":
            params["nova/steps"] = steps.repeat(1, 2)
        elif self.how == "type":
            params["nova/steps"] = steps.double()
        elif self.how == "statistics":
            del buffers["bn1.running_mean"]
        return State(params, buffers), kept


def not_a_method() -> object:
    return FedAvg
