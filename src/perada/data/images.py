"""Image files to pixels, and a cache of decoded images on disk.

Decoding thousands of photographs takes minutes; mapping their pixels from disk takes no time. A cache file is one
`.npy` of uint8 `[readable, 3, size, size]`. After the array come the share of its pixels that each file lost (float32),
one bit per file (whether it could be read) and a CRC-32. Its name is a hash of everything the pixels depend on, so it
never has to be updated.
"""

import hashlib
import math
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from io import BufferedReader, BytesIO, FileIO
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError
from ..inputs import plain_file
from ..lanes.machine import cores, free_memory
from .cache import cache_folder, npy_header, whole_file
from .dicom import DICOM, EXTRA, dicom_image, has_pydicom, is_dicom
from .fit import Fit, fitted, lost_share, scaled
from .source import Mask, Pixels

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # the mean and std that ImageNet-trained backbones expect

FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "PPM", "TGA", "JPEG2000", "WEBP")  # no PostScript
PIXELS = 89_478_485  # of an image file; from more on Pillow warns of a decompression bomb
LOST = 0.01  # share of an image's pixels from which it is worth saying that they are lost

FORMAT = 3  # of the cache files; a change of `read_image` must raise it
CACHE_FROM = 256  # fewer images are decoded in a moment, and would only litter the cache
_WINDOW = 1024  # images decoded ahead of the one being stored
_NAMED = 5  # files that an error names; it counts the others


class Decoded(NamedTuple):
    """Image files as pixels."""

    images: Pixels  # of the readable files, [readable, 3, size, size]
    readable: Mask  # [files]
    lost: NDArray[np.float32]  # share of its pixels that each readable file lost, [readable]


def read_image(path: Path, size: int | tuple[int, int], fit: Fit = "crop") -> Pixels:
    """Returns an image as RGB uint8 `[3, height, width]`; size: both sides, or height and width."""
    return read_and_measure(path, size, fit)[0]


def read_and_measure(path: Path, size: int | tuple[int, int], fit: Fit = "crop") -> tuple[Pixels, float]:
    """Returns what `read_image` does, and the share of the image's pixels that it lost."""
    height, width = (size, size) if isinstance(size, int) else size
    try:
        plain_file(path)
        dicom = path.suffix.lower() not in ENDINGS and is_dicom(path)
        rgb = dicom_image(path, PIXELS) if dicom else opened_image(path, str(path))
    except FileNotFoundError as error:
        raise InputError(f"no such image: {path}") from error
    return fitted(rgb, height, width, fit), lost_share(rgb, height, width, fit)


class _Bounded(BufferedReader):
    """A file whose reads take no more memory than it has bytes, whatever length a damaged header says."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path))
        self._size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, self._size))


def opened_image(file: Path | BytesIO, name: str) -> Image.Image:
    """Returns the first frame of an image file as RGB; refuses one that is damaged or has too many pixels."""
    try:
        content = _Bounded(file) if isinstance(file, Path) else file
        with content, Image.open(content, formats=FORMATS) as image:
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


def image_files(base: Path) -> list[Path]:
    """Returns every image file below a folder, sorted, but none that is hidden or in a hidden folder below it."""
    return image_and_other_files(base)[0]


def image_and_other_files(base: Path) -> tuple[list[Path], list[Path]]:
    """Returns `image_files`, and all other files that are not hidden."""
    shown = (p for p in base.rglob("*") if not any(n.startswith(".") for n in p.relative_to(base).parts))
    files = sorted(p for p in shown if p.is_file())
    images = [p for p in files if p.suffix.lower() in ENDINGS | DICOM]
    return images, [p for p in files if p.suffix.lower() not in ENDINGS | DICOM]


def about_others(others: Sequence[Path]) -> str:
    """Returns a line that counts the files of a folder that are not images."""
    kinds = Counter(p.suffix.lower() or "no ending" for p in others)
    named = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_NAMED))
    return f"{count_of(len(others), 'file')} skipped, by the ending not images: {named}"


def about_lost(lost: Sequence[float] | NDArray[np.float32], fit: Fit) -> str:
    """Returns a line that says how much of the images was cut off; empty if it is nothing to speak of."""
    cut = [float(share) for share in lost if share > LOST]
    if not cut:
        return ""
    mean, most = (f"{100 * share:.0f}%" for share in (float(np.mean(cut)), max(cut)))
    amount = f"{mean} of the pixels" if mean == most else f"{mean} of their pixels on average and at most {most}"
    whose = "has another shape than the network's: it loses" if len(cut) == 1 else "have another shape: they lose"
    return (
        f"{len(cut):,} of {count_of(len(lost), 'image')} {whose} {amount} at the sides (DataOptions.fit={fit}; "
        "pad or stretch keeps them)"
    )


def count_of(number: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def decode(
    files: Sequence[Path],
    base: Path,
    size: int,
    skip_bad: bool,
    advice: str = "fix them, or skip them with DataOptions.skip_bad=true",
    fit: Fit = "crop",
) -> Decoded:
    """Returns the pixels of the readable files, and which files these are.

    Files that cannot be read are refused by name, or skipped with `skip_bad`. The pixels may be mapped from the cache
    (copy on write). `base` is the folder that the names in the cache's key are relative to.
    """
    dicom = sum(path.suffix.lower() in DICOM for path in files)
    if dicom and not has_pydicom():
        raise InputError(f"{dicom:,} of {count_of(len(files), 'image')} below {base} are DICOM files: {EXTRA}")

    def check(readable: Mask) -> None:
        bad = [str(path) for path in compress(files, ~readable)]
        if bad and (not skip_bad or len(bad) == len(files)):
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            todo = advice if len(bad) < len(files) else "fix them, or give another folder"
            raise InputError(f"cannot read {len(bad)} of {len(files)} images, {', '.join(bad[:_NAMED])}{more}: {todo}")

    read = partial(_in_threads, partial(_read_or_none, size=size, fit=fit), files)
    reader = (f"pydicom {version('pydicom')}",) if dicom else ()
    key = ("files", fit, *reader, *(f"{os.path.relpath(path, base)}\0{stamp(path)}" for path in files))
    return _cached(key, len(files), size, read, check)


class Noted(TypedDict):
    """The fields of a `Source` that say something about its files."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    remarks: tuple[str, ...]


