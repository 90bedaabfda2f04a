"""Estimators for the constants of Theorems 3 and 4: pure functions of gradients, as rows of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

ITERATIONS = 8  # of the power iteration
STEP = 1e-3  # of the finite difference, relative to the length of the parameters


def variance(batches: Tensor) -> Tensor:
    """Returns `E‖g̃ − E g̃‖²` from mini-batch gradients `[..., K, d]`, without bias; K is at least 2."""
    return (batches - batches.mean(-2, keepdim=True)).square_().sum((-2, -1)) / (batches.shape[-2] - 1)


def squared_norm(batches: Tensor, noise: Tensor | None = None) -> Tensor:
    """Returns `‖E g̃‖²` from mini-batch gradients `[..., K, d]`, without bias: it may be a little below zero.

    noise: their variance, if it is known.
    """
    noise = variance(batches) if noise is None else noise
    return batches.mean(-2).square_().sum(-1) - noise / batches.shape[-2]


def diversity(batches: Tensor, noise: Tensor | None = None) -> float:
    """Returns γ̄, the mean of `‖∇L_m − ∇L‖²` over clients, from mini-batch gradients `[M, K, d]`, without bias.

    noise: their variance, if it is known.
    """
    clients, count = batches.shape[:2]
    means, noise = batches.mean(1), variance(batches) if noise is None else noise
    spread = (means - means.mean(0)).square_().sum(-1).mean()
    return max(0.0, float(spread - (1 - 1 / clients) * noise.mean() / count))


def smoothness(gradient: Callable[[Tensor], Tensor], at: Tensor, iterations: int = ITERATIONS, seed: int = 0) -> Tensor:
    """Returns the largest curvature at a point, `max |eigenvalue|` of the Hessian, by a power iteration.

    gradient: of points `[K, d]`, row by row. at: `[K, d]`. Gradients one small step apart are compared. It is a lower
    estimate of the smallest Lipschitz constant of the gradient, which bounds the curvature everywhere.
    """
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randn(at.shape, generator=draw, dtype=torch.float64).to(at)
    direction /= direction.norm(dim=1, keepdim=True)
    base, step = gradient(at), STEP * at.norm(dim=1, keepdim=True).clamp(min=1)
    largest = torch.zeros(len(at), dtype=at.dtype, device=at.device)
    for _ in range(iterations):  # in place: 20 clients' points of a ResNet-18 have 200 MB
        image = gradient(direction.mul_(step).add_(at)).sub_(base).div_(step)
        length = image.norm(dim=1)
        largest = torch.maximum(largest, length)
        direction = image.div_(length.clamp(min=1e-30).unsqueeze(1))
    return largest


def slope(rounds: Sequence[float], values: Sequence[float]) -> float | None:
    """Returns the slope of log(value) over log(round) by least squares; None with fewer than two positive values."""
    points = [(math.log(t), math.log(v)) for t, v in zip(rounds, values, strict=True) if t > 0 and v > 0]
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns the mean of the values so far, at each value."""
    return [float(v) for v in np.cumsum(values) / np.arange(1, len(values) + 1)]
