"""The embedded default: handwritten digits for the clients, rendered glyphs as public data."""

from importlib import resources

import numpy as np
from PIL import Image

from .source import Pixels, Source


def digits() -> Source:
    """Returns scikit-learn's 1,797 handwritten digits, 8×8 (UCI's test set of optical recognition)."""
    from sklearn.datasets import load_digits  # here: the import takes a second, and most commands do not need it

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    return Source("digits", images, data.target.astype(np.int64), tuple("0123456789"), (0.3,), (0.35,))


def glyphs() -> Pixels:
    """Returns 4,096 unlabelled letters and digits, `[4096, 1, 8, 8]`; tools/make_digits_assets.py renders them."""
    with resources.as_file(resources.files(__package__) / "assets" / "glyphs.png") as path:
        sheet = np.asarray(Image.open(path).convert("L"))
    return sheet.reshape(64, 8, 64, 8).transpose(0, 2, 1, 3).reshape(-1, 1, 8, 8).copy()
