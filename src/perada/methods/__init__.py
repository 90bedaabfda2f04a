"""The methods by name. A method is one file and one line here; docs/architecture.md has the contract."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ..distill import Server
from ..errors import InputError, unknown
from ..lanes import NOTHING, Group, LaneModel, State
from ..models import group_sizes
from ..trainer import Trainer
from .fedavg import FedAvg
from .perada import PerAda
from .standalone import Standalone


class Method(Protocol):
    """Written for a stack of clients: the simulator passes a cohort, a site on its own passes one.

    adapters: whether the model gets adapters; distils: whether the server needs public images; trains: the
    parameter group a lane holds; copies: lanes a client trains; shares: the group that crosses the network
    (None for nothing), less the group it withholds. An upload that holds more is an error (`check_upload`).

    A method whose server asks the clients to judge candidates also has
    `client_score(trainer, candidates) -> losses [candidates, clients]` (see `Judge`).
    """

    adapters: ClassVar[bool]
    trains: ClassVar[str]
    copies: ClassVar[int]
    shares: ClassVar[str | None]
    withholds: ClassVar[str | None]

    @property
    def distils(self) -> bool: ...

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
    """A method whose clients score candidates on their own validation data."""

    def client_score(self, trainer: Trainer, candidates: State) -> Tensor: ...


REGISTRY: dict[str, Callable[..., Method]] = {
    "perada": PerAda,
    "perada-no-kd": partial(PerAda, distils=False),
    "standalone": Standalone,
    "fedavg": FedAvg,
}


def hyperparameters(name: str) -> dict[str, Any]:
    """The settings of `[method]` that this method has and their types: its fields that are not marked fixed."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    made = REGISTRY[name]
    kind: Any = made.func if isinstance(made, partial) else made
    types = typing.get_type_hints(kind)
    return {f.name: types[f.name] for f in dataclasses.fields(kind) if not f.metadata.get("fixed")}


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """The method with its hyper-parameters; an unknown one is an error that suggests the nearest."""
    known = hyperparameters(name)
    for key in settings:
        if key not in known:
            if not known:
                raise InputError(f"method {name!r} has no settings, so method.{key} means nothing: remove it")
            raise unknown("key", f"method.{key}", [f"method.{k}" for k in known])
    return REGISTRY[name](**settings)


def shared_group(method: Method, groups: Mapping[str, Group]) -> Group:
    """What of a lane crosses the network, by the method's declaration."""
    shared = groups[method.shares] if method.shares else NOTHING
    return shared - groups[method.withholds] if method.withholds else shared


def check_upload(method: Method, model: LaneModel, upload: State) -> State:
    """The upload, if it holds nothing but what the method declares shared."""
    shared = shared_group(method, model.groups)
    more = (upload.params.keys() - shared.params) | (upload.buffers.keys() - shared.buffers)
    if more:
        raise ValueError(f"{type(method).__name__} uploads what it does not declare shared: {', '.join(sorted(more))}")
    return upload


def method_sizes(name: str, backbone: str = "resnet18", classes: int = 10) -> dict[str, int]:
    """Parameters a client trains and sends each round, from the declarations that training uses."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    method, sizes = REGISTRY[name](), group_sizes(backbone, classes)
    shared = shared_group(method, sizes.groups)
    return {
        "trained": method.copies * sizes.parameters(sizes.groups[method.trains]),
        "communicated": sizes.parameters(shared),
        "communicated_buffers": sizes.buffers(shared),
    }
