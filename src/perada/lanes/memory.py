"""The memory that training a lane needs, measured on a step with two images."""

from typing import Any

import torch
from torch import Tensor

from .conv import choose
from .layers import LaneConv2d
from .model import LaneModel
from .ops import plain

STATES = 6  # copies of a lane's parameters in a step: kept, computed with, gradients, new, given, returned
REST = 1.3  # short-lived tensors, relative to those kept for the backward pass


def bytes_per_lane(model: LaneModel, size: tuple[int, int], batch: int) -> int:
    """Returns the bytes that training one lane needs, with batches of `batch` images of this height and width."""
    state = model.initial()
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == images.shape[:1]:  # of the images, not a parameter
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    def columns(layer: LaneConv2d, given: tuple[Tensor], out: Tensor) -> None:
        """Adds what a trained convolution keeps instead of its input, where it is a product of columns."""
        (outputs, inputs, *taps), pixels = layer.weight.shape[-4:], out.shape[2] * out.shape[3]
        trained = layer.weight.dim() == 5 and taps != [1, 1] and layer.groups == 1
        if trained and choose(model.device.type, inputs, outputs, pixels) == "columns":
            kept[id(layer)] = len(out) * pixels * inputs * taps[0] * taps[1] * out.element_size()

    def as_is(tensor: Any) -> Any:
        return tensor

    dtype = next(iter(state.params.values())).dtype
    images = torch.zeros(2, 3, *size, dtype=dtype, device=model.device)
    for p in state.params.values():
        p.requires_grad_()
    hooks = [m.register_forward_hook(columns) for m in model.module.modules() if isinstance(m, LaneConv2d)]
    with plain(model.context), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(remember, as_is):
        keys = torch.zeros(1, dtype=torch.int64, device=model.device)
        logits = model(state.map(torch.clone), images, norm="train", dropout=keys)
    del logits
    for hook in hooks:
        hook.remove()
    return int(REST * sum(kept.values()) * batch / 2) + STATES * state.bytes_per_lane()
