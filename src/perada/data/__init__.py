"""Sources, partitions and batches: from a `[data]` section to a `Federation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import InputError, unknown
from .digits import digits, glyphs
from .federation import Client, Federation, Source
from .folder import folder, read_image, unlabelled
from .split import split

__all__ = ["Client", "DataOptions", "Federation", "Source", "build_federation", "public_images", "read_image"]


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


SOURCES: dict[str, Callable[[DataOptions], Source]] = {
    "digits": lambda options: digits(),
    "folder": lambda options: folder(options.root, options.size, options.skip_bad),
}


PUBLIC = ("none", "glyphs", *(name for name in SOURCES if name != "folder"))  # what distill.data may be beside a folder


def build_federation(options: DataOptions, device: torch.device) -> Federation:
    """Load the source and deal it out to the clients."""
    source = SOURCES[options.name](options)
    clients, server = split(source, options)
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
