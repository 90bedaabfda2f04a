"""The data types of this package: a data set before it is split among clients, and one client's part of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..inputs import CLASSES, NAME, SITES

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
Targets = NDArray[np.int64] | NDArray[np.uint8]
UNKNOWN = 255  # among the targets of multi-label data: nobody says whether the label is present


@dataclass(frozen=True)
class Source:
    """Holds a data set before it is split among clients.

    images uint8 `[N, C, H, W]` (C is 1 or 3); targets int64 `[N]`, or for multi-label data uint8 `[N, labels]` of 0, 1
    and `UNKNOWN`.
    `test` marks official test images and `val` declared validation images, where a data set has them. `site` names
    each image's owner. `names` are the names of the image files, `skipped` the files that could not be read, and
    `remarks` are lines about what else of the files is not used.
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
    remarks: tuple[str, ...] = ()

    @property
    def multilabel(self) -> bool:
        return self.targets.ndim == 2


def check_classes(where: str, names: Sequence[str]) -> None:
    """Refuses more classes than `CLASSES`, a name longer than `NAME`, and a name that two classes have."""
    if len(names) > CLASSES:
        raise InputError(f"{where}: {len(names):,} classes, and the most is {CLASSES:,}: are these the labels?")
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InputError(f"{where}: two classes are named {twice[:NAME]!r}")
    _check_names(where, "class", names)


def check_sites(where: str, site: NDArray[np.str_] | None) -> None:
    """Refuses more sites than `SITES`, and a name longer than `NAME`."""
    names = [] if site is None else np.unique(site).tolist()
    if len(names) > SITES:
        raise InputError(f"{where}: {len(names):,} sites, and the most is {SITES:,}: are these the sites?")
    _check_names(where, "site", names)


def _check_names(where: str, kind: str, names: Sequence[str]) -> None:
    long = max(names, key=len, default="")
    if len(long) > NAME:
        raise InputError(f"{where}: the name of a {kind} has {len(long):,} characters, and the most is {NAME}")


@dataclass(frozen=True)
class Client:
    """Holds the indices of one client's own training, validation and test data."""

    name: str
    train: Indices
    val: Indices
    test: Indices
