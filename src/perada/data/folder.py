"""Your own images: `site/class/image.png`, or `class/image.png` to be split into simulated sites."""

from __future__ import annotations

from itertools import compress
from pathlib import Path

import numpy as np

from ..errors import InputError
from .images import IMAGENET, decode, image_files, image_names
from .source import Pixels, Source


def unlabelled(root: str, size: int) -> Pixels:
    """Returns all images below `root`, whatever its folders are, `[n, 3, size, size]`."""
    base = Path(root).expanduser()
    files = image_files(base)
    if not files:
        raise InputError(f"Distill.data: {root!r} is not a folder with images")
    return decode(files, base, size, skip_bad=False, advice="damaged or not images: fix or remove them")[0]


def folder(root: str, size: int, skip_bad: bool) -> Source:
    """Returns all images below `root`. The last folder of a path is the class, the one above it (if any) the site."""
    base = Path(root).expanduser()
    if not root or not base.is_dir():
        what = f"DataOptions.root: no folder {root!r}" if root else "your own images are needed"
        raise InputError(f"{what}: give --data PATH with site/class/image files")
    files = image_files(base)
    depths = {len(p.relative_to(base).parts) for p in files}
    if depths not in ({2}, {3}):
        wrong = "images at different depths" if len(depths) > 1 else "images at the wrong depth"
        raise InputError(
            f"{base}: {wrong if files else 'no images'}; expected site/class/image.png everywhere, or class/image.png "
            "everywhere"
        )
    images, kept = decode(files, base, size, skip_bad)
    paths = [path.relative_to(base) for path in compress(files, kept)]
    classes, targets = np.unique([p.parts[-2] for p in paths], return_inverse=True)
    site = np.array([p.parts[0] for p in paths]) if depths == {3} else None
    names = image_names(files, kept)
    return Source(
        base.name, images, targets.astype(np.int64), tuple(classes.tolist()), *IMAGENET, None, site, None, *names
    )
