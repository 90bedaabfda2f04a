"""A second stream: kernels too small to fill a GPU run at the same time as others that do not need their results."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..plain import Branch, Ops
from .launch import only_compiling

_streams: dict[torch.device, torch.cuda.Stream] = {}
_read: dict[torch.device, list[Tensor]] = {}  # what work on the side stream reads, until it is joined


@contextmanager
def on_side_stream(*read: Tensor) -> Iterator[None]:
    """Starts work that reads these tensors on the side stream, after all work started so far.

    Its results may be used only after `join`. Autograd runs its backward pass there, too, and waits where needed.
    """
    device = read[0].device
    if device.type != "cuda" or only_compiling():
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side = _streams[device]
    for tensor in read:
        tensor.record_stream(side)
    _read.setdefault(device, []).extend(read)  # autograd adds in place to a gradient that nothing else refers to
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(ops: Ops, device: torch.device, *made: Tensor) -> None:
    """Lets the current stream wait for the side stream, which made these tensors."""
    if _read.pop(device, None):
        here = torch.cuda.current_stream(device)
        here.wait_stream(_streams[device])
        for tensor in made:
            tensor.record_stream(here)


def side_by_side(ops: Ops, less: Branch, more: Branch, x: Tensor) -> tuple[Tensor, Tensor]:
    """`Ops.side_by_side`, with `less` on the side stream."""
    with on_side_stream(x):
        first = less(x)
    second = more(x)
    join(ops, x.device, first)
    return first, second


def is_side_stream(device: torch.device) -> bool:
    """Returns whether the current stream is the side stream."""
    return device in _streams and torch.cuda.current_stream(device) == _streams[device]
