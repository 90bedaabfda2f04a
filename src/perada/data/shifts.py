"""Shifted copies of a test set: what CIFAR-10-C is to CIFAR-10, for any images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ..errors import InputError, unknown
from ..lanes import rng_of

Pixels = NDArray[np.float32]  # [n, C, H, W] in 0..1
Shift = Callable[[Pixels, int, np.random.Generator], Pixels]


def _noise(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    out: Pixels = x + rng.normal(0, 0.08 * severity, x.shape).astype(np.float32)
    return out


def _blur(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    width = (0.4, 0.55, 0.7, 0.85, 1.0)[severity - 1] * x.shape[-1] / 8
    out: Pixels = ndimage.gaussian_filter(x, (0, 0, width, width), mode="nearest")
    return out


def _rotation(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    angle = 9.0 * severity
    sign = rng.random(len(x)) < 0.5
    out = x.copy()
    for side, mine in ((angle, sign), (-angle, ~sign)):
        if mine.any():
            out[mine] = ndimage.rotate(x[mine], side, axes=(3, 2), reshape=False, order=1, mode="nearest")
    return out


def _contrast(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    keep = (0.7, 0.55, 0.4, 0.28, 0.18)[severity - 1]
    middle = x.mean((2, 3), keepdims=True)
    out: Pixels = (x - middle) * np.float32(keep) + middle
    return out


def _translation(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    reach = 0.3 * severity * x.shape[-1] / 8
    out = np.empty_like(x)
    for i, (dy, dx) in enumerate(rng.uniform(-reach, reach, (len(x), 2))):
        out[i] = ndimage.shift(x[i], (0, dy, dx), order=1, mode="nearest")
    return out


def _occlusion(x: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    out, size = x.copy(), max(1, round(x.shape[-1] * (0.1 + 0.08 * severity)))
    corners = rng.integers(0, x.shape[-1] - size + 1, (len(x), 2))
    for i, (top, left) in enumerate(corners):
        out[i, :, top : top + size, left : left + size] = 0
    return out


SHIFTS: dict[str, Shift] = {
    "noise": _noise,
    "blur": _blur,
    "rotation": _rotation,
    "contrast": _contrast,
    "translation": _translation,
    "occlusion": _occlusion,
}


def shift(images: NDArray[np.uint8], name: str, severity: int) -> NDArray[np.uint8]:
    """uint8 `[n, C, H, W]` -> the same, shifted; severity 1 to 5. Deterministic."""
    if name not in SHIFTS:
        raise unknown("shift", name, SHIFTS)
    if not 1 <= severity <= 5:
        raise InputError(f"severity must be 1 to 5, not {severity}")
    x = images.astype(np.float32) / np.float32(255)
    out = SHIFTS[name](x, severity, rng_of("shift", name, severity))
    pixels: NDArray[np.uint8] = np.rint(out.clip(0, 1) * 255).astype(np.uint8)
    return pixels
