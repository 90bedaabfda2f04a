"""Sources, partitions and batches: from a `[data]` section to a `Federation`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..errors import InputError, unknown
from .arrays import npz
from .augment import AUGMENT
from .chexpert import chexpert
from .cifar import cifar10, cifar100, stl10, stl10_public
from .corruptions import SEVERITIES
from .digits import digits, glyphs
from .federation import Client, Federation, Source, blank
from .folder import folder, unlabelled
from .images import IMAGENET, Pixels, read_image, resized
from .manifest import manifest
from .office import office_home
from .partition import LEAST
from .split import fingerprint, split
from .testsets import named_sets

__all__ = [
    "GIVEN",
    "PUBLIC",
    "SEVERITIES",
    "SOURCES",
    "VALIDATION",
    "Client",
    "DataOptions",
    "Federation",
    "Source",
    "blank",
    "build_federation",
    "data_home",
    "named_sets",
    "own",
    "place_of",
    "public_images",
    "read_image",
]


@dataclass(frozen=True)
class DataOptions:
    """The `[data]` section."""

    name: str = "digits"
    root: str = ""
    clients: int = 20
    partition: Literal["dirichlet", "iid", "shards", "site"] = "dirichlet"
    alpha: float = 0.1
    cap: bool = True  # a client with N/M samples takes no more
    min_per_class: int = 0  # training samples of each class that everybody gets before the rest is dealt out by Dir(α)
    shards: int = 2  # runs of samples sorted by label that a client gets under partition=shards
    meta_min: int = 2000  # multi-label: training images of a combination of labels that make it a class of its own
    val: float = 0.1  # share of the data (of the official training data, where there is a test set) to choose by
    test: float = 0.2  # share of the data for testing, where a source has no test set of its own
    server_val: float = 0.0  # share of the training data the server holds, labelled, for distill.guard=server
    seed: int = 0  # of the split; the run's own seed does not change who holds what
    size: int = 64  # pixels that image files are scaled to; arrays (CIFAR, .npz) keep their own size
    labels: tuple[str, ...] = ()  # multi-label: only these; empty is all
    site: str = "site"  # the column of a manifest that says who holds an image
    uncertain: Literal["ones", "zeros", "ignore"] = "ones"  # what CheXpert's -1 means; ignore drops the image
    normalise: Literal["data", "imagenet"] = "data"  # whose mean and std; imagenet's is what its backbones expect
    augment: Literal["none", "flip", "crop", "resized-crop"] = "none"  # random views of training images
    resident: Literal["auto", "yes", "no"] = "auto"  # images on the compute device, or streamed to it
    skip_bad: bool = False  # pass over images that cannot be read

    def __post_init__(self) -> None:
        if self.name not in SOURCES:
            raise unknown("data source", self.name, SOURCES)
        if self.name == "digits" and self.root:
            raise ValueError("name=digits is embedded and reads no path: for your own images use the preset 'folder'")
        if self.clients < 1:
            raise ValueError(f"clients must be at least 1, not {self.clients}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")
        for name, least in (("min_per_class", 0), ("shards", 1), ("meta_min", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.min_per_class and self.partition != "dirichlet":
            raise ValueError(f"min_per_class is for data.partition=dirichlet, not {self.partition}")
        for name in ("val", "test", "server_val"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.val + self.test + self.server_val >= 1:
            raise ValueError("val + data.test + data.server_val must leave something to train on (below 1)")
        if self.size < 8:
            raise ValueError(f"size must be at least 8 pixels, not {self.size}")


def own(options: DataOptions) -> Source:
    """What `--data PATH` gives: a folder of images, a `.npz` file, or a CSV or TSV manifest."""
    ending = Path(options.root).suffix.lower()
    if ending == ".npz":
        return npz(options.root)
    if ending in (".csv", ".tsv"):
        return manifest(options.root, options.size, options.skip_bad, options.labels, options.site)
    return folder(options.root, options.size, options.skip_bad)


def _laid_out(load: Callable[[DataOptions], Source]) -> Callable[[DataOptions], Source]:
    """A source that comes as folders, or as somebody's `.npz` or manifest of it."""

    def either(options: DataOptions) -> Source:
        return own(options) if Path(options.root).suffix.lower() in (".npz", ".csv", ".tsv") else load(options)

    return either


def data_home() -> str:
    """Where `perada data get` puts things: $PERADA_DATA, or a folder in the user's cache."""
    return os.environ.get("PERADA_DATA") or str(Path.home() / ".cache" / "perada" / "data")


SOURCES: dict[str, Callable[[DataOptions], Source]] = {
    "digits": lambda options: digits(),
    "cifar10": lambda options: cifar10(options.root or data_home()),
    "cifar100": lambda options: cifar100(options.root or data_home()),
    "stl10": lambda options: stl10(options.root or data_home(), options.size),
    "office-home": _laid_out(lambda o: office_home(o.root or data_home(), o.size, o.skip_bad)),
    "chexpert": _laid_out(lambda o: chexpert(o.root or data_home(), o.size, o.uncertain, o.skip_bad)),
    "folder": own,
}


def _given(options: DataOptions) -> Source:
    raise InputError("these data were given from Python: give them again, as federation=")


GIVEN = "given"  # what a run folder calls data, images or a network that were given from Python
SOURCES[GIVEN] = _given

