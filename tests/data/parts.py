"""Data sets made of labels alone and counts of who holds what, for the tests of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perada.data import Client, Source
from perada.data.partition import largest_remainder


def source_of(targets: Any, **more: Any) -> Source:
    """A data set with these targets; an image's pixels are its own number in base 256."""
    targets = np.asarray(targets)
    number = np.arange(len(targets))
    images = np.stack([number // 256, number % 256], 1).astype(np.uint8).reshape(-1, 1, 1, 2)
    kind = np.uint8 if targets.ndim == 2 else np.int64
    many = targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1
    return Source("made", images, targets.astype(kind), tuple(f"c{i}" for i in range(many)), **more)


def counts_of(clients: Sequence[Client], labels: np.ndarray, split: str) -> np.ndarray:
    return np.stack([np.bincount(labels[getattr(c, split)], minlength=int(labels.max()) + 1) for c in clients])


def off(train: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples off the largest-remainder rounding of each client's own proportions, and total variation."""
    shares = train / train.sum(1, keepdims=True)
    wanted = np.stack([largest_remainder(p, int(n)) for p, n in zip(shares, found.sum(1), strict=True)])
    distance = 0.5 * np.abs(found / np.maximum(found.sum(1, keepdims=True), 1) - shares).sum(1)
    return np.abs(found - wanted), distance
