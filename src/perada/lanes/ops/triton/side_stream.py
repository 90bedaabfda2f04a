"""A second stream: kernels too small to fill a GPU run beside others that do not need what they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .launch import only_compiling

_streams: dict[torch.device, torch.cuda.Stream] = {}
_held: dict[torch.device, list[Tensor]] = {}  # what work beside reads that has not been joined


@contextmanager
def beside(*read: Tensor) -> Iterator[None]:
    """What is started in here, and reads these tensors, begins when all that was started before has ended. Nobody may
    look at what it makes before `join`. Its backward pass runs beside as well, and autograd sees to who waits."""
    device = read[0].device
    if device.type != "cuda" or only_compiling():
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side = _streams[device]
    for tensor in read:
        tensor.record_stream(side)
    _held.setdefault(device, []).extend(read)  # autograd adds in place to a gradient that nobody else holds
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device, *made: Tensor) -> None:
    """What is started from now on begins when all work beside has ended, which made these."""
    if _held.pop(device, None):
        here = torch.cuda.current_stream(device)
        here.wait_stream(_streams[device])
        for tensor in made:
            tensor.record_stream(here)


def is_beside(device: torch.device) -> bool:
    """Whether kernels that are started now run beside."""
    return device in _streams and torch.cuda.current_stream(device) == _streams[device]
