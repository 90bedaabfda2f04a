"""Corrupted copies of a test set: the 15 + 4 corruptions of CIFAR-10-C at five severities, for any images.

The names and the numbers below are those of the published benchmark (Hendrycks & Dietterich, "Benchmarking Neural
Network Robustness to Common Corruptions and Perturbations", ICLR 2019; the parameter set of CIFAR-10-C, for 32 px).
The code is our own, so images are corrupted in the same way, but not bit for bit as in the published files. Frost is
a texture made here (`frost_sheet`), not a photograph.

Other sizes: s = max(1, shorter side / 32). Widths in pixels are multiplied by s (blurs, glass reach, smears, flakes,
drops, ice crystals) and so are never below those at 32 px, which are about one pixel. Shares of the image (zoom,
elastic, pixelate, fog) follow the size by themselves, noise and colour do not depend on it, and JPEG keeps its 8×8
blocks. On very small images neighbouring severities can coincide (pixelate at 8×8: 7, 7, 6, 6, 5 pixels).
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..lanes import rng_of
from ..lanes.machine import cores
from . import corruption_kinds as kinds
from .cache import npy_header, whole_file
from .corruption_kinds import Level
from .corruption_textures import Pixels, Streams

Images = NDArray[np.uint8]  # [n, C, H, W]
Progress = Callable[[int, int], None]  # copies made, copies asked for

FORMAT = 2  # part of the cache's key: raise it when any corruption gives other pixels
SEVERITIES = (1, 2, 3, 4, 5)
BLOCK = 64  # images of 32×32 worked on at once: they fit in a core's cache; no result depends on it


class Kind(NamedTuple):
    """One corruption: its function and its parameters at severities 1 to 5."""

    apply: Callable[[Pixels, Level, Streams], Pixels]
    levels: tuple[Level, Level, Level, Level, Level]


CORRUPTIONS: dict[str, Kind] = {
    "gaussian_noise": Kind(kinds.gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": Kind(kinds.shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": Kind(kinds.impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": Kind(kinds.defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": Kind(kinds.glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "motion_blur": Kind(kinds.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Kind(kinds.zoom_blur, ((1.05, 0.01), (1.1, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01))),
    "snow": Kind(
        kinds.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Kind(kinds.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": Kind(kinds.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": Kind(kinds.brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": Kind(kinds.contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": Kind(
        kinds.elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Kind(kinds.pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": Kind(kinds.jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
    # The four that the benchmark sets aside for choosing settings.
    "speckle_noise": Kind(kinds.speckle_noise, ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,))),
    "gaussian_blur": Kind(kinds.gaussian_blur, ((0.4,), (0.6,), (0.7,), (0.8,), (1,))),
    "spatter": Kind(
        kinds.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
    ),
    "saturate": Kind(kinds.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}


def corrupt(images: Images, name: str, severity: int, *, seed: int = 0) -> Images:
    """Returns the images uint8 `[n, C, H, W]`, corrupted; C is 1 or 3, severity 1 to 5.

    An image's result depends on the image, its place in the array, name, severity and seed alone. The draws do not
    depend on the severity: an image is smeared at the same angle at all five, and its noise differs in strength.
    """
    _check(images, [name], [severity])
    out = np.empty_like(images, order="C")
    for block in _blocks(images):
        out[block] = _corrupt(images, block, name, severity, seed)
    return out


def corrupted(
    images: Images,
    names: Sequence[str],
    severities: Sequence[int],
    *,
    seed: int = 0,
    workers: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, int, Images]]:
    """Yields `corrupt` for every name at every severity, in that order, on `workers` threads (None: one per core).

    cache: a folder that keeps the copies, so that they are made once. Few copies are in memory at once: the next ones
    are made while one is used.
    """
    _check(images, names, severities)
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}")
    folder = None if cache is None else _folder(cache, images, seed)
    pairs = list(product(names, severities))
    return _corrupted(images, pairs, seed, workers or cores(), folder, progress)


def _corrupted(
    images: Images,
    pairs: list[tuple[str, int]],
    seed: int,
    workers: int,
    folder: Path | None,
    progress: Progress | None,
) -> Iterator[tuple[str, int, Images]]:
    """Threads, not processes: numpy, scipy and Pillow release the interpreter lock while they work."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="corruption")
    waiting: deque[list[Future[Images]] | Images] = deque()
    started = 0
    try:
        for done, (name, severity) in enumerate(pairs, 1):
            while started < len(pairs) and len(waiting) < 2:
                waiting.append(_start(pool, images, *pairs[started], seed, folder))
                started += 1
            copy = waiting.popleft()
            if isinstance(copy, list):  # the blocks that are being made of it
                copy = np.concatenate([images[:0], *(block.result() for block in copy)])
                if folder is not None:
                    _write(folder / f"{name}-{severity}.npy", copy)
            if progress is not None:
                progress(done, len(pairs))
            yield name, severity, copy
    finally:
        pool.shutdown(cancel_futures=True)


def _start(
    pool: ThreadPoolExecutor, images: Images, name: str, severity: int, seed: int, folder: Path | None
) -> list[Future[Images]] | Images:
    """Returns the copy if the cache has it, else the blocks that will make it."""
    kept = None if folder is None else _read(folder / f"{name}-{severity}.npy", images)
    if kept is not None:
        return kept
    return [pool.submit(_corrupt, images, block, name, severity, seed) for block in _blocks(images)]


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
    out = kind.apply(x, kind.levels[severity - 1], streams)
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
