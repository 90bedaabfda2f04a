"""The machine: its cores, its device and arithmetic, and how much memory there is and a lane needs."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .conv import choose
from .layers import LaneBatchNorm, LaneConv2d
from .model import LaneModel
from .ops import plain

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
STATES = 6  # copies of a lane's parameters in a step: kept, computed with, gradients, new, input, output
REST = 1.3  # short-lived tensors, relative to those kept for the backward pass


def keep_memory() -> None:
    """Makes glibc's malloc keep freed memory.

    A folded step frees and requests the same hundreds of megabytes again and again, and each time the kernel would
    clear the pages. This is set for the whole process, so programs call it, not the library.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**30)


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int:
    """Returns the bytes of memory that are free on a device; a huge number where this is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return 1 << 62


def device_of(name: str) -> torch.device:
    """Returns the device of this name; `auto` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("RunOptions.device=cuda: torch sees no CUDA device here; use --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def precision_of(asked: str, device: torch.device) -> str:
    """Returns the precision; `auto` is the fastest one that costs no accuracy (docs/performance.md)."""
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


def bytes_per_lane(model: LaneModel, size: tuple[int, int], batch: int) -> int:
    """Returns the bytes that training one lane needs, with batches of `batch` images of this height and width."""
    if not any(isinstance(m, LaneBatchNorm) for m in model.module.modules()):
        # Tokens lie in [K·B, tokens, ...] here and [K, B·tokens, ...] there, so no shape tells what grows with a batch.
        two, four = (sum(_kept(model, (n, 3, *size), every=True).values()) for n in (2, 4))
        return int(REST * (four - two) * batch / 2) + STATES * model.initial().bytes_per_lane()
    kept = sum(_kept(model, (2, 3, *size)).values())
    return int(REST * kept * batch / 2) + STATES * model.initial().bytes_per_lane()


def _kept(model: LaneModel, shape: tuple[int, ...], every: bool = False) -> dict[int, int]:
    """Returns the bytes that one lane keeps for the backward pass of a batch: of its images, or of everything."""
    state = model.initial()
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        if every:  # a slice keeps all that it is a slice of
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        elif tensor.shape[:1] == images.shape[:1]:  # of the images, not a parameter
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    def columns(layer: LaneConv2d, inputs: tuple[Tensor], out: Tensor) -> None:
        """Adds what a trained convolution keeps instead of its input, where it is a product of columns."""
        (n_out, n_in, *taps), pixels = layer.weight.shape[-4:], out.shape[2] * out.shape[3]
        trained = layer.weight.dim() == 5 and taps != [1, 1] and layer.groups == 1
        if trained and choose(model.device.type, n_in, n_out, pixels) == "columns":
            kept[id(layer)] = len(out) * pixels * n_in * taps[0] * taps[1] * out.element_size()

    def as_is(tensor: Any) -> Any:
        return tensor

    dtype = next(iter(state.params.values())).dtype
    images = torch.zeros(shape, dtype=dtype, device=model.device)
    for p in state.params.values():
        p.requires_grad_()
    hooks = [m.register_forward_hook(columns) for m in model.module.modules() if isinstance(m, LaneConv2d)]
    with plain(model.context), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(remember, as_is):
        keys = torch.zeros(1, dtype=torch.int64, device=model.device)
        logits = model(state.map(torch.clone), images, norm="train", dropout=keys)
    del logits
    for hook in hooks:
        hook.remove()
    return kept
