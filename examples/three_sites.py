"""Three sites with folders of images, made from scikit-learn's handwritten digits, as a stand-in for your own data.

    python examples/three_sites.py sites                        # sites/north/zero/000.png, ...
    perada train folder --data sites --out runs/sites
    perada predict runs/sites --client north sites/north/two/000.png
    perada drift runs/sites --client south sites/north          # are these images like those of south?

Each site scans in its own way: north plainly, south in white on black, west dark and blurred. And each sees other
digits more often. So each site gains from a model of its own, and can tell whether images are like its own.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits

CLASSES = ("zero", "one", "two", "three")
IMAGES = {"north": (60, 38, 16, 6), "south": (6, 16, 38, 60), "west": (16, 60, 6, 38)}  # per class


def scan(digit: np.ndarray, site: str) -> Image.Image:
    """Returns a digit (8×8, 0 to 16) as the site's scanner would give it: 32×32, grey."""
    image = Image.fromarray(np.rint(255 - digit * (255 / 16)).astype(np.uint8)).resize(
        (32, 32), Image.Resampling.BICUBIC
    )
    if site == "south":
        return image.point(lambda p: 255 - p)
    if site == "west":
        return image.filter(ImageFilter.GaussianBlur(1.5)).point(lambda p: p // 2)
    return image


def build(root: Path) -> int:
    """Writes the images and returns how many. No digit is used twice."""
    data = load_digits()
    written = 0
    for label, name in enumerate(CLASSES):
        digits = iter(data.images[data.target == label])
        for site, counts in IMAGES.items():
            folder = root / site / name
            folder.mkdir(parents=True, exist_ok=True)
            for n, digit in enumerate(itertools.islice(digits, counts[label])):
                scan(digit, site).save(folder / f"{n:03d}.png")
                written += 1
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    print(f"wrote {build(Path(sys.argv[1]))} images to {sys.argv[1]}")
