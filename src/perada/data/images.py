"""Image files to pixels, and a cache of decoded images on disk.

Decoding thousands of photographs takes minutes, mapping their pixels from disk none. A cache file is one `.npy`
of uint8 `[kept, 3, size, size]`; behind the array follow one bit for each file asked for (could it be read?) and
a CRC-32. Its name is a hash of everything the pixels depend on, so that it never has to be updated.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError
from ..machine import cores

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # the mean and std that ImageNet-trained backbones expect

FORMAT = 1  # of the cache files; a change of `read_image` must raise it
CACHE_FROM = 256  # fewer images are decoded in a moment, and would only litter the cache
STALE = 24 * 3600.0  # seconds after which a temporary file must be a killed process's
_HEADER = 128  # bytes before the pixels
_WINDOW = 1024  # images decoded ahead of the one being stored
_NAMED = 5  # files that a refusal names; it counts the others


def read_image(path: Path, size: int) -> Pixels:
    """RGB uint8 `[3, size, size]`: the shorter side is scaled to `size`, the middle is kept."""
    try:
        with Image.open(path) as image:
            rgb = _eight_bits(image).convert("RGB")
    except FileNotFoundError as error:
        raise InputError(f"no such image: {path}") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read image {path}: it is damaged or not an image") from error
    scale = size / min(rgb.size)
    rgb = rgb.resize((max(size, round(rgb.width * scale)), max(size, round(rgb.height * scale))))
    left, top = (rgb.width - size) // 2, (rgb.height - size) // 2
    pixels: Pixels = np.asarray(rgb.crop((left, top, left + size, top + size)), np.uint8)
    return pixels.transpose(2, 0, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scans of 16 bits a pixel, scaled: Pillow's own conversion would clip them to white."""
    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.asarray(image, np.float64)
    top = 65535.0 if pixels.max() > 255 else 255.0
    return Image.fromarray(np.rint(pixels.clip(0, top) / top * 255).astype(np.uint8))


def image_files(base: Path) -> list[Path]:
    """Every image file below a folder, in a fixed order; nothing that is hidden, or in a hidden folder below it."""
    found = (p for p in base.rglob("*") if p.suffix.lower() in ENDINGS and not _hidden(p.relative_to(base)))
    return sorted(p for p in found if p.is_file())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def decode(
    files: Sequence[Path],
    base: Path,
    size: int,
    skip_bad: bool,
    advice: str = "mend them, or pass over them with --set data.skip_bad=true",
) -> tuple[Pixels, Mask]:
    """Pixels `[kept, 3, size, size]` of the files that can be read, and which of the n files these are, `[n]`.

    Files that cannot be read are refused by name, or passed over with `skip_bad`. The pixels may be mapped from
    the cache (copy on write). `base` is the folder that the names in the cache's key are relative to.
    """

    def check(kept: Mask) -> None:
        bad = unread(files, kept)
        if bad and (not skip_bad or len(bad) == len(files)):
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            todo = advice if len(bad) < len(files) else "mend them, or give another folder"
            raise InputError(f"cannot read {len(bad)} of {len(files)} images, {', '.join(bad[:_NAMED])}{more}: {todo}")

    return cached(("files", *_stamps(files, base)), len(files), size, partial(_read_all, files, size), check)


def unread(files: Sequence[Path], kept: Mask) -> tuple[str, ...]:
    """The files that `decode` could not read."""
    return tuple(str(path) for path, good in zip(files, kept, strict=True) if not good)


def names_of(files: Sequence[Path], kept: Mask) -> tuple[str, ...]:
    """The files that were read, by names that stay the same when all are moved together."""
    whole = [os.path.abspath(path) for path, good in zip(files, kept, strict=True) if good]
    top = os.path.commonprefix(whole).rfind(os.sep) + 1  # noqa: RUF071 (cut at a folder's end)
    return tuple(name[top:].replace(os.sep, "/") for name in whole)


def resized(images: Pixels, size: int, key: Iterable[str] | None = None) -> Pixels:
    """`[n, 3, h, w]` or `[n, 1, h, w]` -> `[n, 3, size, size]` by antialiased bicubic scaling, cached.

    `key` says what the images are where hashing them all would take too long.
    """
    if key is None:
        key = (str(images.shape), hashlib.sha256(np.ascontiguousarray(images).data).hexdigest())

    def items() -> Iterator[Pixels | None]:
        with ThreadPoolExecutor(min(16, cores())) as pool:
            for start in range(0, len(images), _WINDOW):
                yield from pool.map(partial(_scale, size=size), images[start : start + _WINDOW])

    return cached(("resized", *key), len(images), size, items, lambda kept: None)[0]


def _scale(pixels: Pixels, size: int) -> Pixels:
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)))
    found: Pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC), np.uint8)
    return found.transpose(2, 0, 1)


def require_files(listing: Path, rows: Sequence[int], files: Sequence[Path]) -> None:
    """Refuse a table that names images which are not there: a wrong folder is best told by the first row."""
    for row, path in zip(rows, files, strict=True):
        if not path.is_file():
            raise InputError(
                f"{listing}: row {row}: no image {path}: correct the path, or pass over missing images "
                "with --set data.skip_bad=true"
            )


