"""Every data source by its name in a configuration: `SOURCES[name](root, size, skip_bad)`.

| name | images | test | site |
| --- | --- | --- | --- |
| cifar10, cifar100 | 60,000 of 32×32 (`size` does not count) | official | |
| stl10 | 13,000 of 96×96, scaled to `size` | official | |
| office-home | 15,588, scaled to `size` | | domain |
| chexpert | 223,414, scaled to `size`; U-Ones | | |
| npz, manifest, folder | your own | yours | yours |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import unknown
from .arrays import npz
from .chexpert import chexpert
from .cifar import CORRUPTIONS, Part, cifar10, cifar10_1, cifar10_c, cifar100, stl10, stl10_public
from .federation import Source
from .folder import folder
from .images import Pixels, resized
from .manifest import manifest
from .office import office_home

__all__ = [
    "CORRUPTIONS",
    "PUBLIC",
    "SOURCES",
    "chexpert",
    "cifar10",
    "cifar10_1",
    "cifar10_c",
    "cifar100",
    "evaluation",
    "folder",
    "manifest",
    "npz",
    "office_home",
    "own",
    "public",
    "stl10",
    "stl10_public",
]


def own(root: str, size: int, skip_bad: bool) -> Source:
    """What `--data PATH` gives: a folder of images, a `.npz` file, or a CSV or TSV manifest."""
    path = Path(root).expanduser()
    if path.suffix.lower() == ".npz":
        return npz(root)
    if path.suffix.lower() in (".csv", ".tsv"):
        return manifest(root, size, skip_bad)
    return folder(root, size, skip_bad)


SOURCES: dict[str, Callable[[str, int, bool], Source]] = {
    "cifar10": lambda root, size, skip_bad: cifar10(root),
    "cifar100": lambda root, size, skip_bad: cifar100(root),
    "stl10": lambda root, size, skip_bad: stl10(root, size),
    "office-home": office_home,
    "chexpert": lambda root, size, skip_bad: chexpert(root, size, skip_bad=skip_bad),
    "npz": lambda root, size, skip_bad: npz(root),
    "manifest": manifest,
    "folder": own,
}

PUBLIC = ("cifar10", "cifar100", "stl10")  # what a server may distil with, beside a folder of images


def public(name: str, root: str, size: int) -> Pixels:
    """Public images without labels at `size` pixels, `[n, 3, size, size]`: the official training images, and all of
    STL-10's unlabelled ones. In the order of their files, which may be sorted by class: shuffle before cutting."""
    if name not in PUBLIC:
        raise unknown("public data", name, PUBLIC)
    if name == "stl10":
        return stl10_public(root, size)
    source = SOURCES[name](root, size, False)
    images = source.images if source.test is None else source.images[~source.test]
    return images if images.shape[2:] == (size, size) else resized(images, size)


def evaluation(name: str, root: str) -> Part:
    """A test set by name, `cifar10.1` or `cifar10-c:NAME:SEVERITY`: images `[n, 3, 32, 32]` and labels `[n]`."""
    head, _, rest = name.partition(":")
    if head == "cifar10.1" and not rest:
        return cifar10_1(root)
    corruption, _, severity = rest.partition(":")
    if head != "cifar10-c" or not severity.isdecimal():
        raise unknown("evaluation set", name, ("cifar10.1", "cifar10-c:NAME:SEVERITY"))
    return cifar10_c(root, corruption, int(severity))
