"""Office-Home: four domains (Art, Clipart, Product, Real World) of the same 65 classes; a domain is a site.

The archive unpacks into `OfficeHomeDataset_10072016/Art/Alarm_Clock/00001.jpg`. The same function reads any other set
of domain/class/image files, such as PACS exported to folders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from .folder import folder
from .images import image_files
from .source import Source

ARCHIVE = "OfficeHomeDataset_10072016"
DOMAINS = ("Art", "Clipart", "Product", "Real World")


def office_home(root: str, size: int = 224, skip_bad: bool = False) -> Source:
    """Returns all images `[n, 3, size, size]` with their class and, as `site`, their domain; no official test set."""
    base = Path(root).expanduser()
    if not root or not base.is_dir():
        raise InputError(
            f"DataOptions.root: no folder {root!r}: give --data FOLDER with Art, Clipart, Product and Real World"
        )
    base = base / ARCHIVE if (base / ARCHIVE).is_dir() else base
    domains = {_plain(p.name): p for p in base.iterdir() if p.is_dir() and p.name[0] != "."}
    official = any(_plain(name) in domains for name in DOMAINS)
    if official:
        _complete(base, domains)
    source = folder(str(base), size, skip_bad)
    if source.site is None:
        raise InputError(f"{base}: class/image without domains: expected domain/class/image.jpg, one folder per domain")
    return replace(source, name="office-home") if official else source


def _plain(name: str) -> str:
    """Copies of the set spell it 'Real World', 'RealWorld' or 'Real_World'."""
    return "".join(c for c in name.lower() if c.isalnum())


def _complete(base: Path, domains: dict[str, Path]) -> None:
    """Refuses half a copy, which would train without a warning on fewer clients or classes than the paper's."""
    missing = [name for name in DOMAINS if _plain(name) not in domains]
    if missing:
        raise InputError(f"{base}: no folder {', '.join(missing)}: Office-Home is incomplete; unpack it again")
    classes = {name: {p.parent.name for p in image_files(domains[_plain(name)])} for name in DOMAINS}
    every = set().union(*classes.values())
    for name, own in classes.items():
        if own != every:
            raise InputError(
                f"{base}: {name} has no images of {min(every - own)}: Office-Home is incomplete; unpack it again"
            )
