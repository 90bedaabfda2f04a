"""The methods by name. A method is one file and one line in REGISTRY; docs/new-method.md shows how."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import InputError, unknown
from ..models import group_sizes
from .apfl import APFL
from .contract import Finisher, Judge, Method, Parts, check_upload
from .ditto import Ditto
from .fedalt import FedAlt
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedbn import FedBN
from .feddf import FedDF
from .feddyn import FedDyn
from .fedprox import FedProx
from .fedrep import FedRep
from .fedsim import FedSim
from .lg_fedavg import LGFedAvg
from .mtl import MTL
from .perada import PerAda
from .pfedme import PFedMe
from .standalone import Standalone

__all__ = [
    "REGISTRY",
    "Finisher",
    "Judge",
    "Method",
    "Parts",
    "check_upload",
    "grids",
    "hyperparameters",
    "make_method",
    "method_sizes",
]

REGISTRY: dict[str, Callable[..., Method]] = {
    "standalone": Standalone,
    "mtl": MTL,
    "fedavg-ft": FedAvgFT,
    "pfedme": PFedMe,
    "apfl": APFL,
    "ditto": Ditto,
    "fedbn": FedBN,
    "fedalt-input": partial(FedAlt, own="input"),
    "fedsim-input": partial(FedSim, own="input"),
    "lg-fedavg": LGFedAvg,
    "fedrep": FedRep,
    "fedalt-output": partial(FedAlt, own="output"),
    "fedsim-output": partial(FedSim, own="output"),
    "fedalt-adapter": partial(FedAlt, own="adapter_modules"),
    "fedsim-adapter": partial(FedSim, own="adapter_modules"),
    "perada-no-kd": partial(PerAda, distils=False),
    "perada": PerAda,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "feddf": FedDF,
}


def _fields(name: str) -> tuple[type, dict[str, Any]]:
    """A method's class and those of its fields that are settings: the ones not marked fixed."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    made = REGISTRY[name]
    kind: Any = made.func if isinstance(made, partial) else made
    return kind, {f.name: f for f in dataclasses.fields(kind) if not f.metadata.get("fixed")}


def hyperparameters(name: str) -> dict[str, Any]:
    """The settings of `[method]` that this method has, and their types."""
    kind, fields = _fields(name)
    types = typing.get_type_hints(kind)
    return {n: types[n] for n in fields}


def grids(name: str) -> dict[str, tuple[Any, ...]]:
    """The values `perada tune` tries for the settings of a method: `metadata={"grid": ...}` of its fields."""
    return {n: f.metadata["grid"] for n, f in _fields(name)[1].items() if "grid" in f.metadata}


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """The method with its hyper-parameters; an unknown one is an error that suggests the nearest."""
    known = hyperparameters(name)
    for key in settings:
        if key not in known:
            if not known:
                raise InputError(f"method {name!r} has no settings, so method.{key} means nothing: remove it")
            raise unknown("key", f"method.{key}", [f"method.{k}" for k in known])
    return REGISTRY[name](**settings)


def method_sizes(name: str, backbone: str = "resnet18", classes: int = 10) -> dict[str, int]:
    """Parameters a client trains and sends each round, from the declarations that training uses."""
    if name not in REGISTRY:
        raise unknown("method", name, REGISTRY)
    parts, sizes = REGISTRY[name]().parts, group_sizes(backbone, classes)
    shared = parts.shared(sizes.groups)
    return {
        "trained": parts.copies * sizes.parameters(sizes.groups[parts.trains]),
        "communicated": sizes.parameters(shared),
        "communicated_buffers": sizes.buffers(shared),
    }
