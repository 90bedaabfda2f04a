"""Settings of this process and facts about this machine. Importing this module does not import torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive"}


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has set `OMP_WAIT_POLICY`.

    By default they wait in busy loops. On a machine with other work these loops take the cores from the threads that
    are waited for, and a training almost stops. OpenMP reads the variable when torch is imported, so programs call
    this before; child processes inherit it. The library does not call it: the setting affects the whole process.
    """
    for name, value in WAIT_POLICY.items():
        os.environ.setdefault(name, value)


def keep_memory() -> None:
    """Tell glibc's malloc to keep freed memory.

    A folded step frees and allocates the same hundreds of megabytes again and again, and the kernel would clear the
    pages each time. The setting affects the whole process, so programs call this, the library does not.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # C libraries other than glibc may not have it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**30)


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return 1 << 62
