"""What a frozen prefix makes of images, computed once: in every round and for every lane it is the same.

Many images' features go into a file of the cache, which is mapped, so that memory stays bounded and the next run or
message starts at once. Few are kept in memory. A table's name is a hash of everything that its numbers depend on:
pixels, normalisation, the prefix and its weights, the type, and the number of threads.
"""

import hashlib
import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..lanes import Features, LaneModel
from ..lanes.machine import free_memory
from .cache import cache_folder, whole_file

FILE_FROM = 256  # images; fewer are computed in a moment
PIECE = 64  # images prepared at a time: a multiple of a prefix's own pieces
SHARE = 4  # a table in memory takes at most this part of what is free
NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}  # types that are written to files


@dataclass(frozen=True)
class Table:
    """The features of images, by number."""

    values: Tensor  # [N, C, H, W]: in memory, on a GPU, or mapped from a file
    digest: str  # of the prefix
    key: str  # of all that the values depend on

    def take(self, index: Tensor) -> Features:
        """Returns the features of these images, int64 of any shape, in one batch."""
        return Features(self.values[index.flatten().to(self.values.device)], self.digest)

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def keep(
    model: LaneModel, images: Tensor, which: Tensor, prepare: Callable[[Tensor], Tensor], about: str
) -> Table | None:
    """Returns the features of images `[N, C, H, W]` (bytes), of those with the numbers `which`, int64 `[n]`.

    None if they fit nowhere, or if the model has no prefix. prepare: normalises some images. about: says how.
    """
    prefix = model.prefix
    if prefix is None or not len(which):
        return None

    def some(part: Tensor) -> Tensor:
        return prefix(model.computed(prepare(images[part]))).values

    one, parts = some(which[:1]), torch.split(which.to(images.device), PIECE)
    shape, dtype = (len(which), *one.shape[1:]), one.dtype
    hashed = hashlib.sha256(f"{prefix.digest}\0{about}\0{shape}\0{dtype}\0{tuple(images.shape[1:])}\0".encode())
    hashed.update(f"{model.device}\0{torch.get_num_threads()}\0".encode())
    for part in parts:
        hashed.update(images[part].cpu().contiguous().numpy().data)
    key, values = hashed.hexdigest(), None
    if model.device.type == "cpu" and len(which) >= FILE_FROM:
        values = _mapped(key, shape, dtype, lambda: map(some, parts))
    if values is None and math.prod(shape) * one.element_size() <= free_memory(model.device) // SHARE:
        values = torch.empty(shape, dtype=dtype, device=model.device)
        for place, part in zip(torch.split(values, PIECE), parts, strict=True):
            place.copy_(some(part))
    return None if values is None else Table(values, prefix.digest, key)


def _mapped(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Callable[[], Iterator[Tensor]]
) -> Tensor | None:
    """Returns the values in a file of the cache, which is written if it is not there; None if none can be written."""
    folder, kind = cache_folder(), NUMPY.get(dtype)
    if folder is None or kind is None:
        return None
    path = folder / f"features-{key}.bin"
    values = _load(path, shape, kind)
    if values is None and math.prod(shape) * np.dtype(kind).itemsize < shutil.disk_usage(folder).free:
        with suppress(OSError):  # no rights, or a full disk
            _store(path, pieces())
        values = _load(path, shape, kind)
    return values


def _store(path: Path, pieces: Iterator[Tensor]) -> None:
    """Writes the values and, behind them, their CRC-32."""
    with whole_file(path) as file:
        crc = 0
        for piece in pieces:
            data = piece.contiguous().numpy().tobytes()
            crc = zlib.crc32(data, crc)
            file.write(data)
        file.write(crc.to_bytes(4, "little"))


def _load(path: Path, shape: tuple[int, ...], kind: type[np.generic]) -> Tensor | None:
    """Returns the values of a whole and undamaged file, mapped copy-on-write; None if there is none."""
    length = math.prod(shape) * np.dtype(kind).itemsize
    try:
        if path.stat().st_size != length + 4:
            return None
        values = np.memmap(path, kind, "c", 0, shape)
        with path.open("rb") as file:
            file.seek(length)
            checksum = file.read(4)
    except (OSError, ValueError):
        return None
    return torch.from_numpy(values) if zlib.crc32(values.data).to_bytes(4, "little") == checksum else None
