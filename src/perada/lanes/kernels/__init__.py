"""GPU kernels in Triton: what costs a small network its time on a GPU is the number of kernels, so here they do more.

Every function has a plain counterpart in torch, which runs everywhere else and which the tests compare with.
"""

from .adapter import lane_adapter
from .beside import beside, join
from .conv import lane_conv
from .elsewhere import start
from .flat import adam_step, keep, length, settle, sgd_step
from .images import blocks, chunk, picked, views
from .launch import compiling
from .loss import cross_entropy, divergence
from .norm import Drop, lane_norm
from .stem import norm_and_pool, stem_norm
from .tiles import Statistics

__all__ = [
    "Drop",
    "Statistics",
    "adam_step",
    "beside",
    "blocks",
    "chunk",
    "compiling",
    "cross_entropy",
    "divergence",
    "join",
    "keep",
    "lane_adapter",
    "lane_conv",
    "lane_norm",
    "length",
    "norm_and_pool",
    "picked",
    "settle",
    "sgd_step",
    "start",
    "stem_norm",
    "views",
]
