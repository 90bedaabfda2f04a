"""What a method is: Algorithm 1 as a few functions, and a declaration of what it trains and sends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from torch import Tensor

from ..client.trainer import Trainer
from ..lanes import NOTHING, Group, LaneModel, State
from ..server.guard import Server


@dataclass(frozen=True)
class Parts:
    """What a method trains and what crosses the network, as parameter groups (`perada params` lists them)."""

    trains: str = "full"  # the group a lane holds
    copies: int = 1  # lanes a client trains
    shares: str | None = "full"  # the group that crosses the network, None for nothing,
    withholds: str | None = None  # less this one
    adapters: bool = False  # whether the model gets adapters
    distils: bool = False  # whether the server needs public images
    global_model: bool = True  # whether what is sent, where it is a whole model, is one that is trained to predict
    private: bool = False  # whether its clients train by one `Trainer.sgd` alone, so that they can train with DP-SGD
    own_step: bool = False  # whether it writes its own step, to which train.momentum does not apply

    @classmethod
    def all_but(cls, own: str | None) -> Self:
        """Returns the parts of a method that shares all it trains but the personal group `own`: the full model, with
        adapters where these are personal, or the adapters alone where their second matrices are."""
        if own == "adapter_modules":
            return cls(trains="everything", shares="everything", withholds=own, adapters=True)
        if own == "lora_b":
            return cls(trains="adapter", shares="adapter", withholds=own, adapters=True)
        return cls(withholds=own)

    def withheld(self, groups: Mapping[str, Group]) -> Group:
        """Returns the part of a lane that stays with the client."""
        return groups[self.withholds] if self.withholds else NOTHING

    def shared(self, groups: Mapping[str, Group]) -> Group:
        """Returns the part of a lane that crosses the network."""
        return (groups[self.shares] if self.shares else NOTHING) - self.withheld(groups)


@runtime_checkable
class Method(Protocol):
    """A method, written for a stack of clients: a simulation passes a cohort, a site on its own passes one."""

    @property
    def parts(self) -> Parts: ...

    def init(self, model: LaneModel) -> tuple[State, State, State]:
        """Returns the server's state, the first broadcast and what a client keeps, one lane each."""

    def client_update(self, trainer: Trainer, received: State, kept: State) -> tuple[State, State]:
        """Runs where the data are: (broadcast, kept) -> (upload, kept)."""

    def server_update(self, server: Server, state: State, uploads: State) -> tuple[State, State]:
        """Runs at the server: (state, uploads) -> (state, next broadcast)."""

    def personal(self, received: State, kept: State) -> State:
        """Returns what the clients predict with: one lane per client, or one lane that all share."""


@runtime_checkable
class Judge(Protocol):
    """A method whose clients score the guard's candidates on their own validation data."""

    def client_score(self, trainer: Trainer, candidates: State) -> Tensor:
        """Returns losses `[candidates, clients]`."""


@runtime_checkable
class Finisher(Protocol):
    """A method with a last stage at every client, after the last round; before it, clients keep nothing."""

    def finish(self, trainer: Trainer, received: State, kept: State) -> State:
        """Returns what the clients keep then, one lane per client."""


@runtime_checkable
class Declares(Protocol):
    """A method that sends more than a group of the model, or something else: counts, masks, control variates."""

    def upload(self, model: LaneModel) -> State:
        """Returns one lane of what a client sends: its names, shapes and types.

        The values count over a network only: there an upload may not be absurdly far from the broadcast, or from these
        values where the broadcast does not have the name.
        """


def copy_epochs(method: Method, epochs: int) -> tuple[int, ...]:
    """Returns the epochs of each copy that a client trains in a round; the personal one may have its own number."""
    own = int(getattr(method, "personal_epochs", 0)) or epochs
    return (own, *[epochs] * (method.parts.copies - 1))


def declared_upload(method: Method, model: LaneModel) -> State:
    """Returns one lane with the names, shapes and types of what a client sends.

    Counting and the check of every upload go by this declaration alone.
    """
    if isinstance(method, Declares):
        return method.upload(model)
    shared = method.parts.shared(model.groups)
    return model.initial().only(shared.params, shared.buffers)


def expected_upload(method: Method, model: LaneModel, broadcast: State) -> State:
    """Returns what uploads are compared with: the broadcast's values where it has the name, else the declared ones."""
    declared = declared_upload(method, model)
    return State(
        {n: broadcast.params.get(n, t) for n, t in declared.params.items()},
        {n: broadcast.buffers.get(n, t) for n, t in declared.buffers.items()},
    )


def check_upload(method: Method, model: LaneModel, upload: State) -> State:
    """Returns the upload if it is what the method declares."""
    declared, name = declared_upload(method, model), type(method).__name__
    for sent, known in ((upload.params, declared.params), (upload.buffers, declared.buffers)):
        if more := sorted(sent.keys() - known.keys()):
            raise ValueError(f"{name} uploads what it does not declare: {', '.join(more)}")
        if less := sorted(known.keys() - sent.keys()):
            raise ValueError(f"{name} declares an upload that lacks: {', '.join(less)}")
        for n, tensor in sent.items():
            if tensor.shape[1:] != known[n].shape[1:]:
                raise ValueError(f"{name} uploads {n} as {list(tensor.shape[1:])}, declared {list(known[n].shape[1:])}")
            if tensor.dtype != known[n].dtype:
                raise ValueError(f"{name} uploads {n} as {tensor.dtype}, declared {known[n].dtype}")
    return upload


def not_negative(method: object, *names: str) -> None:
    """Raises ValueError for a setting below zero. `config` puts `method.` in front of the message."""
    for name in names:
        if getattr(method, name) < 0:
            raise ValueError(f"{name} must not be negative, not {getattr(method, name)}")
