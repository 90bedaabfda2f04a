"""Who holds what: images, targets, and each client's own train, validation and test indices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """A data set before anybody holds it.

    images uint8 `[N, C, H, W]` (C is 1 or 3); targets int64 `[N]`, or uint8 `[N, labels]` for multi-label data.
    `test` marks the official test images where a data set has them, `val` those declared for validation; `site`
    names each sample's owner where the data come with owners.
    """

    name: str
    images: NDArray[np.uint8]
    targets: NDArray[np.int64] | NDArray[np.uint8]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    test: NDArray[np.bool_] | None = None
    site: NDArray[np.str_] | None = None
    val: NDArray[np.bool_] | None = None

    @property
    def multilabel(self) -> bool:
        return self.targets.ndim == 2


@dataclass(frozen=True)
class Client:
    name: str
    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True)
class Federation:
    """The clients over one pool of images, on the compute device. One client on its own machine is a
    federation of one."""

    name: str
    images: Tensor  # uint8 [N, C, H, W]
    targets: Tensor  # int64 [N], or float [N, labels]
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    server_val: Indices = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def multilabel(self) -> bool:
        return self.targets.dim() == 2

    @property
    def test(self) -> Indices:
        """Global-test: the union of all clients' test data, in client order."""
        return np.concatenate([c.test for c in self.clients])

    def prepare(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 `[n, C, H, W]` -> normalised `[n, 3, H, W]`: grey images become three equal channels."""
        mean = torch.tensor(self.mean, dtype=dtype, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=dtype, device=images.device).view(-1, 1, 1)
        return ((images.to(dtype) / 255 - mean) / std).expand(-1, 3, -1, -1)

    def label_counts(self) -> NDArray[np.int64]:
        """Training samples of each class at each client, `[clients, classes]`."""
        targets = self.targets.cpu().numpy()
        if self.multilabel:
            return np.stack([targets[c.train].sum(0).astype(np.int64) for c in self.clients])
        return np.stack([np.bincount(targets[c.train], minlength=len(self.classes)) for c in self.clients])
