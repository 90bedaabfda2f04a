"""Folding: K copies of what is trained, one pass through what is frozen.

Knows nothing of federated learning. See docs/architecture.md.
"""

from .convert import convert, default_groups, is_resnet, last_linear, parent_of
from .fast import fast_kernels, get_ready, side_by_side
from .gradient import Batch, Gradient, Loss, Options
from .layers import (
    LaneBatchNorm,
    LaneConv2d,
    LaneDropout,
    LaneLayerNorm,
    LaneLinear,
    Norm,
    ResidualAdapter,
)
from .memory import bytes_per_lane
from .model import NOTHING, Group, LaneModel, divide
from .pool import Pool
from .random import fold, key_of, rng_of, uniform
from .state import (
    State,
    flattened,
    gather,
    join,
    mean,
    merge,
    mix,
    on_cpu,
    part,
    repeat,
    scale,
    scatter,
    sent,
    split,
    stack,
)
from .stem import Stem
from .train import Batches, Pull, Result, Update, loop, sgd

__all__ = [
    "NOTHING",
    "Batch",
    "Batches",
    "Gradient",
    "Group",
    "LaneBatchNorm",
    "LaneConv2d",
    "LaneDropout",
    "LaneLayerNorm",
    "LaneLinear",
    "LaneModel",
    "Loss",
    "Norm",
    "Options",
    "Pool",
    "Pull",
    "ResidualAdapter",
    "Result",
    "State",
    "Stem",
    "Update",
    "bytes_per_lane",
    "convert",
    "default_groups",
    "divide",
    "fast_kernels",
    "flattened",
    "fold",
    "gather",
    "get_ready",
    "is_resnet",
    "join",
    "key_of",
    "last_linear",
    "loop",
    "mean",
    "merge",
    "mix",
    "on_cpu",
    "parent_of",
    "part",
    "repeat",
    "rng_of",
    "scale",
    "scatter",
    "sent",
    "sgd",
    "side_by_side",
    "split",
    "stack",
    "uniform",
]
