"""Your own images: `site/class/image.png`, or `class/image.png` to be split into simulated sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError
from .federation import Source

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what ImageNet-trained backbones expect


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """RGB uint8 `[3, size, size]`: the shorter side is scaled to `size`, the middle is kept."""
    try:
        with Image.open(path) as image:
            rgb = _eight_bits(image).convert("RGB")
    except FileNotFoundError as error:
        raise InputError(f"no such image: {path}") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read image {path}: it is damaged or not an image") from error
    scale = size / min(rgb.size)
    rgb = rgb.resize((max(size, round(rgb.width * scale)), max(size, round(rgb.height * scale))))
    left, top = (rgb.width - size) // 2, (rgb.height - size) // 2
    pixels: NDArray[np.uint8] = np.asarray(rgb.crop((left, top, left + size, top + size)), np.uint8)
    return pixels.transpose(2, 0, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scans of 16 bits a pixel, scaled: Pillow's own conversion would clip them to white."""
    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.asarray(image, np.float64)
    top = 65535.0 if pixels.max() > 255 else 255.0
    return Image.fromarray(np.rint(pixels.clip(0, top) / top * 255).astype(np.uint8))


def image_files(base: Path) -> list[Path]:
    """Every image file below a folder, in a fixed order."""
    return sorted(p for p in base.rglob("*") if p.suffix.lower() in ENDINGS and p.name[0] != "." and p.is_file())


def unlabelled(root: str, size: int) -> NDArray[np.uint8]:
    """All images below `root`, however its folders are arranged: `[n, 3, size, size]`."""
    files = image_files(Path(root).expanduser())
    if not files:
        raise InputError(f"distill.data: {root!r} is not 'glyphs' or 'none', and no folder with images")
    return np.stack([read_image(path, size) for path in files])


def folder(root: str, size: int, skip_bad: bool) -> Source:
    """All images below `root`. The last folder of a path is the class, the one above it (if any) the site."""
    base = Path(root).expanduser()
    if not root or not base.is_dir():
        raise InputError(f"data.root: no folder {root!r}: give --data PATH with site/class/image files")
    files = image_files(base)
    depths = {len(p.relative_to(base).parts) for p in files}
    if depths not in ({2}, {3}):
        found = "no images" if not files else "images at different depths" if len(depths) > 1 else "images too deep"
        raise InputError(f"{base}: {found}; expected site/class/image.png everywhere, or class/image.png everywhere")
    images, kept, bad = [], [], []
    for path in files:
        try:
            images.append(read_image(path, size))
            kept.append(path.relative_to(base))
        except InputError:
            bad.append(str(path))
    if bad and (not skip_bad or not images):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(f"cannot read {', '.join(bad[:3])}{more}: mend them, or --set data.skip_bad=true")
    classes = tuple(sorted({p.parts[-2] for p in kept}))
    number = {name: i for i, name in enumerate(classes)}
    targets = np.array([number[p.parts[-2]] for p in kept], np.int64)
    site = np.array([p.parts[0] for p in kept]) if depths == {3} else None
    return Source(base.name, np.stack(images), targets, classes, _MEAN, _STD, site=site)
