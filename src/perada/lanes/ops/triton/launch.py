"""Starts a kernel, or only compiles it together with all others that a step needs."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from ..plain import Ops
from .compile_pool import asking, remember

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # nothing to compile

_lock = Lock()
_compiling: tuple[ThreadPoolExecutor, list[Future[Any]]] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Starts the kernel; inside `compiling` it is compiled instead."""
    if _compiling is None:
        kernel[grid](*args, **meta)
    else:
        _compiling[1].append(_compiling[0].submit(_compile, kernel, grid, args, meta))


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    torch.cuda.set_device(next(a.device for a in args if isinstance(a, torch.Tensor)))  # per thread
    with _lock:
        asking(kernel, torch.cuda.current_device())
    getattr(kernel.warmup(*args, grid=grid, **meta), "run", None)  # Triton makes the launcher on access


def only_compiling() -> bool:
    return _compiling is not None


def compile_all(ops: Ops, work: Callable[[], Any]) -> None:
    """`Ops.compile`."""
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
