"""The methods by name. A method is one file and one line in REGISTRY; docs/new-method.md shows how."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from ..adapters import adapt
from ..errors import InputError, unknown
from ..models import GroupSizes, network_of
from .contract import Finisher, Judge, Method, Parts, check_upload

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


def _method(where: str, **fixed: Any) -> Callable[..., Method]:
    """`ditto.Ditto` is the class Ditto of ditto.py, with some of its fields fixed."""
    module, _, name = where.partition(".")
    kind: Callable[..., Method] = getattr(import_module(f".{module}", __name__), name)
    return partial(kind, **fixed) if fixed else kind


REGISTRY: dict[str, Callable[..., Method]] = {  # in the order of the paper's table
    "standalone": _method("standalone.Standalone"),
    "mtl": _method("mtl.MTL"),
    "fedavg-ft": _method("fedavg_ft.FedAvgFT"),
    "pfedme": _method("pfedme.PFedMe"),
    "apfl": _method("apfl.APFL"),
    "ditto": _method("ditto.Ditto"),
    "fedbn": _method("fedbn.FedBN"),
    "fedalt-input": _method("fedalt.FedAlt", own="input"),
    "fedsim-input": _method("fedsim.FedSim", own="input"),
    "lg-fedavg": _method("lg_fedavg.LGFedAvg"),
    "fedrep": _method("fedrep.FedRep"),
    "fedalt-output": _method("fedalt.FedAlt", own="output"),
    "fedsim-output": _method("fedsim.FedSim", own="output"),
    "fedalt-adapter": _method("fedalt.FedAlt", own="adapter_modules"),
    "fedsim-adapter": _method("fedsim.FedSim", own="adapter_modules"),
    "perada-no-kd": _method("perada.PerAda", distils=False),
    "perada": _method("perada.PerAda"),
    "fedavg": _method("fedavg.FedAvg"),
    "fedprox": _method("fedprox.FedProx"),
    "feddyn": _method("feddyn.FedDyn"),
    "feddf": _method("feddf.FedDF"),
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
    parts, made = REGISTRY[name]().parts, network_of(backbone, classes)
    lanes = adapt(made.net, adapter="residual" if parts.adapters else None, trained=parts.trains, head=made.head)
    sizes = GroupSizes.of(lanes.module, lanes.groups)
    shared = parts.shared(sizes.groups)
    return {
        "trained": parts.copies * sizes.parameters(sizes.groups[parts.trains]),
        "communicated": sizes.parameters(shared),
        "communicated_buffers": sizes.buffers(shared),
    }
