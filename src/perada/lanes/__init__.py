"""Folding: K copies of what is trained, in one pass through what is frozen.

This package knows nothing of federated learning. See docs/architecture.md.
"""

from .convert import convert, default_groups, is_resnet, last_linear, parent_of
from .front import Features, Front, Prefix, Stem
from .gradient import Batch, Gradient, Loss, Options
from .layers import LaneBatchNorm, LaneConv2d, Norm, ResidualAdapter
from .machine import bytes_per_lane
from .model import NOTHING, Group, LaneModel, divide
from .ops import normalised, ops_for
from .optim import Pull, Slopes, adam, adam_states, sgd
from .pool import Pool
from .random import fold, key_of, rng_of, uniform
from .records import exact_products
from .samples import Piece, Samples, Way, sample_gradients, trained_names
from .state import (
    State,
    flattened,
    gather,
    join,
    like,
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
from .train import Batches, Result, Update, loop
from .transformer import AdaptedLinear, Bottleneck, LaneAttention, LowRank, plain_attention
from .ways import way_for

__all__ = [
    "NOTHING",
    "AdaptedLinear",
    "Batch",
    "Batches",
    "Bottleneck",
    "Features",
    "Front",
    "Gradient",
    "Group",
    "LaneAttention",
    "LaneBatchNorm",
    "LaneConv2d",
    "LaneModel",
    "Loss",
    "LowRank",
    "Norm",
    "Options",
    "Piece",
    "Pool",
    "Prefix",
    "Pull",
    "ResidualAdapter",
    "Result",
    "Samples",
    "Slopes",
    "State",
    "Stem",
    "Update",
    "Way",
    "adam",
    "adam_states",
    "bytes_per_lane",
    "convert",
    "default_groups",
    "divide",
    "exact_products",
    "flattened",
    "fold",
    "gather",
    "is_resnet",
    "join",
    "key_of",
    "last_linear",
    "like",
    "loop",
    "mean",
    "merge",
    "mix",
    "normalised",
    "on_cpu",
    "ops_for",
    "parent_of",
    "part",
    "plain_attention",
    "repeat",
    "rng_of",
    "sample_gradients",
    "scale",
    "scatter",
    "sent",
    "sgd",
    "split",
    "stack",
    "trained_names",
    "uniform",
    "way_for",
]
