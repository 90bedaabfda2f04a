"""Further test sets: corrupted copies of Global-test, and the published ones of CIFAR-10."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError, unknown
from .cache import cache_folder
from .cifar import cifar10_1, cifar10_c
from .corruption_kinds import CORRUPTIONS
from .corruptions import SEVERITIES, Progress, corrupted
from .federation import Federation
from .source import Pixels

NAMES = ("shifted", *CORRUPTIONS, "cifar10.1", "cifar10-c")
_CACHED = 1 << 22  # bytes of a test set from which its corrupted copies are worth keeping on disk


def named_sets(
    federation: Federation,
    name: str,
    root: str = "",
    severities: Sequence[int] = SEVERITIES,
    progress: Progress | None = None,
) -> Iterator[tuple[Pixels, Tensor]]:
    """Yields uint8 images `[n, C, H, W]` and their targets: one set, or several whose scores are averaged.

    name: `fog` or `fog:3` for Global-test corrupted here; `shifted` or `shifted:3` for all 19 corruptions of it;
    `cifar10.1`; `cifar10-c`, `cifar10-c:fog` or `cifar10-c:fog:3` for the published files, below `root`.
    A name without a severity has all of `severities`. `progress` is called per corrupted copy.
    """
    head, *rest = name.split(":")
    if head not in NAMES:
        raise unknown("test set", name, ["local", "val", "global", *NAMES])
    kinds = list(CORRUPTIONS) if head in ("shifted", "cifar10-c") else [head]
    if head == "cifar10-c" and rest:
        kinds = [rest.pop(0)]
        if kinds[0] not in CORRUPTIONS:
            raise unknown("corruption", kinds[0], CORRUPTIONS)
    levels = list(severities)
    if head != "cifar10.1" and rest:
        if rest[0] not in map(str, SEVERITIES):
            raise InputError(f"{name!r}: write a severity from 1 to 5 after the colon")
        levels = [int(rest.pop(0))]
    if rest:
        raise InputError(f"{name!r}: {':'.join(rest)!r} has no meaning there")
    if head == "cifar10.1":
        return iter([_official(federation, *cifar10_1(root))])
    if head == "cifar10-c":
        return (_official(federation, *cifar10_c(root, kind, level)) for kind in kinds for level in levels)
    order = np.sort(federation.test)  # so another split of the same images gives the same copies, cached once
    images, back = federation.take(order).cpu().numpy(), np.searchsorted(order, federation.test)
    targets = federation.labels(federation.test)
    home = cache_folder() if images.nbytes >= _CACHED else None
    cache = home / "corruptions" if home else None
    return ((copy[back], targets) for _, _, copy in corrupted(images, kinds, levels, cache=cache, progress=progress))


def _official(federation: Federation, images: Pixels, labels: NDArray[np.int64]) -> tuple[Pixels, Tensor]:
    """Returns CIFAR-10's images and their targets on the federation's device; refuses a federation of other data."""
    if federation.multilabel or len(federation.classes) != 10 or federation.images.shape[1:] != images.shape[1:]:
        raise InputError("CIFAR-10's test sets need a model of 10 classes and 32×32 colour images")
    return images, torch.from_numpy(labels).to(federation.device)
