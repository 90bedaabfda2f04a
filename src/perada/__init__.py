"""PerAda: parameter-efficient personalised federated learning.

run = perada.train("digits", method="perada", set={"train.rounds": 20})
model = run.model("client-03")        # a plain torch.nn.Module, personal adapter in place
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Run, load, train
    from .lanes import LaneModel, State, adapt

__version__ = "0.1.0"
__all__ = ["LaneModel", "Run", "State", "__version__", "adapt", "load", "train"]

_HOMES = {"Run": "api", "load": "api", "train": "api", "LaneModel": "lanes", "State": "lanes", "adapt": "lanes"}


def __getattr__(name: str) -> Any:
    """When first asked for: torch takes two seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
