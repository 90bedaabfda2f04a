"""Image files to pixels, and a cache of decoded images on disk.

Decoding thousands of photographs takes minutes; mapping their pixels from disk takes no time. A cache file is one
`.npy` of uint8 `[readable, 3, size, size]`. After the array come one bit per file (whether it could be read) and a
CRC-32. Its name is a hash of everything the pixels depend on, so it never has to be updated.
"""

import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from ..errors import InputError
from ..inputs import plain_file
from ..lanes.machine import cores, free_memory
from .cache import cache_folder, npy_header, whole_file
from .source import Mask, Pixels

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # the mean and std that ImageNet-trained backbones expect

FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "PPM", "TGA", "JPEG2000", "WEBP")  # no PostScript
PIXELS = 89_478_485  # of an image file; from more on Pillow warns of a decompression bomb
LONGEST = 8  # times the shorter side: what remains of the longer one before an image is scaled

FORMAT = 2  # of the cache files; a change of `read_image` must raise it
CACHE_FROM = 256  # fewer images are decoded in a moment, and would only litter the cache
_WINDOW = 1024  # images decoded ahead of the one being stored
_NAMED = 5  # files that an error names; it counts the others


def read_image(path: Path, size: int) -> Pixels:
    """Returns an image as RGB uint8 `[3, size, size]`: its shorter side is scaled to `size`, its middle is kept."""
    try:
        rgb = _middle(opened_image(plain_file(path), str(path)))
    except FileNotFoundError as error:
        raise InputError(f"no such image: {path}") from error
    scale = size / min(rgb.size)
    rgb = rgb.resize((max(size, round(rgb.width * scale)), max(size, round(rgb.height * scale))))
    left, top = (rgb.width - size) // 2, (rgb.height - size) // 2
    pixels: Pixels = np.asarray(rgb.crop((left, top, left + size, top + size)), np.uint8)
    return pixels.transpose(2, 0, 1)


