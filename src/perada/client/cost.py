"""What a round costs a client: measured on the method's own client update, with random images.

FLOPs are counted as the operations run, forward and backward. Memory is that of all tensors alive at the same time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..adapters import Residual, adapt, fitting
from ..client.trainer import Train, Trainer
from ..data import Client, Federation
from ..lanes import State
from ..methods import Method
from ..models import Backbone

IMAGES, BATCH, SIZE = 64, 16, 32  # of the client that is measured: its images, per mini-batch, and pixels per side
REPEATS = 3


@dataclass(frozen=True)
class RoundCost:
    """One client, one round: `images` images, one local epoch, mini-batches of `batch`."""

    bytes_up: int
    bytes_down: int
    gflop: float  # 10⁹ operations; a multiplication and an addition are two
    peak_bytes: int  # of the tensors alive at once, without the frozen network and the images
    seconds: float  # the median on this machine
    images: int = IMAGES
    batch: int = BATCH


def round_cost(
    method: Method, made: Backbone, classes: int, images: int = IMAGES, batch: int = BATCH, *, adapt_from: str = ""
) -> RoundCost:
    """Returns what one round of a method costs one client, on the CPU in float32.

    adapt_from: the first stage that is adapted; empty for all. The frozen stages before it run in every pass.
    """
    adapter = (fitting(made.net, made.head) or Residual()) if method.parts.adapters else None
    trained = method.parts.trains
    model = adapt(made.net, adapter=adapter, trained=trained, head=made.head, start=adapt_from)
    model = model.to("cpu", torch.float32)
    federation = _client(images, classes, made.size or SIZE)
    options = Train(rounds=1, epochs=1, batch=batch, lr=1e-3)
    _, received, kept = method.init(model)

    def update() -> State:
        trainer = Trainer(model, federation, [0], 0, 0, options)
        return method.client_update(trainer, received, kept)[0]

    upload = update()  # warms up
    with FlopCounterMode(display=False) as counter:
        update()
    with Peak() as memory:
        update()
    seconds = sorted(_seconds(update) for _ in range(REPEATS))[REPEATS // 2]
    return RoundCost(
        bytes_up=upload.bytes_per_lane(),
        bytes_down=received.bytes_per_lane() if upload.lanes else 0,
        gflop=counter.get_total_flops() / 1e9,
        peak_bytes=memory.peak,
        seconds=seconds,
        images=images,
        batch=batch,
    )


def _client(images: int, classes: int, size: int) -> Federation:
    """Returns one client with random images."""
    draw, none = np.random.default_rng(0), np.zeros(0, np.int64)
    pixels = draw.integers(0, 256, (images, 3, size, size), dtype=np.uint8)
    return Federation(
        name="random",
        images=torch.from_numpy(pixels),
        targets=torch.from_numpy(draw.integers(0, classes, images)),
        classes=tuple(map(str, range(classes))),
        clients=(Client("client", np.arange(images), none, none),),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made inside it and alive at the same time; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), before)
        return out

    def _add(self, storage: Any, inputs: list[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in inputs:  # a view, or changed in place
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self._known[key] = weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.now -= size
        del self._known[key]
