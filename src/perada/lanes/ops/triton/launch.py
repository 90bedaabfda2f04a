"""Starting a kernel; or only compiling it, together with all others that a step needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from .compile_pool import asking, remember

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # then there is nothing to compile

_lock = Lock()
_compiling: tuple[ThreadPoolExecutor, list[Future[Any]]] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    if _compiling is None:
        kernel[grid](*args, **meta)
    else:
        _compiling[1].append(_compiling[0].submit(_compile, kernel, grid, args, meta))


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    torch.cuda.set_device(next(a.device for a in args if isinstance(a, torch.Tensor)))  # of this thread
    with _lock:
        asking(kernel, torch.cuda.current_device())
    getattr(kernel.warmup(*args, grid=grid, **meta), "run", None)  # its launcher is made when it is asked for


def only_compiling() -> bool:
    return _compiling is not None


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels started in here do nothing but get compiled, many at a time (Triton keeps them on disk, too)."""
    global _compiling
    if _compiling is not None or INTERPRETED:
        yield
        return
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "perada-compile") as pool:
        _compiling = (pool, [])
        try:
            yield
        finally:
            found, _compiling = _compiling[1], None
    for one in found:
        one.result()
    remember()
