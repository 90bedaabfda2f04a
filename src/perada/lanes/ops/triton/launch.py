"""Starts kernels: now, on the side stream, or not at all, to compile all that a step needs together.

On the side stream, kernels too small to fill a GPU run at the same time as others that do not need their results.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..plain import Branch, Ops
from .compile_pool import asking, remember

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # nothing to compile

_lock = Lock()
_compiling: tuple[ThreadPoolExecutor, list[Future[Any]]] | None = None
_streams: dict[torch.device, torch.cuda.Stream] = {}
_read: dict[torch.device, list[Tensor]] = {}  # what work on the side stream reads, until it is joined


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Starts the kernel, or only compiles it inside of `compiling`."""
    if _compiling is None:
        kernel[grid](*args, **meta)
    else:
        _compiling[1].append(_compiling[0].submit(_compile, kernel, grid, args, meta))


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    torch.cuda.set_device(next(a.device for a in args if isinstance(a, Tensor)))  # per thread
    with _lock:
        asking(kernel, torch.cuda.current_device())
    getattr(kernel.warmup(*args, grid=grid, **meta), "run", None)  # Triton makes the launcher on access


def only_compiling() -> bool:
    return _compiling is not None


def compile_all(ops: Ops, work: Callable[[], Any]) -> None:
    """Compiles the kernels that `work` starts: `Ops.compile`."""
    with compiling():
        work()


@contextmanager
def compiling() -> Iterator[None]:
    """Compiles the kernels that are started inside, many at a time, without running them; Triton caches them."""
    global _compiling
    if _compiling is not None or INTERPRETED:
        yield
        return
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "perada-compile") as pool:
        _compiling = (pool, [])
        try:
            yield
        finally:
            futures, _compiling = _compiling[1], None
    for future in futures:
        future.result()
    remember()


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
    """Computes `Ops.side_by_side`, with `less` on the side stream."""
    with on_side_stream(x):
        first = less(x)
    second = more(x)
    join(ops, x.device, first)
    return first, second


def is_side_stream(device: torch.device) -> bool:
    """Returns whether the current stream is the side stream."""
    return device in _streams and torch.cuda.current_stream(device) == _streams[device]
