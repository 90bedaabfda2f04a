"""Sources, partitions and batches: from a `[data]` section to a `Federation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..lanes import rng_of
from .digits import digits, glyphs
from .federation import Client, Federation, Indices, Source
from .folder import folder, read_image, unlabelled
from .partition import by_site, dirichlet, holdout

__all__ = ["Client", "DataOptions", "Federation", "Source", "build_federation", "public_images", "read_image"]


@dataclass(frozen=True)
class DataOptions:
    """The `[data]` section."""

    name: str = "digits"
    root: str = ""
    clients: int = 20
    partition: Literal["dirichlet", "site"] = "dirichlet"
    alpha: float = 0.1
    cap: bool = True  # a client with N/M samples takes no more
    val: float = 0.1  # share of the data (of the official training data, where there is a test set) to choose by
    test: float = 0.2  # share of the data for testing, where a source has no test set of its own
    server_val: float = 0.0  # share of the training data the server holds, labelled, for distill.guard=server
    seed: int = 0  # of the split; the run's own seed does not change who holds what
    size: int = 64  # pixels of the images of your own data
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
        for name in ("val", "test", "server_val"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.val + self.test + self.server_val >= 1:
            raise ValueError("val + data.test + data.server_val must leave something to train on (below 1)")
        if self.size < 8:
            raise ValueError(f"size must be at least 8 pixels, not {self.size}")


SOURCES: dict[str, Callable[[DataOptions], Source]] = {
    "digits": lambda options: digits(),
    "folder": lambda options: folder(options.root, options.size, options.skip_bad),
}


PUBLIC = ("none", "glyphs", *(name for name in SOURCES if name != "folder"))  # what distill.data may be beside a folder


def build_federation(options: DataOptions, device: torch.device) -> Federation:
    """Load the source and deal it out to the clients."""
    source = SOURCES[options.name](options)
    clients, server = _split(source, options)
    empty = [c.name for c in clients if len(c.train) == 0]
    if empty:
        raise InputError(f"no training data at {', '.join(empty)}: give them some, or lower data.val and data.test")
    targets = torch.from_numpy(source.targets)
    return Federation(
        name=source.name,
        images=torch.from_numpy(source.images).to(device),
        targets=(targets.float() if source.multilabel else targets).to(device),
        classes=source.classes,
        clients=clients,
        mean=source.mean,
        std=source.std,
        server_val=server,
    )


def _split(source: Source, options: DataOptions) -> tuple[tuple[Client, ...], Indices]:
    """Test (the official one where there is one), then validation and the server's part, then the clients."""
    rng = rng_of(options.seed, "split")
    every = np.arange(len(source.images))
    labels = source.targets if not source.multilabel else np.zeros(len(every), np.int64)
    if options.partition == "site":
        return _by_site(source, options, labels.astype(np.int64), every, rng)
    labels = labels.astype(np.int64)
    test = np.flatnonzero(source.test) if source.test is not None else holdout(labels, every, options.test, rng)
    rest = np.setdiff1d(every, test)
    left = len(rest) / len(every) if source.test is None else 1.0
    val = holdout(labels, rest, options.val / left, rng)
    rest = np.setdiff1d(rest, val)
    server = holdout(labels, rest, options.server_val, rng) if options.server_val else rest[:0]
    train = np.setdiff1d(rest, server)
    clients = dirichlet(labels, train, val, test, options.clients, options.alpha, rng, options.cap)
    return clients, server


def _by_site(
    source: Source, options: DataOptions, labels: NDArray[np.int64], every: Indices, rng: np.random.Generator
) -> tuple[tuple[Client, ...], Indices]:
    if source.site is None:
        raise InputError(
            "data.partition=site needs site/class/image folders; for class/image folders simulate sites with "
            "--set data.partition=dirichlet --set data.clients=N"
        )
    test, val = [], []
    for site in np.unique(source.site):  # each site splits its own data
        mine = every[source.site == site]
        test.append(holdout(labels, mine, options.test, rng))
        mine = np.setdiff1d(mine, test[-1])
        val.append(holdout(labels, mine, options.val / (1 - options.test), rng))
    held, kept = np.concatenate(test), np.concatenate(val)
    train = np.setdiff1d(every, np.concatenate([held, kept]))
    server = holdout(labels, train, options.server_val, rng) if options.server_val else train[:0]
    train = np.setdiff1d(train, server)
    return by_site(source.site, train, kept, held), server


def public_images(name: str, size: int) -> torch.Tensor | None:
    """The server's public images by source name or folder, uint8 `[n, C, H, W]`; labels are dropped."""
    if name == "none":
        return None
    if name == "glyphs":
        return torch.from_numpy(glyphs())
    if name in PUBLIC:
        source = SOURCES[name](DataOptions(name=name))
        return torch.from_numpy(source.images if source.test is None else source.images[~source.test])
    return torch.from_numpy(unlabelled(name, size))
