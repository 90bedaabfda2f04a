"""Data sets by name, and the options of one: how it is read and split. These are the keys of `[data]`.

Other packages add data sets as `package.module:function` or as entry points of `GROUP`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ..errors import InputError
from ..fields import check_fields, made
from ..plugins import called, check, find
from .arrays import npz
from .cifar import cifar10, cifar100, stl10
from .digits import digits
from .folder import folder, office_home
from .manifest import chexpert, manifest
from .source import Source

GROUP = "perada.datasets"
GIVEN = "given"  # what a run folder calls data, images or a network that were given from Python
SIDE = 4096  # pixels that an image may be scaled to
_TABLES = (".npz", ".csv", ".tsv")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataOptions:
    """Which data set is read, and how it is split among clients."""

    name: str = _option("digits", "the data set: a known name, package.module:function, or an installed entry point")
    root: str = _option("", "folder or file with the data")
    clients: int = _option(20, "number of simulated clients; with partition=site there is one per site")
    partition: Literal["dirichlet", "iid", "shards", "site"] = _option("dirichlet", "who gets which training samples")
    alpha: float = _option(0.1, "concentration of partition=dirichlet; a smaller one makes clients less alike")
    cap: bool = _option(True, "a client that has N/M samples takes no more")
    min_per_class: int = _option(0, "training samples of each class for every client, before Dir(α) deals the rest")
    shards: int = _option(2, "runs of samples, sorted by label, that a client gets with partition=shards")
    meta_min: int = _option(2000, "multi-label: training images from which a combination of labels is its own class")
    val: float = _option(0.1, "share of the data (of the official training data, if it has a test set) for validation")
    test: float = _option(0.2, "share of the data for testing, where the data set has no test set")
    server_val: float = _option(0.0, "share of the training data that the server holds, labelled, for its guard")
    seed: int = _option(0, "seed of the split; the seed of a run does not change who holds what")
    size: int = _option(64, "pixels that image files are scaled to; arrays (CIFAR, .npz) keep their size")
    fit: Literal["crop", "pad", "stretch"] = _option(
        "crop", "image files that are not square: cut the longer side, pad the shorter one with black, or stretch"
    )
    labels: tuple[str, ...] = _option((), "multi-label: use only these labels; empty uses all")
    site: str = _option("site", "column of a manifest that names the owner of an image")
    uncertain: Literal["ones", "zeros", "mask", "ignore"] = _option(
        "ones", "what CheXpert's -1 means: present, absent, or not known (mask); ignore drops the image"
    )
    normalise: Literal["data", "imagenet", "backbone", "auto"] = _option(
        "data", "whose mean and std: these, or what it expects; auto: the backbone's if it has any, else the data's"
    )
    augment: Literal["none", "flip", "crop", "resized-crop"] = _option("none", "random views of training images")
    resident: Literal["auto", "yes", "no"] = _option("auto", "keep images on the compute device; no streams them")
    skip_bad: bool = _option(False, "skip images that cannot be read")

    def __post_init__(self) -> None:
        check_fields(self)
        check("data set", GROUP, self.name, SOURCES)
        if self.name == "digits" and self.root:
            raise ValueError("name=digits is part of the package and reads no path: for your own images use 'folder'")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")
        for name, least in (("clients", 1), ("min_per_class", 0), ("shards", 1), ("meta_min", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.min_per_class and self.partition != "dirichlet":
            raise ValueError(f"min_per_class needs DataOptions.partition=dirichlet, not {self.partition}")
        for name in ("val", "test", "server_val"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.val + self.test + self.server_val >= 1:
            raise ValueError(
                "val + DataOptions.test + DataOptions.server_val must be below 1, to leave something to train on"
            )
        if self.size < 8:
            raise ValueError(f"size must be at least 8 pixels, not {self.size}")
        if self.size > SIDE:
            raise ValueError(
                f"size must be at most {SIDE} pixels, not {self.size}: one image would take {3 * self.size**2:,} bytes"
            )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Returns the options, or refuses a wrong name or value in one line."""
        try:
            return made(cls, options)
        except ValueError as error:
            raise InputError(f"DataOptions.{error}") from error


Reader = Callable[[DataOptions], Source]


def own(options: DataOptions, asked: Sequence[str] = ()) -> Source:
    """Reads a user's own data: a folder of images, a `.npz` file, or a CSV or TSV manifest.

    asked: the labels of a federation with several per image; a manifest may know only some of them.
    """
    ending = Path(options.root).suffix.lower()
    if ending == ".npz":
        return npz(options.root)
    if ending in _TABLES:
        return manifest(options.root, options.size, options.skip_bad, options.labels, options.site, options.fit, asked)
    return folder(options.root, options.size, options.skip_bad, options.fit)


def _folders(read: Reader) -> Reader:
    """Returns a reader of a data set that comes as folders, or as an `.npz` file or manifest."""
    return lambda options: own(options) if Path(options.root).suffix.lower() in _TABLES else read(options)


def data_home() -> str:
    """Returns where `perada data get` puts data sets: $PERADA_DATA, or a folder in the user's cache."""
    return os.environ.get("PERADA_DATA") or str(Path.home() / ".cache" / "perada" / "data")


def _given(options: DataOptions) -> Source:
    """Refuses to read data that only the caller has."""
    raise InputError("these data were given from Python: give them again, as federation=")


SOURCES: dict[str, Reader] = {
    "digits": lambda options: digits(),
    "cifar10": lambda options: cifar10(options.root or data_home()),
    "cifar100": lambda options: cifar100(options.root or data_home()),
    "stl10": lambda options: stl10(options.root or data_home(), options.size),
    "office-home": _folders(lambda o: office_home(o.root or data_home(), o.size, o.skip_bad, o.fit)),
    "chexpert": _folders(lambda o: chexpert(o.root or data_home(), o.size, o.uncertain, o.skip_bad, o.fit)),
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
    folders = [Path(root), Path(root).parent] if root else []
    for home in (*folders, Path(data_home())):
        if any((home / file).exists() for file in _FILES[name]) or home.name in _FILES[name]:
            return str(home)
    return None
