"""The data types of this package: a data set before it is split among clients, and one client's part of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
Targets = NDArray[np.int64] | NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """Holds a data set before it is split among clients.

    images uint8 `[N, C, H, W]` (C is 1 or 3); targets int64 `[N]`, or uint8 `[N, labels]` for multi-label data.
    `test` marks official test images and `val` declared validation images, where a data set has them. `site` names
    each image's owner. `names` are the names of the image files, `skipped` the files that could not be read.
    """

    name: str
    images: Pixels
    targets: Targets
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    test: Mask | None = None
    site: NDArray[np.str_] | None = None
    val: Mask | None = None
    names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def multilabel(self) -> bool:
        return self.targets.ndim == 2


@dataclass(frozen=True)
class Client:
    """Holds the indices of one client's own training, validation and test data."""

    name: str
    train: Indices
    val: Indices
    test: Indices
