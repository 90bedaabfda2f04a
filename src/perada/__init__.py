"""PerAda: parameter-efficient personalised federated learning.

run = perada.train("digits", method="perada", set={"train.rounds": 20})
model = run.model("client-03")        # a plain torch.nn.Module, personal adapter in place

The same from Python objects: docs/python.md, and the docstring of `perada.Experiment`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = [
    "Distill",
    "Drift",
    "Experiment",
    "Federation",
    "LaneModel",
    "Privacy",
    "Run",
    "State",
    "Train",
    "__version__",
    "adapt",
    "compare",
    "join",
    "load",
    "train",
    "tune",
]

if TYPE_CHECKING:
    from .adapters import adapt
    from .client.trainer import Train
    from .data import Federation
    from .experiment import Experiment
    from .lanes import LaneModel, State
    from .predict.drift import Drift
    from .privacy import Privacy
    from .runs.join import join
    from .runs.run import Run, load
    from .runs.train import train
    from .server.distill import Distill
    from .sweep.compare import compare
    from .sweep.tune import tune
else:
    _HOMES = {
        "Distill": "server.distill",
        "Drift": "predict.drift",
        "Experiment": "experiment",
        "Federation": "data",
        "LaneModel": "lanes",
        "Privacy": "privacy",
        "Run": "runs.run",
        "State": "lanes",
        "Train": "client.trainer",
        "adapt": "adapters",
        "compare": "sweep.compare",
        "join": "runs.join",
        "load": "runs.run",
        "train": "runs.train",
        "tune": "sweep.tune",
    }

    def __getattr__(name):
        """Imports a name when it is first asked for: torch takes two seconds to import."""
        if name in _HOMES:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        if not name.startswith("_") and find_spec(f".{name}", __name__):  # perada.methods.PerAda, say
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return list(__all__)
