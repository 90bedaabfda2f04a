"""What a method is: Algorithm 1 as a handful of functions, and a declaration of what it trains and shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..client.trainer import Trainer
from ..lanes import NOTHING, Group, LaneModel, State
from ..server.distill import Server


@dataclass(frozen=True)
class Parts:
    """What a method trains and what crosses the network, as parameter groups (`perada params` lists them).

    Counting, training and the check of every upload go by this declaration alone.
    """

    trains: str = "full"  # the group a lane holds
    copies: int = 1  # lanes a client trains
    shares: str | None = "full"  # the group that crosses the network, None for nothing,
    withholds: str | None = None  # less this one
    adapters: bool = False  # whether the model gets adapters
    distils: bool = False  # whether the server needs public images
    global_model: bool = True  # whether what is sent, where it is a whole model, is one that is trained to predict
    own_step: bool = False  # whether it writes its own step, to which train.momentum does not apply

    def shared(self, groups: Mapping[str, Group]) -> Group:
        """What of a lane crosses the network."""
        shared = groups[self.shares] if self.shares else NOTHING
        return shared - groups[self.withholds] if self.withholds else shared


class Method(Protocol):
    """Written for a stack of clients: the simulator passes a cohort, a site on its own passes one."""

    @property
    def parts(self) -> Parts: ...

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        """(server state, first broadcast, what a client keeps), one lane each."""

    def client_update(self, trainer: Trainer, received: State, kept: State) -> tuple[State, State]:
        """Runs where the data are: (broadcast, kept) -> (upload, kept)."""

    def server_update(self, server: Server, state: State, uploads: State) -> tuple[State, State]:
        """Runs at the server: (state, uploads) -> (state, next broadcast)."""

    def personal(self, received: State, kept: State) -> State:
        """What the clients predict with: a lane each, or one lane that all share."""


@runtime_checkable
class Judge(Protocol):
    """A method whose clients score the guard's candidates on their own validation data."""

    def client_score(self, trainer: Trainer, candidates: State) -> Tensor:
        """Losses `[candidates, clients]`."""


@runtime_checkable
class Finisher(Protocol):
    """A method with a last stage at every client, after the last round; before it, clients keep nothing."""

    def finish(self, trainer: Trainer, received: State, kept: State) -> State:
        """What the clients keep then: a lane each."""


def check_upload(method: Method, model: LaneModel, upload: State) -> State:
    """The upload, if it holds nothing but what the method declares shared."""
    shared = method.parts.shared(model.groups)
    more = (upload.params.keys() - shared.params) | (upload.buffers.keys() - shared.buffers)
    if more:
        raise ValueError(f"{type(method).__name__} uploads what it does not declare shared: {', '.join(sorted(more))}")
    return upload


def not_negative(method: object, *names: str) -> None:
    """Refuse settings below zero; `config` puts `method.` before the words."""
    for name in names:
        if getattr(method, name) < 0:
            raise ValueError(f"{name} must not be negative, not {getattr(method, name)}")
