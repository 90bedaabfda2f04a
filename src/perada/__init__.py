"""PerAda: parameter-efficient personalised federated learning.

run = perada.train("digits", method="perada", set={"train.rounds": 20})
model = run.model("client-03")        # a plain torch.nn.Module, personal adapter in place
"""

__version__ = "0.1.0"

from .api import Run, load, train
from .lanes import LaneModel, State, adapt

__all__ = ["LaneModel", "Run", "State", "__version__", "adapt", "load", "train"]