def noted(files: Sequence[Path], decoded: Decoded, fit: Fit, others: Sequence[Path] = ()) -> Noted:
    """Returns what a `Source` says about its files; the names stay the same when all files are moved together."""
    paths = [os.path.abspath(path) for path in compress(files, decoded.readable)]
    top = os.path.commonprefix(paths).rfind(os.sep) + 1  # noqa: RUF071 (cut at a folder's end)
    remarks = (about_others(others) if others else "", about_lost(decoded.lost, fit))
    return {
        "names": tuple(name[top:].replace(os.sep, "/") for name in paths),
        "skipped": tuple(str(path) for path in compress(files, ~decoded.readable)),
        "remarks": tuple(line for line in remarks if line),
    }


def resized(images: Pixels, size: int, key: Iterable[str] | None = None) -> Pixels:
    """Returns images `[n, 3 or 1, h, w]` as `[n, 3, size, size]` by antialiased bicubic scaling, cached.

    key: says what the images are, if hashing them all would take too long.
    """
    if key is None:
        key = (str(images.shape), hashlib.sha256(np.ascontiguousarray(images).data).hexdigest())
    scale = partial(_in_threads, partial(_scale, size=size), images)
    return _cached(("resized", *key), len(images), size, scale, lambda readable: None).images


def _scale(pixels: Pixels, size: int) -> tuple[Pixels, float]:
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)))
    small: Pixels = np.asarray(scaled(image, size, size), np.uint8)
    return small.transpose(2, 0, 1), 0.0


def stamp(path: Path) -> str:
    """Returns name, time and length of a file, which change when the file does."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return f"{path.name}\0missing"
    return f"{path.name}\0{stat.st_mtime_ns}\0{stat.st_size}"


Read = tuple[Pixels, float] | None  # an image and the share that it lost; None if it cannot be read


def _in_threads(work: Callable[[Any], Read], items: Sequence[Any] | Pixels) -> Iterator[Read]:
    """Yields the results in order. Pillow releases the interpreter lock, so threads are enough."""
    with ThreadPoolExecutor(min(16, cores())) as pool:
        for start in range(0, len(items), _WINDOW):
            yield from pool.map(work, items[start : start + _WINDOW])


def _read_or_none(path: Path, size: int, fit: Fit) -> Read:
    try:
        return read_and_measure(path, size, fit)
    except InputError:
        return None


# The cache.


def _cached(
    key: Iterable[str],
    count: int,
    size: int,
    read: Callable[[], Iterable[Read]],
    check: Callable[[Mask], None],
) -> Decoded:
    """Returns the images that `read` yields, and which of them are not None.

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
            check(stored.readable)
            return stored
    if length > (free := free_memory(torch.device("cpu"))):
        raise InputError(
            f"{count:,} images of {size}×{size} pixels take {length:,} bytes, and {free:,} are free: choose a smaller "
            "DataOptions.size"
        )
    images, readable, lost = np.empty((count, 3, size, size), np.uint8), np.zeros(count, np.bool_), list[float]()
    for i, item in enumerate(read()):
        if item is not None:
            images[len(lost)], readable[i] = item[0], True
            lost.append(item[1])
    check(readable)
    return Decoded(images[: len(lost)], readable, np.array(lost, np.float32))


def _store(path: Path, count: int, size: int, items: Iterable[Read], check: Callable[[Mask], None]) -> None:
    with whole_file(path) as f:
        readable, lost, crc = np.zeros(count, np.bool_), np.zeros(count, "<f4"), 0
        f.write(npy_header((count, 3, size, size)))
        for i, item in enumerate(items):
            if item is not None:
                data = item[0].tobytes()
                crc = zlib.crc32(data, crc)
                f.write(data)
                readable[i], lost[i] = True, item[1]
        check(readable)
        notes = lost.tobytes() + np.packbits(readable).tobytes()
        f.write(notes + zlib.crc32(notes, crc).to_bytes(4, "little"))
        f.seek(0)
        f.write(npy_header((int(readable.sum()), 3, size, size)))


def _load(path: Path, count: int, size: int) -> Decoded | None:
    """Returns a whole and undamaged cache file, mapped copy-on-write (torch warns about a read-only array), or None."""
    length = 4 * count + (count + 7) // 8
    try:
        with path.open("rb") as f:
            f.seek(-length - 4, os.SEEK_END)
            notes, checksum = f.read(length), f.read(4)
            readable = np.unpackbits(np.frombuffer(notes[4 * count :], np.uint8), count=count).astype(np.bool_)
            shape, end = (int(readable.sum()), 3, size, size), f.tell()
            header = npy_header(shape)
            f.seek(0)
            if f.read(len(header)) != header or end != len(header) + math.prod(shape) + length + 4:
                return None
        images = np.memmap(path, np.uint8, "c", len(header), shape)
    except (OSError, ValueError):  # ValueError: no image at all
        return None
    if zlib.crc32(notes, zlib.crc32(images.data)).to_bytes(4, "little") != checksum:
        return None
    return Decoded(images, readable, np.frombuffer(notes[: 4 * count], "<f4")[readable].astype(np.float32))
