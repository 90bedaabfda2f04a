"""What several rooms' tests share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from perada.models import WeightReport, backbone

CPU = torch.device("cpu")


def assert_close_norm(a: Tensor, b: Tensor, tol: float = 1e-9, what: str = "") -> None:
    """‖a − b‖ <= tol · ‖b‖ (b is the oracle). A NaN anywhere fails."""
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} is not {tuple(b.shape)}"
    error, size = (a - b).norm().item(), b.norm().item()
    assert error <= tol * max(size, 1e-12), f"{what}: differs by {error:.3e}, norm {size:.3e}"


def assert_same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """The same names and, bit for bit, the same values."""
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def build_backbone(name: str, classes: int, weights: str, seed: int) -> tuple[nn.Module, WeightReport | None]:
    """Returns a network with its weights in place, and what they gave."""
    made = backbone(name, classes, seed)
    return made.net, made.load(weights)
