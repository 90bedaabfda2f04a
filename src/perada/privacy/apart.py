"""Whether a network treats its samples one by one, as clipping per sample takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..lanes import LaneModel, Samples, State, Way, sample_gradients
from ..lanes.ways import drawn, tried

NEAR = 1e-3  # relative: the same kernels give the same numbers, but for the order in which they add


def check_apart(model: LaneModel, size: tuple[int, int]) -> None:
    """Refuses a network in which a sample changes the gradient of its neighbour; tried once, on random images."""
    if model.apart:
        return
    state = drawn(model).map(lambda t: t[:1])
    batch = tried(model, size)
    assert isinstance(batch.images, Tensor)
    images = batch.images.clone()
    images[2] *= 3
    first, second = (_gradients(model, state, images[[0, other]]) for other in (1, 2))
    away = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(first, second, strict=True))
    norm = sum(float(a.double().square().sum()) for a in first)
    if not away <= NEAR**2 * norm:
        raise InputError(
            "differential privacy needs a network that treats samples one by one, and in this one a sample changes its "
            "neighbour's gradient: replace the layer that mixes a batch, such as a norm of its own kind"
        )
    model.apart = True


def _gradients(model: LaneModel, state: State, images: Tensor) -> list[Tensor]:
    """Returns the gradients of the first of two samples."""
    none = torch.zeros(2, 1, dtype=torch.int64, device=model.device)
    batch = Samples(images, none, None, none[:, 0], (2,), (0,), 0)
    (piece,) = sample_gradients(model, state, batch, lambda logits, targets: logits.logsumexp(-1), Way(2))
    return [g[0] for g in piece.grads.values()]
