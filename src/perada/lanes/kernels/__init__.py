"""GPU kernels in Triton: what costs a small network its time on a GPU is the number of kernels, so here they do more.

Every function has a plain counterpart in torch, which runs everywhere else and which the tests compare with.
"""

from .flat import adam_step, keep, settle, sgd_step
from .images import picked, taken, views
from .launch import compiling
from .loss import cross_entropy
from .norm import Drop, Statistics, lane_adapter, lane_norm
from .stem import norm_and_pool

__all__ = [
    "Drop",
    "Statistics",
    "adam_step",
    "compiling",
    "cross_entropy",
    "keep",
    "lane_adapter",
    "lane_norm",
    "norm_and_pool",
    "picked",
    "settle",
    "sgd_step",
    "taken",
    "views",
]