def stamp(path: Path) -> str:
    """Name, time and length of a file: another string when the file is another one."""
    try:
        found = path.stat()
    except OSError:
        return f"{path.name}\0missing"
    return f"{path.name}\0{found.st_mtime_ns}\0{found.st_size}"


def _stamps(files: Sequence[Path], base: Path) -> Iterator[str]:
    for path in files:
        name = path.relative_to(base) if path.is_relative_to(base) else path
        yield f"{name.as_posix()}\0{stamp(path)}"


def _read_all(files: Sequence[Path], size: int) -> Iterator[Pixels | None]:
    """Pixels or None, in the order of the files. Pillow lets go of the interpreter, so threads are enough."""
    with ThreadPoolExecutor(min(16, cores())) as pool:
        for start in range(0, len(files), _WINDOW):
            yield from pool.map(partial(_read_or_none, size=size), files[start : start + _WINDOW])


def _read_or_none(path: Path, size: int) -> Pixels | None:
    try:
        return read_image(path, size)
    except InputError:
        return None


# The cache.


def cache_folder() -> Path | None:
    """`$PERADA_CACHE` or `~/.cache/perada`; None where there can be no such folder."""
    try:
        folder = Path(os.environ.get("PERADA_CACHE") or "~/.cache/perada").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    return folder


def cached(
    key: Iterable[str],
    count: int,
    size: int,
    items: Callable[[], Iterable[Pixels | None]],
    check: Callable[[Mask], None],
) -> tuple[Pixels, Mask]:
    """The pixels `[3, size, size]` that `items` yields, as one array `[kept, 3, size, size]`, and which of the
    `count` items are no None, `[count]`. `check` may refuse the latter, before anything is stored.

    Two processes that want the same images both decode them, and the later file replaces an equal one. Where
    nothing can be written the images are held in memory.
    """
    folder = cache_folder() if count >= CACHE_FROM else None
    if folder is None:
        return _in_memory(count, size, items(), check)
    digest = hashlib.sha256(f"{FORMAT}\0{PIL.__version__}\0{size}\0{count}".encode())
    for part in key:
        digest.update(b"\n" + part.encode(errors="surrogateescape"))
    path = folder / f"images-{digest.hexdigest()}.npy"
    found = _load(path, count, size)
    if found is None:
        try:
            _store(path, count, size, items(), check)
        except OSError:  # no rights, or a full disk
            return _in_memory(count, size, items(), check)
        found = _load(path, count, size)
    if found is None:
        return _in_memory(count, size, items(), check)
    check(found[1])
    return found


def _in_memory(
    count: int, size: int, items: Iterable[Pixels | None], check: Callable[[Mask], None]
) -> tuple[Pixels, Mask]:
    images = np.empty((count, 3, size, size), np.uint8)
    kept = np.zeros(count, np.bool_)
    number = 0
    for i, pixels in enumerate(items):
        if pixels is not None:
            images[number] = pixels
            kept[i] = True
            number += 1
    check(kept)
    return images[:number], kept


def _header(kept: int, size: int) -> bytes:
    """An npy header (version 1.0) of a length that does not depend on the number of images, known only at the end."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({kept}, 3, {size}, {size}), }}"
    return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11).encode() + b"\n"


def _store(path: Path, count: int, size: int, items: Iterable[Pixels | None], check: Callable[[Mask], None]) -> None:
    """Write under a name of our own, then rename: no reader ever sees a part, and a kill leaves only the part."""
    _sweep(path.parent)
    handle, name = tempfile.mkstemp(prefix=".images-", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as f:
            kept = np.zeros(count, np.bool_)
            crc = 0
            f.write(bytes(_HEADER))
            for i, pixels in enumerate(items):
                if pixels is not None:
                    data = pixels.tobytes()
                    crc = zlib.crc32(data, crc)
                    f.write(data)
                    kept[i] = True
            check(kept)
            bits = np.packbits(kept).tobytes()
            f.write(bits + zlib.crc32(bits, crc).to_bytes(4, "little"))
            f.seek(0)
            f.write(_header(int(kept.sum()), size))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left; a living one writes often enough not to look stale."""
    for part in folder.glob(".images-*.part"):
        try:
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()
        except OSError:
            continue  # somebody else was faster


def _load(path: Path, count: int, size: int) -> tuple[Pixels, Mask] | None:
    """A whole and undamaged cache file mapped copy-on-write (a read-only array would make torch warn), or None."""
    tail = (count + 7) // 8 + 4
    try:
        with path.open("rb") as f:
            length = f.seek(0, os.SEEK_END)
            if length < _HEADER + tail:
                return None
            f.seek(length - tail)
            bits, wanted = f.read(tail - 4), f.read(4)
            kept = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
            number = int(kept.sum())
            pixels = number * 3 * size * size
            f.seek(0)
            if number == 0 or length != _HEADER + pixels + tail or f.read(_HEADER) != _header(number, size):
                return None
            crc, left = 0, pixels + len(bits)
            while left:
                data = f.read(min(left, 1 << 22))
                if not data:
                    return None
                crc, left = zlib.crc32(data, crc), left - len(data)
            if crc.to_bytes(4, "little") != wanted:
                return None
        return np.memmap(path, np.uint8, "c", _HEADER, (number, 3, size, size)), kept
    except (OSError, ValueError):
        return None
