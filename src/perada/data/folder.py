"""Your own images: `site/class/image.png`, or `class/image.png` to be split into simulated sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .federation import Source
from .images import ENDINGS, IMAGENET, decode, image_files, names_of, read_image, unread

__all__ = ["ENDINGS", "folder", "image_files", "read_image", "unlabelled"]


def unlabelled(root: str, size: int) -> NDArray[np.uint8]:
    """All images below `root`, however its folders are arranged: `[n, 3, size, size]`."""
    base = Path(root).expanduser()
    files = image_files(base)
    if not files:
        raise InputError(f"distill.data: {root!r} is no folder with images")
    return decode(files, base, size, skip_bad=False, advice="damaged or not images: mend or remove them")[0]


def folder(root: str, size: int, skip_bad: bool) -> Source:
    """All images below `root`. The last folder of a path is the class, the one above it (if any) the site."""
    base = Path(root).expanduser()
    if not root or not base.is_dir():
        what = f"data.root: no folder {root!r}" if root else "your own images are needed"
        raise InputError(f"{what}: give --data PATH with site/class/image files")
    files = image_files(base)
    depths = {len(p.relative_to(base).parts) for p in files}
    if depths not in ({2}, {3}):
        found = (
            "no images"
            if not files
            else "images at different depths"
            if len(depths) > 1
            else "images at the wrong depth"
        )
        raise InputError(f"{base}: {found}; expected site/class/image.png everywhere, or class/image.png everywhere")
    images, good = decode(files, base, size, skip_bad)
    kept = [path.relative_to(base) for path, is_good in zip(files, good, strict=True) if is_good]
    classes = tuple(sorted({p.parts[-2] for p in kept}))
    number = {name: i for i, name in enumerate(classes)}
    targets = np.array([number[p.parts[-2]] for p in kept], np.int64)
    site = np.array([p.parts[0] for p in kept]) if depths == {3} else None
    names, skipped = names_of(files, good), unread(files, good)
    return Source(base.name, images, targets, classes, *IMAGENET, site=site, names=names, skipped=skipped)
