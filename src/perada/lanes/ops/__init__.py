"""The operations that a GPU runs in special kernels, behind one seam.

`Ops` (plain.py) computes each of them in plain torch and says what each one means. `Triton` (triton/) computes the same
in fewer and larger GPU kernels, and falls back on plain torch where a kernel does not fit. `ops_for` chooses one when a
model is put on a device; layers, optimisers, losses and batches call it and never ask which one it is.

| operation | called by | plain torch | Triton |
| --- | --- | --- | --- |
| `norm` | `LaneBatchNorm` | `F.batch_norm` over K·C channels, then sum and ReLU | one or two kernels |
| `adapter` | `ResidualAdapter` | norm, dropout, 1×1 convolution, sum | norm, dropout and sum in one kernel; for few channels the product too |
| `norm_and_pool` | first norm | norm, ReLU, pooling | one kernel, no maps in between |
| `stem_norm` | first norm, on a `Stem` | several element-wise operations | one kernel |
| `conv` | trained `LaneConv2d` | loop, grouped or unfolded convolution | batched product of columns |
| `frozen_conv`, `blocks` | frozen `LaneConv2d` | `F.conv2d`, or a product with rearranged weights (lanes/conv.py) | product of columns where there are no tensor cores |
| `side_by_side`, `join` | residual blocks, `Gradient` | one after the other | on a second stream |
| `cross_entropy`, `divergence` | losses | `F.cross_entropy`; softmax and logarithms | loss and gradient in one kernel |
| `views`, `client_batch`, `chunk` | batches | indexing, augmentation, normalisation | one kernel each |
| `sgd`, `adam`, `replace`, `settle` | training steps | new tensors, copied where a lane moves | all parameters at once, written in place |
| `compile`, `get_ready` | recorded steps | nothing | compiles all kernels of a step together |

`PERADA_PLAIN=1` forces plain torch everywhere; `plain()` does so for a while.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .plain import AdamPlan, Change, Ops, Pulled, Statistics, normalised

if TYPE_CHECKING:
    from ..layers import Context

__all__ = [
    "DEVICES",
    "PLAIN",
    "AdamPlan",
    "Change",
    "Ops",
    "Pulled",
    "Statistics",
    "normalised",
    "ops_for",
    "plain",
]

DEVICES = ("cuda",)  # where Triton runs; tests add the CPU, where its interpreter runs the kernels
PLAIN = Ops()
_forced = False


@lru_cache
def _triton() -> Ops:
    if os.environ.get("PERADA_PLAIN"):  # for comparisons, and for drivers that Triton does not support
        return PLAIN
    try:
        from .triton import Triton
    except ImportError:
        return PLAIN
    return Triton()


def ops_for(device: torch.device) -> Ops:
    """Returns the operations for this device: Triton's on a GPU, plain torch elsewhere or where Triton is missing."""
    return _triton() if device.type in DEVICES and not _forced else PLAIN


@contextmanager
def plain(*contexts: Context) -> Iterator[None]:
    """Uses plain torch in these contexts, and for every `ops_for`: a single pass does not justify compiling kernels."""
    global _forced
    before, chosen = _forced, [c.ops for c in contexts]
    _forced = True
    for context in contexts:
        context.ops = PLAIN
    try:
        yield
    finally:
        _forced = before
        for context, ops in zip(contexts, chosen, strict=True):
            context.ops = ops
