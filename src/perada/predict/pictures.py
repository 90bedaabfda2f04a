"""Reads picture files as a network's images, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import Federation
from ..data.fit import Fit
from ..data.images import about_lost, about_others, image_and_other_files, read_and_measure
from ..errors import InputError
from ..inputs import user_path

Images = Tensor | str | Path | Sequence[str | Path]
TOGETHER = 1 << 22  # pixels of pictures that are predicted at once
Say = Callable[[str], None]


def silent(text: str) -> None:
    """Does nothing."""


def files_in(paths: str | Path | Sequence[str | Path], say: Say = silent) -> list[Path]:
    """Returns the image files, and those in the folders; says what else is there."""
    files, others = list[Path](), list[Path]()
    for path in map(user_path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.is_dir():
            files.append(path)
            continue
        images, rest = image_and_other_files(path)
        if not images:
            found = f" ({about_others(rest)})" if rest else ""
            raise InputError(f"no images in {path}{found}")
        files += images
        others += rest
    if others:
        say(about_others(others))
    return files


def batches(images: Images, federation: Federation, fit: Fit, say: Say = silent) -> Iterator[Tensor]:
    """Yields images as the network's, uint8 `[n, C, H, W]`, and says at the end what pictures lose at their sides.

    images: files and folders of them, or such a tensor.
    """
    channels, height, width = shape = federation.images.shape[1:]
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.shape[1:] != shape:
            raise InputError(f"images must be uint8 [n, {', '.join(map(str, shape))}]")
        yield images
        return
    files, lost = files_in(images, say), list[float]()
    if not files:
        raise InputError("no images: give at least one")
    together = max(1, TOGETHER // (height * width))
    for start in range(0, len(files), together):
        read = [read_and_measure(path, (height, width), fit) for path in files[start : start + together]]
        pixels = np.stack([pixels for pixels, _ in read])
        lost += [share for _, share in read]
        if channels == 1:
            pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
        yield torch.from_numpy(pixels)
    if remark := about_lost(lost, fit):
        say(remark)
