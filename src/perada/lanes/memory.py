"""What a lane costs: measured on a step with two images, so that nothing has to be guessed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fast import plain
from .model import LaneModel

STATES = 6  # copies of a lane's parameters in a step: kept, computed with, gradients, new, and as they came and go
REST = 1.3  # what is alive for a moment beside what waits for the backward pass


def bytes_per_lane(model: LaneModel, size: tuple[int, int], batch: int) -> int:
    """Memory that training one lane takes, with batches of `batch` images of this height and width."""
    state = model.initial()
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == images.shape[:1]:  # of the images, not a parameter
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    def as_is(tensor: Any) -> Any:
        return tensor

    dtype = next(iter(state.params.values())).dtype
    images = torch.zeros(2, 3, *size, dtype=dtype, device=model.device)
    for p in state.params.values():
        p.requires_grad_()
    with plain(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(remember, as_is):
        keys = torch.zeros(1, dtype=torch.int64, device=model.device)
        logits = model(state.map(torch.clone), images, norm="train", dropout=keys)
    del logits
    return int(REST * sum(kept.values()) * batch / 2) + STATES * state.bytes_per_lane()
