"""PerAda: parameter-efficient personalised federated learning.

run = perada.train("digits", method="perada", set={"train.rounds": 20})
model = run.model("client-03")        # a plain torch.nn.Module, personal adapter in place
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LaneModel", "Run", "State", "__version__", "adapt", "load", "train"]

if TYPE_CHECKING:
    from .adapters import adapt
    from .lanes import LaneModel, State
    from .runs.run import Run, load, train
else:
    _HOMES = {
        "Run": "runs.run",
        "load": "runs.run",
        "train": "runs.run",
        "LaneModel": "lanes",
        "State": "lanes",
        "adapt": "adapters",
    }

    def __getattr__(name):
        """When first asked for: torch takes two seconds to import."""
        if name in _HOMES:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        if not name.startswith("_") and find_spec(f".{name}", __name__):  # perada.methods.REGISTRY, say
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return list(__all__)
