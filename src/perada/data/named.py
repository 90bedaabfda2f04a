"""Data sets by name. Other packages add theirs as `package.module:function` or as entry points of `GROUP`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..plugins import called, find
from .arrays import npz
from .cifar import cifar10, cifar100, stl10
from .digits import digits
from .folder import folder, office_home
from .manifest import chexpert, manifest
from .source import Source

if TYPE_CHECKING:
    from .options import DataOptions

Reader = Callable[["DataOptions"], Source]

GROUP = "perada.datasets"
GIVEN = "given"  # what a run folder calls data, images or a network that were given from Python
_TABLES = (".npz", ".csv", ".tsv")


def own(options: DataOptions) -> Source:
    """Reads a user's own data: a folder of images, a `.npz` file, or a CSV or TSV manifest."""
    ending = Path(options.root).suffix.lower()
    if ending == ".npz":
        return npz(options.root)
    if ending in _TABLES:
        return manifest(options.root, options.size, options.skip_bad, options.labels, options.site)
    return folder(options.root, options.size, options.skip_bad)


def _folders(read: Reader) -> Reader:
    """A data set that comes as folders, or as an `.npz` or manifest of it."""
    return lambda options: own(options) if Path(options.root).suffix.lower() in _TABLES else read(options)


def data_home() -> str:
    """Returns where `perada data get` puts data sets: $PERADA_DATA, or a folder in the user's cache."""
    return os.environ.get("PERADA_DATA") or str(Path.home() / ".cache" / "perada" / "data")


def _given(options: DataOptions) -> Source:
    raise InputError("these data were given from Python: give them again, as federation=")


SOURCES: dict[str, Reader] = {
    "digits": lambda options: digits(),
    "cifar10": lambda options: cifar10(options.root or data_home()),
    "cifar100": lambda options: cifar100(options.root or data_home()),
    "stl10": lambda options: stl10(options.root or data_home(), options.size),
    "office-home": _folders(lambda o: office_home(o.root or data_home(), o.size, o.skip_bad)),
    "chexpert": _folders(lambda o: chexpert(o.root or data_home(), o.size, o.uncertain, o.skip_bad)),
    "folder": own,
    GIVEN: _given,
}


def read_source(options: DataOptions) -> Source:
    """Reads the data set that `options.name` names, and checks it."""
    read = find("data set", GROUP, options.name, SOURCES)
    source = read(options) if options.name in SOURCES else called("data set", options.name, read, options)
    what = f"data set {options.name!r} must return a perada.data.Source"
    if not isinstance(source, Source):
        raise InputError(f"{what}, not {type(source).__name__}")
    shape, targets = source.images.shape, source.targets
    if source.images.dtype != "uint8" or len(shape) != 4 or shape[1] not in (1, 3) or len(targets) != shape[0]:
        raise InputError(
            f"{what} with uint8 images [n, 1 or 3, H, W] and n targets, "
            f"not {source.images.dtype} {list(shape)} and {len(targets)}"
        )
    return source


_FILES = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10.npz"),
    "cifar100": ("cifar-100-python", "cifar-100-binary", "cifar100.npz"),
    "stl10": ("stl10_binary",),
    "cifar10.1": ("CIFAR-10.1", "cifar10.1_v6_data.npy"),
    "cifar10-c": ("CIFAR-10-C",),
}


def place_of(name: str, root: str) -> str | None:
    """Returns the folder that holds an official data set: at or above the clients' data, or in `data_home()`."""
    own = [Path(root), Path(root).parent] if root else []
    for home in (*own, Path(data_home())):
        if any((home / file).exists() for file in _FILES[name]) or home.name in _FILES[name]:
            return str(home)
    return None
