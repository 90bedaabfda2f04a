"""Who holds what: images, targets, and each client's own train, validation and test indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..lanes import fast_kernels, sent
from .augment import DRAWS, SALT, Augment, padding

Indices = NDArray[np.int64]


@lru_cache
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[C, 1, 1]`, made once: while a GPU's work is recorded nothing may be copied to it."""
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Source:
    """A data set before anybody holds it.

    images uint8 `[N, C, H, W]` (C is 1 or 3); targets int64 `[N]`, or uint8 `[N, labels]` for multi-label data.
    `test` marks the official test images where a data set has them, `val` those declared for validation; `site`
    names each sample's owner where the data come with owners; `names` are those of the images' files, where there are
    files, and `skipped` the files that could not be read.
    """

    name: str
    images: NDArray[np.uint8]
    targets: NDArray[np.int64] | NDArray[np.uint8]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    test: NDArray[np.bool_] | None = None
    site: NDArray[np.str_] | None = None
    val: NDArray[np.bool_] | None = None
    names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def multilabel(self) -> bool:
        return self.targets.ndim == 2


@dataclass(frozen=True)
class Client:
    name: str
    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True)
class Federation:
    """The clients over one pool of images. One client on its own machine is a federation of one."""

    name: str
    images: Tensor  # uint8 [N, C, H, W], on the compute device, or in (mapped) memory where they do not fit
    targets: Tensor  # int64 [N], or float [N, labels], on the compute device
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    server_val: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    augment: Augment | None = None  # random views, in training
    stream: bool = False  # whether images are fetched batch by batch, one ahead
    skipped: tuple[str, ...] = ()  # files that could not be read
    tested: bool = True  # whether anybody has test images: to be asked where those must not be touched
    fingerprint: str = ""  # of who holds which images (`split.fingerprint`)
    seed: int = 0  # of the split, and of the order of public images
    options: Any = None  # the DataOptions that make it again

    def to(self, device: torch.device) -> Federation:
        """Returns this federation with its targets, and images unless they are streamed, on a device."""
        if self.device == device:
            return self
        images = self.images if self.stream else self.images.to(device)
        return replace(self, images=images, targets=self.targets.to(device))

    def facts(self) -> dict[str, Any]:
        """Returns what a run must find again to be opened: who holds which images, of which classes."""
        return {
            "classes": list(self.classes),
            "image": list(self.images.shape[1:]),
            "multilabel": self.multilabel,
            "mean": list(self.mean),
            "std": list(self.std),
            "clients": {c.name: [len(c.train), len(c.val), len(c.test)] for c in self.clients},
            "split": self.fingerprint,
        }

    @property
    def multilabel(self) -> bool:
        return self.targets.dim() == 2

    @property
    def device(self) -> torch.device:
        """Where the computing is done."""
        return self.targets.device

    def take(self, index: Indices | Tensor) -> Tensor:
        """These images, uint8 `[n, C, H, W]`, on the compute device."""
        at, where = torch.as_tensor(index), self.images.device
        at = sent(at, where) if at.device.type == "cpu" else at.to(where)
        return self.images[at].to(self.device)

    def labels(self, index: Indices) -> Tensor:
        """The targets of these images."""
        return self.targets[sent(torch.from_numpy(index), self.device)]

    def about_images(self) -> str:
        """Where they live, and what that costs."""
        size = "×".join(map(str, self.images.shape[1:]))
        where = "streamed from memory" if self.stream else f"on {self.images.device.type}"
        return f"{len(self.images):,} images of {size}: {self.images.numel() / 1e6:,.1f} MB as bytes, {where}"

    @property
    def test(self) -> Indices:
        """Global-test: the union of all clients' test data, in client order."""
        return np.concatenate([c.test for c in self.clients])

    @property
    def val(self) -> Indices:
        """The union of all clients' validation data, in client order."""
        return np.concatenate([c.val for c in self.clients])

    def prepare(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 `[n, C, H, W]` -> normalised `[n, 3, H, W]`: grey images become three equal channels."""
        mean, std = (_channels(values, dtype, images.device) for values in (self.mean, self.std))
        return ((images.to(dtype) / 255 - mean) / std).expand(-1, 3, -1, -1)

    def views(self, samples: Tensor, keys: Tensor, dtype: torch.dtype, fetched: Tensor | None = None) -> Tensor:
        """Training images by number, `[k, B]` -> prepared `[k·B, 3, H, W]`, augmented with the lanes' keys `[k]`.

        fetched: the images themselves, where they are not on the compute device.
        """
        if fetched is None and not self.stream and self.augment in DRAWS:
            made = self._kernel(self.images, samples, keys, self.augment, dtype)
            if made is not None:
                return made
        images = self.take(samples.flatten()) if fetched is None else fetched
        if self.augment is not None:
            images = self.augment(images, keys)
        return self.prepare(images, dtype)

    def plain_views(self, pool: Tensor, samples: Tensor, dtype: torch.dtype) -> Tensor:
        """Images of another pool (on the compute device) by number, `[k, B]` -> prepared, as they are."""
        made = self._kernel(pool, samples, samples, None, dtype)
        return self.prepare(pool[samples.flatten()], dtype) if made is None else made

    def _kernel(
        self, pool: Tensor, samples: Tensor, keys: Tensor, augment: Augment | None, dtype: torch.dtype
    ) -> Tensor | None:
        """All of it in one GPU kernel, where there is one."""
        kernels = fast_kernels(self.device)
        if kernels is None:
            return None
        mean, std = (_channels(values, dtype, self.device).expand(3, 1, 1) for values in (self.mean, self.std))
        made: Tensor = kernels.views(pool, samples, keys, SALT, DRAWS[augment], padding(pool), mean, std, dtype)
        return made

    def label_counts(self) -> NDArray[np.int64]:
        """Training samples of each class at each client, `[clients, classes]`."""
        targets = self.targets.cpu().numpy()
        if self.multilabel:
            return np.stack([targets[c.train].sum(0).astype(np.int64) for c in self.clients])
        return np.stack([np.bincount(targets[c.train], minlength=len(self.classes)) for c in self.clients])


def blank(facts: Mapping[str, Any], device: torch.device) -> Federation | None:
    """A federation as a run folder has noted it (data.json): names, classes, shapes, and not one image. None where that
    was not noted yet."""
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
