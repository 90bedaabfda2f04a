"""Corrupted copies of a test set: the 15 + 4 corruptions of CIFAR-10-C at five severities, for any images.

The names and the parameters are those of the published benchmark (Hendrycks & Dietterich, "Benchmarking Neural
Network Robustness to Common Corruptions and Perturbations", ICLR 2019; the parameter set of CIFAR-10-C, for 32 px).
The code is our own, so images are corrupted in the same way, but not bit for bit as in the published files. Frost is
a texture made here (`frost_sheet`), not a photograph.

Other sizes: s = max(1, shorter side / 32). Widths in pixels are multiplied by s (blurs, glass reach, smears, flakes,
drops, ice crystals) and so are never below those at 32 px, which are about one pixel. Shares of the image (zoom,
elastic, pixelate, fog) follow the size by themselves, noise and colour do not depend on it, and JPEG keeps its 8×8
blocks. On very small images neighbouring severities can coincide (pixelate at 8×8: 7, 7, 6, 6, 5 pixels).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..lanes import rng_of
from ..lanes.machine import cores
from .cache import npy_header, whole_file
from .corruption_kinds import CORRUPTIONS

Images = NDArray[np.uint8]  # [n, C, H, W]
Progress = Callable[[int, int], None]  # copies made, copies asked for

FORMAT = 2  # part of the cache's key: raise it when any corruption gives other pixels
SEVERITIES = (1, 2, 3, 4, 5)
BLOCK = 64  # images of 32×32 worked on at once: they fit in a core's cache; no result depends on it


def corrupt(images: Images, name: str, severity: int, *, seed: int = 0) -> Images:
    """Returns the images uint8 `[n, C, H, W]`, corrupted; C is 1 or 3, severity 1 to 5.

    An image's result depends on the image, its place in the array, name, severity and seed alone. The draws do not
    depend on the severity: an image is smeared at the same angle at all five, and its noise differs in strength.
    """
    [(_, _, copy)] = corrupted(images, [name], [severity], seed=seed)
    return copy


def corrupted(
    images: Images,
    names: Sequence[str],
    severities: Sequence[int],
    *,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, int, Images]]:
    """Yields `corrupt` for every name at every severity, in that order, made by one thread per core.

    cache: a folder that keeps the copies, so that they are made once. At most two copies are in memory: the next one is
    made while one is used.
    """
    _check(images, names, severities)
    folder = None if cache is None else _folder(cache, images, seed)
    pairs = list(product(names, severities))
    return _copies(images, pairs, seed, folder, progress)


def _copies(
    images: Images,
    pairs: Sequence[tuple[str, int]],
    seed: int,
    folder: Path | None,
    progress: Progress | None,
) -> Iterator[tuple[str, int, Images]]:
    pool = ThreadPoolExecutor(cores())  # numpy, scipy and Pillow release the interpreter lock while they work

    def start(name: str, severity: int) -> Images | list[Future[Images]]:
        """Returns the copy if the cache has it, else the blocks that are being made of it."""
        stored = None if folder is None else _read(folder / f"{name}-{severity}.npy", images)
        if stored is not None:
            return stored
        return [pool.submit(_corrupt, images, block, name, severity, seed) for block in _blocks(images)]

    try:
        started = [start(*pair) for pair in pairs[:1]]
        for number, (name, severity) in enumerate(pairs, 1):
            started += [start(*pair) for pair in pairs[number : number + 1]]
            copy = started.pop(0)
            if isinstance(copy, list):
                copy = np.concatenate([images[:0], *(block.result() for block in copy)])
                if folder is not None:
                    _write(folder / f"{name}-{severity}.npy", copy)
            if progress is not None:
                progress(number, len(pairs))
            yield name, severity, copy
    finally:
        pool.shutdown(cancel_futures=True)


def _check(images: Images, names: Sequence[str], severities: Sequence[int]) -> None:
    for name in names:
        if name not in CORRUPTIONS:
            raise unknown("corruption", name, CORRUPTIONS)
    for severity in severities:
        if severity not in SEVERITIES:
            raise InputError(f"severity must be 1 to 5, not {severity}")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        raise InputError(
            f"corruptions need uint8 images [n, 1 or 3, H, W] of at least 8×8 pixels, "
            f"not {images.dtype} {list(images.shape)}"
        )


def _blocks(images: Images) -> list[slice]:
    size = max(1, BLOCK * 1024 // (images.shape[2] * images.shape[3]))
    return [slice(start, min(start + size, len(images))) for start in range(0, len(images), size)]


def _corrupt(images: Images, block: slice, name: str, severity: int, seed: int) -> Images:
    kind = CORRUPTIONS[name]
    streams = [rng_of("corruption", int(seed), name, i) for i in range(block.start, block.stop)]
    x = images[block].astype(np.float32, order="C") / np.float32(255)
    out = kind.apply(x, streams, *kind.levels[severity - 1])
    pixels: Images = np.rint(out.clip(0, 1) * np.float32(255)).astype(np.uint8)
    return pixels


# The cache: cache/<sha256 of images, seed and format>/<name>-<severity>.npy.


def _folder(cache: Path, images: Images, seed: int) -> Path:
    digest = hashlib.sha256(f"perada corruptions {FORMAT} {seed} {images.shape}\n".encode())
    digest.update(np.ascontiguousarray(images).data)
    folder = cache / digest.hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the cache folder {folder}: {error.strerror}; choose another") from error
    return folder


def _read(path: Path, images: Images) -> Images | None:
    """Returns the kept copy; None if there is none, or one that is not whole.

    The header is compared, not parsed, so a damaged one cannot make numpy unpickle, allocate or warn.
    """
    header = npy_header(images.shape)
    try:
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                return None
            copy = np.fromfile(file, np.uint8)
    except OSError:
        return None
    return copy.reshape(images.shape) if copy.size == images.size else None


def _write(path: Path, copy: Images) -> None:
    with suppress(OSError), whole_file(path) as file:  # a full disk costs time later, not this result
        np.save(file, copy, allow_pickle=False)
