"""Images that the tests of the corruptions share."""

from __future__ import annotations

import numpy as np
from PIL import Image


def crops(n: int, side: int) -> np.ndarray:
    """Crops of scikit-learn's two photographs, 65 to 255 pixels wide, made side × side: `[n, 3, side, side]`."""
    from sklearn.datasets import load_sample_images

    rng, out, pictures = np.random.default_rng(0), [], load_sample_images().images
    for i in range(n):
        picture = pictures[i % 2]
        wide = int(rng.integers(65, 256))
        top, left = (int(rng.integers(n - wide)) for n in picture.shape[:2])
        crop = Image.fromarray(picture[top : top + wide, left : left + wide])
        out.append(np.asarray(crop.resize((side, side), Image.Resampling.BOX)).transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(out))


def flat(*colour: int, n: int = 1, side: int = 32) -> np.ndarray:
    """n images of one colour."""
    return np.broadcast_to(np.array(colour, np.uint8)[:, None, None], (n, len(colour), side, side)).copy()
