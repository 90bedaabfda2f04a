"""Folders of images: `site/class/image.png`, or `class/image.png` to be split into simulated sites. Office-Home is one.

Office-Home has four domains of the same 65 classes, and a domain is a site. Its archive unpacks into
`OfficeHomeDataset_10072016/Art/Alarm_Clock/00001.jpg`.
"""

from dataclasses import replace
from itertools import compress
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..inputs import user_path
from .fit import Fit
from .images import IMAGENET, decode, image_and_other_files, image_files, noted
from .source import Pixels, Source

OFFICE_HOME = "OfficeHomeDataset_10072016"
DOMAINS = ("Art", "Clipart", "Product", "Real World")


def unlabelled(root: str, size: int, fit: Fit = "crop") -> Pixels:
    """Returns all images below `root`, in folders of any depth, `[n, 3, size, size]`."""
    base = user_path(root)
    files = image_files(base)
    if not files:
        raise InputError(f"Distill.data: {root!r} is not a folder with images")
    return decode(files, base, size, False, "damaged or not images: fix or remove them", fit).images


def folder(root: str, size: int, skip_bad: bool, fit: Fit = "crop") -> Source:
    """Returns all images below `root`. The last folder of a path is the class, the one above it (if any) the site."""
    base = user_path(root)
    if not root or not base.is_dir():
        if base.is_file() and root:
            raise InputError(f"DataOptions.root: {root!r} is a file: give a folder, or a .csv, .tsv or .npz file")
        what = f"DataOptions.root: no folder {root!r}" if root else "your own images are needed"
        raise InputError(f"{what}: give --data PATH with site/class/image files")
    files, others = image_and_other_files(base)
    depths = {len(p.relative_to(base).parts) for p in files}
    if depths not in ({2}, {3}):
        wrong = "images at different depths" if len(depths) > 1 else "images at the wrong depth"
        raise InputError(
            f"{base}: {wrong if files else 'no images'}; expected site/class/image.png everywhere, or class/image.png "
            "everywhere"
        )
    decoded = decode(files, base, size, skip_bad, fit=fit)
    paths = [path.relative_to(base) for path in compress(files, decoded.readable)]
    names, targets = np.unique([p.parts[-2] for p in paths], return_inverse=True)
    site = np.array([p.parts[0] for p in paths]) if depths == {3} else None
    classes, notes = tuple(names.tolist()), noted(files, decoded, fit, others)
    return Source(base.name, decoded.images, targets.astype(np.int64), classes, *IMAGENET, site=site, **notes)


def office_home(root: str, size: int = 224, skip_bad: bool = False, fit: Fit = "crop") -> Source:
    """Returns all images `[n, 3, size, size]` with their class and, as `site`, their domain; no official test set.

    Reads any other set of domain/class/image files, too, such as PACS exported to folders.
    """
    base = user_path(root)
    if not root or not base.is_dir():
        raise InputError(
            f"DataOptions.root: no folder {root!r}: give --data FOLDER with Art, Clipart, Product and Real World"
        )
    base = base / OFFICE_HOME if (base / OFFICE_HOME).is_dir() else base
    domains = {_plain(p.name): p for p in base.iterdir() if p.is_dir() and p.name[0] != "."}
    official = any(_plain(name) in domains for name in DOMAINS)
    if official:
        _complete(base, domains)
    source = folder(str(base), size, skip_bad, fit)
    if source.site is None:
        raise InputError(f"{base}: class/image without domains: expected domain/class/image.jpg, one folder per domain")
    return replace(source, name="office-home") if official else source


def _plain(name: str) -> str:
    """Returns a name as all copies of the set spell it: there are 'Real World', 'RealWorld' and 'Real_World'."""
    return "".join(c for c in name.lower() if c.isalnum())


def _complete(base: Path, domains: dict[str, Path]) -> None:
    """Refuses half a copy, which would train without a warning on fewer clients or classes than the paper's."""
    missing = [name for name in DOMAINS if _plain(name) not in domains]
    if missing:
        raise InputError(f"{base}: no folder {', '.join(missing)}: Office-Home is incomplete; unpack it again")
    classes = {name: {p.parent.name for p in image_files(domains[_plain(name)])} for name in DOMAINS}
    names = set().union(*classes.values())
    for domain, own in classes.items():
        if own != names:
            raise InputError(
                f"{base}: {domain} has no images of {min(names - own)}: Office-Home is incomplete; unpack it again"
            )
