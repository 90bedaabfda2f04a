"""What the machine is told and asked."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from ..errors import InputError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Tell glibc's malloc to keep freed memory: a folded step frees and asks for the same hundreds of megabytes
    again and again, and each time the kernel would clear the pages anew.

    It holds for the whole process, so programs call it, the library does not.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**30)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return 1 << 62


def device_of(name: str) -> torch.device:
    """Returns the device of a name: `auto` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("RunOptions.device=cuda: torch sees no CUDA device here; use --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def precision_of(asked: str, device: torch.device) -> str:
    """Returns what `auto` is on a device: the fastest precision that costs no accuracy (docs/performance.md)."""
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"


def arithmetic(precision: str, device: torch.device) -> None:
    """Sets how a GPU multiplies, for the whole process."""
    precision = precision_of(precision, device)
    if device.type != "cuda":
        if precision in ("tf32", "bf16"):
            raise InputError(f"RunOptions.precision={precision} needs a GPU: use fp32, or --device cuda")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")