def opened_image(file: Path | BytesIO, name: str) -> Image.Image:
    """Returns the first frame of an image file as RGB; refuses one that is damaged or has too many pixels."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if 0 < width * height <= PIXELS:
                pixels = _eight_bits(image)
                pixels.info.pop("transparency", None)  # Pillow warns of a palette's, and RGB has none
                return pixels.convert("RGB")
    except FileNotFoundError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # the warning may be an error
        raise InputError(f"cannot read image {name}: it has more than {PIXELS:,} pixels: scale it down") from error
    except Exception as error:  # a damaged file can break a reader in any way
        raise InputError(f"cannot read image {name}: it is damaged or not an image") from error
    raise InputError(f"cannot read image {name}: {width}×{height} pixels, not 1 to {PIXELS:,}: scale it")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scales scans of 16 bits per pixel: Pillow's own conversion would clip them to white."""
    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.asarray(image)
    if not np.isfinite(pixels).all():
        raise ValueError("pixels that are not numbers")
    top, out = 65535.0 if pixels.max() > 255 else 255.0, np.empty(pixels.shape, np.uint8)
    step = max(1, (1 << 20) // image.width)
    for rows in (slice(start, start + step) for start in range(0, image.height, step)):  # to save memory
        out[rows] = np.rint(pixels[rows].astype(np.float64).clip(0, top) / top * 255)
    return Image.fromarray(out)


def _middle(image: Image.Image) -> Image.Image:
    """Returns the middle of a very long image: scaled, the whole of it might need gigabytes."""
    most = LONGEST * min(image.size)
    left, top = (max(0, length - most) // 2 for length in image.size)
    box = (left, top, min(image.width, left + most), min(image.height, top + most))
    return image if box == (0, 0, *image.size) else image.crop(box)


def image_files(base: Path) -> list[Path]:
    """Returns every image file below a folder, sorted, but none that is hidden or in a hidden folder below it."""
    files = (p for p in base.rglob("*") if p.suffix.lower() in ENDINGS)
    return sorted(p for p in files if p.is_file() and not any(n.startswith(".") for n in p.relative_to(base).parts))


def pictures_in(paths: Sequence[Path]) -> list[Path]:
    """Returns these files, and for each folder the image files below it; refuses a folder without any."""
    files = list[Path]()
    for path in paths:
        below = image_files(path) if path.is_dir() else [path]
        if not below:
            raise InputError(f"{path} holds no images: name a folder with image files below it")
        files += below
    return files


def decode(
    files: Sequence[Path],
    base: Path,
    size: int,
    skip_bad: bool,
    advice: str = "fix them, or skip them with DataOptions.skip_bad=true",
) -> tuple[Pixels, Mask]:
    """Returns the pixels of the readable files, `[readable, 3, size, size]`, and which files these are, `[files]`.

    Files that cannot be read are refused by name, or skipped with `skip_bad`. The pixels may be mapped from the cache
    (copy on write). `base` is the folder that the names in the cache's key are relative to.
    """

    def check(readable: Mask) -> None:
        bad = [str(path) for path in compress(files, ~readable)]
        if bad and (not skip_bad or len(bad) == len(files)):
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            todo = advice if len(bad) < len(files) else "fix them, or give another folder"
            raise InputError(f"cannot read {len(bad)} of {len(files)} images, {', '.join(bad[:_NAMED])}{more}: {todo}")

    read = partial(_in_threads, partial(_read_or_none, size=size), files)
    key = ("files", *(f"{os.path.relpath(path, base)}\0{stamp(path)}" for path in files))
    return _cached(key, len(files), size, read, check)


def image_names(files: Sequence[Path], readable: Mask) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns `Source.names`, which stay the same when all files are moved together, and `Source.skipped`."""
    paths = [os.path.abspath(path) for path in compress(files, readable)]
    top = os.path.commonprefix(paths).rfind(os.sep) + 1  # noqa: RUF071 (cut at a folder's end)
    names = tuple(name[top:].replace(os.sep, "/") for name in paths)
    return names, tuple(str(path) for path in compress(files, ~readable))


def resized(images: Pixels, size: int, key: Iterable[str] | None = None) -> Pixels:
    """Returns images `[n, 3 or 1, h, w]` as `[n, 3, size, size]` by antialiased bicubic scaling, cached.

    key: says what the images are, if hashing them all would take too long.
    """
    if key is None:
        key = (str(images.shape), hashlib.sha256(np.ascontiguousarray(images).data).hexdigest())
    scale = partial(_in_threads, partial(_scale, size=size), images)
    return _cached(("resized", *key), len(images), size, scale, lambda readable: None)[0]


def _scale(pixels: Pixels, size: int) -> Pixels:
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)))
    scaled: Pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC), np.uint8)
    return scaled.transpose(2, 0, 1)


def stamp(path: Path) -> str:
    """Returns name, time and length of a file, which change when the file does."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return f"{path.name}\0missing"
    return f"{path.name}\0{stat.st_mtime_ns}\0{stat.st_size}"


def _in_threads(work: Callable[[Any], Pixels | None], items: Sequence[Any] | Pixels) -> Iterator[Pixels | None]:
    """Yields the results in order. Pillow releases the interpreter lock, so threads are enough."""
    with ThreadPoolExecutor(min(16, cores())) as pool:
        for start in range(0, len(items), _WINDOW):
            yield from pool.map(work, items[start : start + _WINDOW])


def _read_or_none(path: Path, size: int) -> Pixels | None:
    try:
        return read_image(path, size)
    except InputError:
        return None


# The cache.


def _cached(
    key: Iterable[str],
    count: int,
    size: int,
    read: Callable[[], Iterable[Pixels | None]],
    check: Callable[[Mask], None],
) -> tuple[Pixels, Mask]:
    """Returns the pixels that `read` yields, `[readable, 3, size, size]`, and which of them are not None, `[count]`.

    `check` may refuse the latter, before anything is stored. Two processes that want the same images both decode
    them, and the later file replaces an equal one. If nothing can be written, the images are kept in memory.
    """
    folder, length = cache_folder() if count >= CACHE_FROM else None, 3 * count * size**2
    if folder is not None:
        digest = hashlib.sha256(f"{FORMAT}\0{PIL.__version__}\0{size}\0{count}".encode())
        for part in key:
            digest.update(b"\n" + part.encode(errors="surrogateescape"))
        path = folder / f"images-{digest.hexdigest()}.npy"
        stored = _load(path, count, size)
        if stored is None and length < shutil.disk_usage(folder).free:
            with suppress(OSError):  # no rights, or a full disk
                _store(path, count, size, read(), check)
            stored = _load(path, count, size)
        if stored is not None:
            check(stored[1])
            return stored
    if length > (free := free_memory(torch.device("cpu"))):
        raise InputError(
            f"{count:,} images of {size}×{size} pixels take {length:,} bytes, and {free:,} are free: choose a smaller "
            "DataOptions.size"
        )
    images, readable, number = np.empty((count, 3, size, size), np.uint8), np.zeros(count, np.bool_), 0
    for i, pixels in enumerate(read()):
        if pixels is not None:
            images[number], readable[i] = pixels, True
            number += 1
    check(readable)
    return images[:number], readable


def _store(path: Path, count: int, size: int, items: Iterable[Pixels | None], check: Callable[[Mask], None]) -> None:
    with whole_file(path) as f:
        readable, crc = np.zeros(count, np.bool_), 0
        f.write(npy_header((count, 3, size, size)))
        for i, pixels in enumerate(items):
            if pixels is not None:
                data = pixels.tobytes()
                crc = zlib.crc32(data, crc)
                f.write(data)
                readable[i] = True
        check(readable)
        bits = np.packbits(readable).tobytes()
        f.write(bits + zlib.crc32(bits, crc).to_bytes(4, "little"))
        f.seek(0)
        f.write(npy_header((int(readable.sum()), 3, size, size)))


def _load(path: Path, count: int, size: int) -> tuple[Pixels, Mask] | None:
    """Returns a whole and undamaged cache file, mapped copy-on-write (torch warns about a read-only array), or None."""
    length = (count + 7) // 8
    try:
        with path.open("rb") as f:
            f.seek(-length - 4, os.SEEK_END)
            bits, checksum = f.read(length), f.read(4)
            readable = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
            shape, end = (int(readable.sum()), 3, size, size), f.tell()
            header = npy_header(shape)
            f.seek(0)
            if f.read(len(header)) != header or end != len(header) + math.prod(shape) + length + 4:
                return None
        images = np.memmap(path, np.uint8, "c", len(header), shape)
    except (OSError, ValueError):  # ValueError: no image at all
        return None
    return (images, readable) if zlib.crc32(bits, zlib.crc32(images.data)).to_bytes(4, "little") == checksum else None
