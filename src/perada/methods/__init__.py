"""The methods by name. A method is one file and one line in REGISTRY; docs/new-method.md shows how.

A method of another package is named `package.module:callable`, or by an entry point in the group `perada.methods`.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

from ..adapters import Adapter, Residual, adapt, fitting
from ..errors import InputError, unknown
from ..lanes import LaneModel
from ..models import group_sizes, network_of
from ..plugins import PATH, called, check, find
from .apfl import APFL
from .contract import Finisher, Judge, Method, Parts, check_upload, copy_epochs, declared_upload, expected_upload
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
from .scaffold import Scaffold
from .standalone import Standalone

__all__ = [
    "APFL",
    "MTL",
    "REGISTRY",
    "Ditto",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedDF",
    "FedDyn",
    "FedProx",
    "FedRep",
    "FedSim",
    "Finisher",
    "Judge",
    "LGFedAvg",
    "Method",
    "PFedMe",
    "Parts",
    "PerAda",
    "Scaffold",
    "Standalone",
    "check_name",
    "check_upload",
    "copy_epochs",
    "declared_upload",
    "expected_upload",
    "grids",
    "hyperparameters",
    "make_method",
    "method_sizes",
    "name_of",
    "sizes_of",
]

GROUP = "perada.methods"  # of entry points
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
MORE: dict[str, Callable[..., Method]] = {"fedsa": partial(FedSim, own="lora_b")}  # only with LoRA
REGISTRY: dict[str, Callable[..., Method]] = {  # in the order of the paper's table
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
    "scaffold": Scaffold,
}


KNOWN = {**REGISTRY, **MORE}


def check_name(name: str) -> None:
    """Raises InputError if a name cannot be a method. Imports nothing."""
    check("method", GROUP, name, KNOWN)


def _fields(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a method's class, and those of its fields that are settings: the ones not marked fixed."""
    made = find("method", GROUP, name, KNOWN)
    kind: Any = made.func if isinstance(made, partial) else made
    if not dataclasses.is_dataclass(kind):
        return kind, {}
    return kind, {f.name: f for f in dataclasses.fields(kind) if not f.metadata.get("fixed")}


def hyperparameters(name: str) -> dict[str, Any]:
    """Returns the settings of a method and their types."""
    kind, fields = _fields(name)
    types = typing.get_type_hints(kind) if fields else {}
    return {n: types[n] for n in fields}


def grids(name: str) -> dict[str, tuple[Any, ...]]:
    """Returns the values that tuning tries for a method's settings: `metadata={"grid": ...}` of its fields."""
    return {n: f.metadata["grid"] for n, f in _fields(name)[1].items() if "grid" in f.metadata}


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """Returns a method with these settings. Raises InputError, with the nearest name, for an unknown setting."""
    known = hyperparameters(name)
    for key in settings:
        if key not in known:
            if not known:
                raise InputError(f"method {name!r} has no settings, so method.{key} means nothing: remove it")
            raise unknown("key", f"method.{key}", [f"method.{k}" for k in known])
    made = find("method", GROUP, name, KNOWN)
    direct = name in KNOWN or dataclasses.is_dataclass(made)  # then a ValueError is about a setting
    method = made(**settings) if direct else called("method", name, made, **settings)
    if isinstance(method, type) or not isinstance(method, Method):
        raise InputError(f"method {name!r} is a {type(method).__name__}, which lacks a part of perada.methods.Method")
    return method


def name_of(method: Method) -> dict[str, Any]:
    """Returns the `[method]` section that builds this method."""
    kind: Any = type(method)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    arguments = {p.name for p in signature(kind).parameters.values() if p.kind not in VARIADIC}
    if arguments - {f.name for f in fields}:
        raise InputError(f"a run folder cannot keep the arguments of {kind.__qualname__}: make it a frozen dataclass")
    fixed = {f.name: getattr(method, f.name) for f in fields if f.metadata.get("fixed")}
    settings = {f.name: getattr(method, f.name) for f in fields if not f.metadata.get("fixed")}
    defaults = {f.name: f.default for f in fields if f.name in fixed}
    for name, made in KNOWN.items():
        ours, choices = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
        if ours is kind and {**defaults, **choices} == fixed:
            return {"name": name, **settings}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not PATH.fullmatch(name):
        raise InputError(f"a run folder cannot name the method {kind.__qualname__}: define it at the top of a module")
    return {"name": name, **settings}


def sizes_of(method: Method, lanes: LaneModel) -> dict[str, int]:
    """Returns the parameters that a client trains and sends each round, from the declarations that training uses."""
    parts, upload = method.parts, declared_upload(method, lanes)
    sizes = group_sizes(lanes.module, lanes.groups)
    front = sum(p.numel() for p in lanes.prefix.module.parameters()) if lanes.prefix else 0
    return {
        "trained": parts.copies * sizes[parts.trains]["parameters"],
        "communicated": upload.parameters_per_lane(),
        "communicated_buffers": sum(t[0].numel() for t in upload.buffers.values()),
        "full": sizes["full"]["parameters"] + front,
    }


def method_sizes(
    name: str,
    backbone: str = "resnet18",
    classes: int = 10,
    size: int | None = None,
    adapter: Adapter | None = None,
    adapt_from: str = "",
) -> dict[str, int]:
    """Returns `sizes_of` a method with its defaults, less the size of the full model.

    size: pixels per side of the images, for networks that are made for one size.
    adapter: for methods with adapters; None takes the kind that the network has places for.
    adapt_from: the first stage that is adapted, as in `ModelOptions`.
    """
    made, method = network_of(backbone, classes, size), find("method", GROUP, name, KNOWN)()
    kind = (adapter or fitting(made.net, made.head) or Residual()) if method.parts.adapters else None
    start = made.first_adapted(adapt_from)
    lanes = adapt(made.net, adapter=kind, trained=method.parts.trains, head=made.head, start=start)
    sizes = sizes_of(method, lanes)
    return {k: v for k, v in sizes.items() if k != "full"}
