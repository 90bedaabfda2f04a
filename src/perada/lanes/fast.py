"""Which parts of the fast path this machine has. Without them everything runs in plain torch, slower."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

_plain = False
DEVICES = ("cuda",)  # tests add the CPU, where Triton's interpreter runs them


@lru_cache
def _kernels() -> ModuleType | None:
    if os.environ.get("PERADA_PLAIN"):  # to compare with, and if a driver should ever disagree with Triton
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels


def fast_kernels(device: torch.device) -> ModuleType | None:
    """The GPU kernels for this device, where there are any."""
    return _kernels() if device.type in DEVICES and not _plain else None


def get_ready(device: torch.device) -> None:
    """To be said early: what compiles the kernels on a machine that has not seen them takes seconds to start."""
    kernels = fast_kernels(device)
    if kernels is not None and device.type == "cuda":
        kernels.start(torch.cuda.get_device_capability(device))


Layer = Callable[[Tensor], Tensor]


def side_by_side(less: Layer, more: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both of x; on a GPU at the same time, as far as they leave each other room."""
    kernels = fast_kernels(x.device)
    if kernels is None:
        return less(x), more(x)
    with kernels.beside(x):
        first = less(x)
    second = more(x)
    kernels.join(x.device, first)
    return first, second


@contextmanager
def plain() -> Iterator[None]:
    """Without kernels: for a single pass they would not be worth compiling."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before
