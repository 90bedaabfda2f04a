"""Small training problems on K lanes: a model, a start for each lane, data for each lane and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada import adapt
from perada.adapters import Residual
from perada.lanes import Batch, LaneModel, State, fold, gather, key_of
from perada.models.resnet import ResNet, resnet

K, B = 4, 5
LENGTHS = [7, 20, 1, 13]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@dataclass(frozen=True)
class Problem:
    net: nn.Module
    model: LaneModel
    start: State
    images: Tensor  # [K, steps, B, 3, H, W]
    targets: Tensor  # [K, steps, B]
    weights: Tensor  # [K, steps, B]

    def batches(self, step: int, lanes: Tensor) -> Batch:
        keys = torch.tensor([key_of(0, "client", int(k)) for k in lanes])
        images, targets, weights = (t[lanes, step] for t in (self.images, self.targets, self.weights))
        return Batch(images.flatten(0, 1), targets, weights, fold(keys, step))

    def part(self, lanes: Sequence[int]) -> tuple[State, object]:
        """The start and the batches of some lanes, as a problem of their own."""
        index = torch.tensor(lanes)
        return gather(self.start, lanes), lambda step, k: self.batches(step, index[k])

    def lane(self, k: int) -> dict[str, Tensor]:
        return {n: t[k] for n, t in {**self.start.params, **self.start.buffers}.items()}

    def of_lane(self, k: int, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(self.images[k, i], self.targets[k, i], self.weights[k, i]) for i in range(steps)]


def noisy(state: State, scale: float = 0.1) -> State:
    """Other parameters in every lane: adapters that start at 1e-4 would hide what they do."""
    draw = torch.Generator().manual_seed(1)
    noise = {n: scale * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in state.params.items()}
    return State({n: p + noise[n] for n, p in state.params.items()}, state.buffers)


def tiny() -> nn.Module:
    """The ImageNet stem, a stage of two blocks and one with a downsample."""
    torch.manual_seed(0)
    return ResNet((2, 1), (4, 6), classes=4, small_stem=False)


def problem(
    net: str = "resnet8",
    trained: str = "adapter",
    adapter: str | None = "residual",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    base, pixels = (resnet("resnet8", classes=4), 8) if net == "resnet8" else (tiny(), 16)
    model = adapt(base, adapter=Residual(dropout) if adapter else None, trained=trained)
    model = model.to("cpu", dtype)
    draw = torch.Generator().manual_seed(2)
    shape = (K, max(LENGTHS), B)
    images = torch.randn(*shape, 3, pixels, pixels, generator=draw, dtype=torch.float64)
    targets = torch.randint(4, shape, generator=draw)
    weights = 2 * torch.rand(shape, generator=draw, dtype=torch.float64)
    start = noisy(model.initial(K))
    return Problem(base, model, start, images.to(dtype), targets, weights.to(dtype))
