"""Office-Home: four domains (Art, Clipart, Product, Real World) of the same 65 classes; a domain is a site.

The archive unpacks into `OfficeHomeDataset_10072016/Art/Alarm_Clock/00001.jpg`. Any other set that is laid out
as domain/class/image (PACS exported to folders, for one) is read by the same function.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from .federation import Source
from .folder import folder
from .images import image_files

ARCHIVE = "OfficeHomeDataset_10072016"
DOMAINS = ("Art", "Clipart", "Product", "Real World")


def office_home(root: str, size: int = 224, skip_bad: bool = False) -> Source:
    """All images `[n, 3, size, size]` with their class and, as `site`, their domain; there is no official test set."""
    base = Path(root).expanduser() if root else None
    if base is None or not base.is_dir():
        raise InputError(f"data.root: no folder {root!r}: give --data FOLDER with Art, Clipart, Product and Real World")
    base = base / ARCHIVE if (base / ARCHIVE).is_dir() else base
    found = {_plain(p.name): p for p in base.iterdir() if p.is_dir() and p.name[0] != "."}
    official = [name for name in DOMAINS if _plain(name) in found]
    if official:
        _complete(base, found)
    source = folder(str(base), size, skip_bad)
    if source.site is None:
        raise InputError(f"{base}: class/image without domains: expected domain/class/image.jpg, one folder a domain")
    return replace(source, name="office-home") if official else source


def _plain(name: str) -> str:
    """Copies of the set spell it 'Real World', 'RealWorld' or 'Real_World'."""
    return "".join(c for c in name.lower() if c.isalnum())


def _complete(base: Path, found: dict[str, Path]) -> None:
    """Half a copy would train without a word of warning, on fewer clients or classes than the paper's."""
    gone = [name for name in DOMAINS if _plain(name) not in found]
    if gone:
        raise InputError(f"{base}: no folder {', '.join(gone)}: Office-Home is incomplete; unpack it again")
    held = {name: _classes(found[_plain(name)]) for name in DOMAINS}
    every = set().union(*held.values())
    for name, classes in held.items():
        if classes != every:
            raise InputError(
                f"{base}: {name} has no images of {min(every - classes)}: Office-Home is incomplete; unpack it again"
            )


def _classes(domain: Path) -> set[str]:
    return {p.parent.name for p in image_files(domain) if p.parent != domain}
