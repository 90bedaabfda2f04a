"""How sure a score is: a 95% interval from the number of test images."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .scores import score

Z = 1.959964  # of 95%
DRAWS = 500


def wilson(right: int, images: int) -> tuple[float, float] | None:
    """Returns Wilson's 95% interval of a share, in percent; None without images."""
    if not images:
        return None
    p, z2 = right / images, Z * Z / images
    middle, half = p + z2 / 2, Z * math.sqrt(p * (1 - p) / images + z2 / (4 * images))
    ends = (middle - half) / (1 + z2), (middle + half) / (1 + z2)
    return tuple(100.0 * min(1.0, max(0.0, end)) for end in ends)  # type: ignore[return-value]


def interval(logits: Tensor, targets: Tensor) -> tuple[float, float] | None:
    """Returns the 95% interval of `score`: Wilson's for an accuracy, and for an AUC from resampled images.

    None where the score is undefined.
    """
    value = score(logits, targets)
    if value is None:
        return None
    if not targets.is_floating_point():
        return wilson(round(value * len(targets) / 100), len(targets))
    return _resampled(lambda at: score(logits[at], targets[at]), len(targets))


def _resampled(measure: Callable[[Tensor], float | None], images: int) -> tuple[float, float] | None:
    """Returns the middle 95% of a measure on images drawn with replacement; always the same draws."""
    rng = np.random.default_rng(0)
    drawn = [measure(torch.from_numpy(rng.integers(0, images, images))) for _ in range(DRAWS)]
    known = [v for v in drawn if v is not None]
    low, high = np.percentile(known, [2.5, 97.5]) if known else (math.nan, math.nan)
    return (float(low), float(high)) if known else None
