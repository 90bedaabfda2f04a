"""A federation: images, targets, and each client's own train, validation and test indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError, unknown
from ..inputs import printable, user_path
from ..lanes import Features, LaneModel, normalised, ops_for, sent
from .arrays import Pair, from_sites
from .augment import AUGMENT, DRAWS, SALT, Augment, padding
from .features import Table, keep
from .folder import folder
from .images import IMAGENET
from .named import GIVEN, DataOptions, read_source
from .partition import LEAST
from .source import UNKNOWN, Client, Indices, Pixels, Source, check_classes, check_sites
from .split import fingerprint, pixels_hash, split

CPU = torch.device("cpu")


@lru_cache
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns values per channel, `[C, 1, 1]`, made once: nothing may be copied to a GPU while its work is recorded."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Federation:
    """Holds the clients and the images of all of them. One client on its own machine is a federation of one.

    `from_arrays`, `from_folder`, `from_manifest` and `named` make one on the CPU; `to` moves it.
    """

    name: str
    images: Tensor  # uint8 [N, C, H, W], on the compute device, or in (mapped) memory if they do not fit
    targets: Tensor  # int64 [N], or float [N, labels] with NaN where a label is not known; on the compute device
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    server_val: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    augment: Augment | None = None  # random views, in training
    stream: bool = False  # whether images are fetched batch by batch, one batch ahead
    skipped: tuple[str, ...] = ()  # files that could not be read
    remarks: tuple[str, ...] = ()  # what else of the files is not used
    tested: bool = True  # whether any client has test images; known even where those must not be touched
    fingerprint: str = ""  # of who holds which images (`split.fingerprint`)
    pixels: str = ""  # a hash of arrays that the user gave, which have no file names
    seed: int = 0  # of the split, and of the order of public images
    options: DataOptions = field(default_factory=lambda: DataOptions(name=GIVEN))  # that make it again
    features: Table | None = None  # of the images, behind the frozen prefix of a network (`keeping`)

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} classes"
        return f"Federation({self.name!r}: {len(self.clients)} clients, {self._size()}, {classes})"

    def _size(self) -> str:
        return f"{len(self.images):,} images of {'×'.join(map(str, self.images.shape[1:]))}"

    @classmethod
    def from_arrays(
        cls,
        sites: Mapping[str, Pair],
        *,
        classes: Sequence[str] | None = None,
        val: float | Mapping[str, Pair] = 0.1,
        test: float | Mapping[str, Pair] = 0.2,
        **options: Any,
    ) -> Federation:
        """Returns a federation of arrays in memory, with one client per site: `{"north": (x, y), "south": (x2, y2)}`.

        x: numpy or torch, `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]`, uint8 or float in [0, 1]. y: labels `[n]`
        (numbers or names), or `[n, labels]` of 0, 1 and NaN for not known. val and test: the share of each site's
        data, or one set per site. options: other fields of `DataOptions`; partition="dirichlet" pools the sites and
        simulates clients.
        """
        options = {"name": GIVEN, "partition": "site", **options}
        sets: dict[str, Any] = {}
        for name, value in (("val", val), ("test", test)):
            (sets if isinstance(value, Mapping) else options)[name] = value
        return build_federation(DataOptions.of(**options), source=from_sites(sites, classes, **sets))

    @classmethod
    def from_folder(cls, path: str | Path, *, size: int = 64, partition: str = "site", **options: Any) -> Federation:
        """Returns a federation of image files: `site/class/image.png`, or `class/image.png` to simulate clients.

        options: other fields of `DataOptions`.
        """
        chosen = _of_files(path, size, partition, options)
        return build_federation(chosen, source=folder(chosen.root, size, chosen.skip_bad, chosen.fit))

    @classmethod
    def from_manifest(cls, path: str | Path, *, size: int = 64, partition: str = "site", **options: Any) -> Federation:
        """Returns a federation of the images in a CSV or TSV table `path,site,split,label...`.

        options: other fields of `DataOptions`.
        """
        if Path(path).suffix.lower() not in (".csv", ".tsv"):
            raise InputError(f"{path} is not a manifest: give a .csv or .tsv file")
        return build_federation(_of_files(path, size, partition, options))

    @classmethod
    def named(cls, name: str, **options: Any) -> Federation:
        """Returns a known data set, split among clients: `Federation.named("cifar10", clients=20, alpha=0.1)`.

        options: other fields of `DataOptions`.
        """
        return build_federation(DataOptions.of(name=name, **options))

    def to(self, device: torch.device | str) -> Federation:
        """Returns the federation on a device. Images that would fill a GPU stay in memory and are streamed."""
        device = torch.device(device)
        if self.device == device:
            return self
        fits = self.images.device.type == device.type or _fits(self.images, device)
        stream = self.options.resident == "no" or (self.options.resident == "auto" and not fits)
        images = self.images if stream else self.images.to(device)
        return replace(self, images=images, targets=self.targets.to(device), stream=stream, features=None)

    def keeping(self, model: LaneModel) -> Federation:
        """Returns the federation with what the model's frozen prefix makes of its images, where that can be kept.

        Random views differ from step to step, so with these nothing is kept.
        """
        dtype = next(iter(model.initial().params.values())).dtype
        table = None
        if model.prefix is not None and self.augment is None:
            every = torch.arange(len(self.images))
            table = keep(model, self.images, every, lambda x: self.prepare(x.to(self.device), dtype), self.about_pixels)
        return replace(self, features=table)

    @property
    def about_pixels(self) -> str:
        """How images are normalised."""
        return f"{self.mean}\0{self.std}"

    def inputs(self, index: Indices | Tensor, dtype: torch.dtype) -> Tensor | Features:
        """Returns these images prepared, or what is kept of them."""
        if self.features is not None:
            return self.features.take(torch.as_tensor(index))
        return self.prepare(self.take(index), dtype)

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the number of training samples per client."""
        return {c.name: len(c.train) for c in self.clients}

    @property
    def multilabel(self) -> bool:
        return self.targets.dim() == 2

    @property
    def device(self) -> torch.device:
        """Returns the device that computes."""
        return self.targets.device

    def take(self, index: Indices | Tensor) -> Tensor:
        """Returns these images, uint8 `[n, C, H, W]`, on the compute device."""
        at, where = torch.as_tensor(index), self.images.device
        at = sent(at, where) if at.device.type == "cpu" else at.to(where)
        return self.images[at].to(self.device)

    def labels(self, index: Indices) -> Tensor:
        """Returns the targets of these images."""
        return self.targets[sent(torch.from_numpy(index), self.device)]

    def about_images(self) -> str:
        """Returns a line that says how many images there are, and where they are kept."""
        where = "streamed from memory" if self.stream else f"on {self.images.device.type}"
        return f"{self._size()}: {self.images.numel() / 1e6:,.1f} MB as bytes, {where}"

    @property
    def test(self) -> Indices:
        """Returns Global-test: the union of all clients' test data, in client order."""
        return np.concatenate([c.test for c in self.clients])

    @property
    def val(self) -> Indices:
        """Returns the union of all clients' validation data, in client order."""
        return np.concatenate([c.val for c in self.clients])

    def prepare(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns images `[n, C, H, W]` normalised, `[n, 3, H, W]`; grey images become three equal channels."""
        return normalised(images, *self._statistics(dtype, images.device))

    def _statistics(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return _channels(self.mean, dtype, device), _channels(self.std, dtype, device)

    def views(
        self, samples: Tensor, keys: Tensor, dtype: torch.dtype, fetched: Tensor | None = None
    ) -> Tensor | Features:
        """Returns training images by number, `[k, B]`, augmented with the lanes' keys `[k]`, prepared `[k·B, 3, H, W]`;
        or what is kept of them.

        fetched: the images themselves, if they are not kept on the compute device.
        """
        if self.features is not None:
            return self.features.take(samples)
        if fetched is None and not self.stream:
            return self._views(self.images, samples, keys, self.augment, dtype)
        images = self.take(samples.flatten()) if fetched is None else fetched
        if self.augment is not None:
            images = self.augment(images, keys)
        return self.prepare(images, dtype)

    def plain_views(self, pool: Tensor, samples: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns images of another pool (on the compute device) by number, `[k, B]`, prepared but not augmented."""
        return self._views(pool, samples, samples, None, dtype)

    def _views(
        self, pool: Tensor, samples: Tensor, keys: Tensor, augment: Augment | None, dtype: torch.dtype
    ) -> Tensor:
        draws = (SALT, DRAWS[augment], padding(pool)) if augment in DRAWS else None
        return ops_for(self.device).views(pool, samples, keys, augment, draws, self._statistics(dtype, self.device))

    def label_counts(self) -> NDArray[np.int64]:
        """Returns the training samples per client and class, `[clients, classes]`."""
        targets = self.targets.cpu().numpy()
        if self.multilabel:
            return np.stack([np.nansum(targets[c.train], 0).astype(np.int64) for c in self.clients])
        return np.stack([np.bincount(targets[c.train], minlength=len(self.classes)) for c in self.clients])

    def known_counts(self) -> NDArray[np.int64]:
        """Returns in how many training samples per client each label is known, `[clients, classes]`."""
        if not self.multilabel:
            return np.repeat([[len(c.train)] for c in self.clients], len(self.classes), 1)
        known = ~np.isnan(self.targets.cpu().numpy())
        return np.stack([known[c.train].sum(0) for c in self.clients])

    def facts(self) -> dict[str, Any]:
        """Returns what a run folder notes about its data: who holds which images, and how many of which classes."""
        return {
            "classes": list(self.classes),
            "image": list(self.images.shape[1:]),
            "multilabel": self.multilabel,
            "mean": list(self.mean),
            "std": list(self.std),
            "clients": {c.name: [len(c.train), len(c.val), len(c.test)] for c in self.clients},
            "split": self.fingerprint,
            "pixels": self.pixels,
        }


def blank(facts: Mapping[str, Any], device: torch.device) -> Federation | None:
    """Returns a federation without images from the `facts` in a run folder; None if an older version wrote fewer."""
    if not facts.keys() >= {"classes", "image", "clients", "multilabel", "mean", "std"}:
        return None
    classes = tuple(facts["classes"])
    none = [np.zeros(0, np.int64)] * 3
    return Federation(
        name="",
        images=torch.zeros(0, *facts["image"], dtype=torch.uint8, device=device),
        targets=torch.zeros((0, len(classes)) if facts["multilabel"] else 0, device=device),
        classes=classes,
        clients=tuple(Client(name, *none) for name in facts["clients"]),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
    )


def build_federation(options: DataOptions, device: torch.device = CPU, source: Source | None = None) -> Federation:
    """Reads the data set, unless `source` is given, splits it among the clients, and moves it to the device."""
    source = _chosen(source or read_source(options), options)
    check_classes(source.name, source.classes)
    check_sites(source.name, source.site)
    clients, server = split(source, options)
    _enough(clients)
    return Federation(
        name=source.name,
        images=torch.from_numpy(writable(source.images)),
        targets=targets_of(source),
        classes=source.classes,
        clients=clients,
        mean=source.mean,
        std=source.std,
        server_val=server,
        augment=AUGMENT[options.augment],
        skipped=source.skipped,
        remarks=source.remarks,
        tested=any(len(c.test) for c in clients),
        fingerprint=fingerprint(source, clients, server),
        pixels=pixels_hash(source) if options.name in (GIVEN, "folder") else "",
        stream=options.resident == "no",
        seed=options.seed,
        options=options,
    ).to(device)


def targets_of(source: Source) -> Tensor:
    """Returns the targets as a federation has them: float for multi-label data, with NaN where a label is not known."""
    targets = torch.from_numpy(source.targets)
    return targets.float().masked_fill(targets == UNKNOWN, torch.nan) if source.multilabel else targets


def _of_files(path: str | Path, size: int, partition: str, options: Mapping[str, Any]) -> DataOptions:
    root = str(user_path(path).absolute())
    return DataOptions.of(name="folder", root=root, size=size, partition=partition, **options)


def _enough(clients: Sequence[Client]) -> None:
    """Refuses a site that cannot be trained: the server would average what it sent back unchanged."""
    few = [f"{printable(c.name)} has {len(c.train)}" for c in clients if len(c.train) < LEAST]
    if few:
        more = f" (and {len(few) - 3} more have too few)" if len(few) > 3 else ""
        raise InputError(
            f"each site needs {LEAST} training images, but {', '.join(few[:3])}{more}: give it more images, leave it "
            "out, or lower DataOptions.val and DataOptions.test"
        )


def _chosen(source: Source, options: DataOptions) -> Source:
    """Applies the options that choose labels and normalisation."""
    if options.normalise == "imagenet":
        mean, std = IMAGENET if source.images.shape[1] == 3 else ((0.449,), (0.226,))  # grey: the mean over channels
        source = replace(source, mean=mean, std=std)
    if not options.labels:
        return source
    if not source.multilabel:
        raise InputError(
            "DataOptions.labels is for multi-label data, and these have one label per image: remove it, or check "
            "DataOptions.root"
        )
    for name in options.labels:
        if name not in source.classes:
            raise unknown("label", name, source.classes)
    at = [source.classes.index(name) for name in options.labels]
    return replace(source, targets=source.targets[:, at].astype(np.uint8), classes=options.labels)


def writable(images: Pixels) -> Pixels:
    """Returns an array that torch takes: mapped pixels stay mapped, and are copied only where they are written."""
    if images.flags.writeable:
        return images
    part = isinstance(images.base, np.ndarray) or not images.flags.c_contiguous
    if isinstance(images, np.memmap) and images.filename is not None and not part:
        return np.memmap(images.filename, images.dtype, "c", images.offset, images.shape)
    return images.copy()


def _fits(images: Tensor, device: torch.device) -> bool:
    """Returns whether the images leave most of a GPU's memory free."""
    return device.type != "cuda" or images.numel() < 0.4 * torch.cuda.mem_get_info(device)[0]
