"""The embedded default: real handwritten digits at the clients, rendered glyphs as public data."""

from __future__ import annotations

from importlib import resources

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .federation import Source


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, 8×8 (UCI's test set of optical recognition)."""
    from sklearn.datasets import load_digits  # here, not above: it takes a second that most commands need not wait

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    return Source("digits", images, data.target.astype(np.int64), tuple("0123456789"), (0.3,), (0.35,))


def glyphs() -> NDArray[np.uint8]:
    """4,096 unlabelled letters and digits rendered from fonts, `[4096, 1, 8, 8]`: tools/make_digits_assets.py."""
    with resources.as_file(resources.files("perada") / "assets" / "glyphs.png") as path:
        sheet = np.asarray(Image.open(path).convert("L"))
    return sheet.reshape(64, 8, 64, 8).transpose(0, 2, 1, 3).reshape(-1, 1, 8, 8).copy()
