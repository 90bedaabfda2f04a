"""Compiles kernels in other processes. Threads would wait for each other, and the first round for all of them.

A process reads what to compile, as lines of JSON, and leaves the kernels in Triton's cache on disk, where the process
that asked finds them. It ends with that process, or after a minute without work. If another version of Triton works
differently, kernels are compiled where they are needed, which only takes longer.
"""

import contextlib
import hashlib
import importlib
import json
import os
import queue
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..plain import Ops

IDLE = 60.0  # seconds
MOST = 14  # processes, each of which has torch in memory
_idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()
_started: list[subprocess.Popen[str]] = []
_stamps: list[Path] = []  # set once there are processes


def get_ready(ops: Ops, device: torch.device) -> None:
    """Starts the processes that compile kernels: `Ops.get_ready`."""
    if device.type == "cuda":
        start(torch.cuda.get_device_capability(device))


def start(capability: tuple[int, int]) -> None:
    """Starts a few processes, unless the cache of this machine has these kernels."""
    if _started or _stamp(capability).exists():
        return
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    cores = os.cpu_count() or 1
    for _ in range(max(min(8, cores), min(MOST, cores - 2))):  # two of many cores are left for this process
        one = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            start_new_session=True,  # Ctrl-C must not reach them
        )
        _started.append(one)
        _idle.put(one)
    _stamps.append(_stamp(capability))


def remember() -> None:
    """Notes that the cache has these kernels."""
    for stamp in _stamps:
        with contextlib.suppress(OSError):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()


def _stamp(capability: tuple[int, int]) -> Path:
    """Returns a file next to Triton's cache, which exists once these kernels are compiled."""
    home = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    about = hashlib.sha256(f"{triton.__version__} {capability}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        about.update(file.read_bytes())
    return Path(home) / f"perada-{about.hexdigest()[:16]}"


def ask(source: Any, target: Any, options: dict[str, Any]) -> None:
    """Lets a process compile this, if there is one. An error there occurs here, too, where it is reported."""
    one = _free()
    if one is None or one.stdin is None or one.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # then this process compiles it
        what = {
            "kernel": [source.fn.__module__, source.fn.__name__],
            "signature": source.signature,
            "constants": [[_listed(path), value] for path, value in source.constants.items()],
            "attrs": [[_listed(path), value] for path, value in source.attrs.items()],
            "target": [target.backend, target.arch, target.warp_size],
            "options": options,
        }
        one.stdin.write(json.dumps(what, default=_encoded) + "\n")
        one.stdin.flush()
        one.stdout.readline()
    _idle.put(one)


def _free() -> subprocess.Popen[str] | None:
    """Returns an idle process, or None if all have ended."""
    while any(one.poll() is None for one in _started):
        with contextlib.suppress(queue.Empty):
            one = _idle.get(timeout=1.0)
            if one.poll() is None:
                return one
    return None


def asking(kernel: Any, device: int) -> None:
    """Makes this kernel ask a process before it is compiled here."""
    caches = getattr(kernel, "device_caches", None)
    if caches is None:
        return
    caches[device]  # Triton makes the compile function together with this cache
    real = getattr(kernel, "compile", None)
    if real is None or getattr(real, "asks", False):
        return

    def compile_(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        ask(source, target, options)
        return real(source, target=target, options=options, **more)

    compile_.asks = True  # type: ignore[attr-defined]
    kernel.compile = compile_


def _listed(path: Any) -> Any:
    return list(path) if isinstance(path, tuple) else path


def _encoded(value: Any) -> Any:
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(value)}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {"dtype"}:
        return tl.dtype(value["dtype"])
    return frozenset(value["set"]) if value.keys() == {"set"} else value


def compiled(line: str) -> None:
    """Compiles what a line from `ask` says."""
    what = json.loads(line, object_hook=_decoded)
    module, name = what["kernel"]
    kernel = getattr(importlib.import_module(module), name)
    constants, attrs = (
        {tuple(path) if isinstance(path, list) else path: value for path, value in what[key]}
        for key in ("constants", "attrs")
    )
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in what["options"].items()}
    source = ASTSource(kernel, what["signature"], constants, attrs)
    triton.compile(source, target=GPUTarget(*what["target"]), options=options)


def main() -> None:
    while select.select([sys.stdin], [], [], IDLE)[0] and (line := sys.stdin.readline()):
        with contextlib.suppress(Exception):  # the process that asked sees the error itself
            compiled(line)
        print(flush=True)


if __name__ == "__main__":
    main()