# What distill.data may be beside a path. Validation data are the clients' own: a simulation may ask what they give.
VALIDATION = "validation"
PUBLIC = ("none", "glyphs", "digits", "cifar10", "cifar100", "stl10", VALIDATION, GIVEN)


def build_federation(options: DataOptions, device: torch.device, source: Source | None = None) -> Federation:
    """Load the source, if it is not given, and deal it out to the clients."""
    source = _chosen(source or SOURCES[options.name](options), options)
    clients, server = split(source, options)
    _enough(clients)
    targets, images = torch.from_numpy(source.targets), torch.from_numpy(_writable(source.images))
    stream = options.resident == "no" or (options.resident == "auto" and not _fits(images, device))
    return Federation(
        name=source.name,
        images=images if stream else images.to(device),
        targets=(targets.float() if source.multilabel else targets).to(device),
        classes=source.classes,
        clients=clients,
        mean=source.mean,
        std=source.std,
        server_val=server,
        augment=AUGMENT[options.augment],
        stream=stream,
        skipped=source.skipped,
        tested=any(len(c.test) for c in clients),
        fingerprint=fingerprint(source, clients, server),
        seed=options.seed,
        options=options,
    )


def _enough(clients: Sequence[Client]) -> None:
    """Refuse a site that could not be trained: what it would send, unchanged, would be averaged in all the same."""
    few = [f"{c.name} has {len(c.train)}" for c in clients if len(c.train) < LEAST]
    if few:
        more = f" (and {len(few) - 3} more have too few)" if len(few) > 3 else ""
        raise InputError(
            f"each site needs {LEAST} training images, but {', '.join(few[:3])}{more}: give it more images, leave it "
            "out, or lower data.val and data.test"
        )


def _chosen(source: Source, options: DataOptions) -> Source:
    """The labels and the normalisation that are asked for."""
    if options.normalise == "imagenet":
        mean, std = IMAGENET if source.images.shape[1] == 3 else ((0.449,), (0.226,))  # grey: the channels' mean
        source = replace(source, mean=mean, std=std)
    if not options.labels:
        return source
    if not source.multilabel:
        raise InputError("data.labels is for multi-label data: remove it, or data.root is not what you think")
    for name in options.labels:
        if name not in source.classes:
            raise unknown("label", name, source.classes)
    at = [source.classes.index(name) for name in options.labels]
    return replace(source, targets=source.targets[:, at].astype(np.uint8), classes=options.labels)


def _writable(images: Pixels) -> Pixels:
    """torch takes no read-only array; mapped pixels stay mapped, copied only where somebody writes."""
    if images.flags.writeable:
        return images
    whole = isinstance(images, np.memmap) and not isinstance(images.base, np.ndarray) and images.flags.c_contiguous
    if whole and isinstance(images, np.memmap) and images.filename is not None:
        return np.memmap(images.filename, images.dtype, "c", images.offset, images.shape)
    return images.copy()


def _fits(images: torch.Tensor, device: torch.device) -> bool:
    """Whether the images leave most of a GPU's memory free."""
    return device.type != "cuda" or images.numel() < 0.4 * torch.cuda.mem_get_info(device)[0]


def public_images(name: str, size: int, root: str = "") -> torch.Tensor | None:
    """The server's public images, uint8 `[n, C, size, size]`, without labels: a source's name, a folder of images or
    an `.npz` file. A named source is looked for beside the clients' data (`root`), then at `data_home()`."""
    if name == "none":
        return None
    if name == GIVEN:
        raise InputError("the public images were given from Python: give them again, as public=")
    if name == "glyphs":
        return torch.from_numpy(glyphs())
    if name not in PUBLIC and Path(name).suffix.lower() != ".npz":
        if not Path(name).expanduser().is_dir():
            raise InputError(f"distill.data: {name!r} is no folder with images, nor one of: {', '.join(PUBLIC)}")
        return torch.from_numpy(_writable(unlabelled(name, size)))
    images = _training(npz(name)) if name not in PUBLIC else _public(name, size, root)
    if images.shape[2:] != (size, size):
        images = resized(images, size)
    return torch.from_numpy(_writable(images))


def _training(source: Source) -> Pixels:
    return source.images if source.test is None else source.images[~source.test]


def _public(name: str, size: int, root: str) -> Pixels:
    """The official training images (and all of STL-10's unlabelled ones), in the order of their files."""
    if name == "digits":
        return digits().images
    home = place_of(name, root)
    if home is None:
        raise InputError(
            f"distill.data={name}: it is neither beside the clients' data nor in {data_home()}: "
            f"perada data get {name}, or --set distill.steps=0"
        )
    return stl10_public(home, size) if name == "stl10" else _training(SOURCES[name](DataOptions(name, home)))


_FILES = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10.npz"),
    "cifar100": ("cifar-100-python", "cifar-100-binary", "cifar100.npz"),
    "stl10": ("stl10_binary",),
    "cifar10.1": ("CIFAR-10.1", "cifar10.1_v6_data.npy"),
    "cifar10-c": ("CIFAR-10-C",),
}


def place_of(name: str, root: str) -> str | None:
    """The folder that holds an official set: the clients' data's own, the one above it, or `data_home()`."""
    own = [Path(root), Path(root).parent] if root else []
    for home in (*own, Path(data_home())):
        if any((home / file).exists() for file in _FILES[name]) or home.name in _FILES[name]:
            return str(home)
    return None
