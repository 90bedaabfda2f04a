"""The building blocks of corruptions: sampling, smearing, fog, frost. Pixels are float32 in 0..1, `[b, C, H, W]`.

Everything here is elementwise or runs along the lines of one image. It is never a matrix product over the batch, which
may add in another order for another batch size: no result may depend on the other images.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..lanes import rng_of

Pixels = NDArray[np.float32]
Streams = Sequence[np.random.Generator]  # one per image
Taps = Sequence[tuple[int, int, float]]  # (rows down, columns right, weight)

SHEETS = 5  # frost textures to crop from
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue in a grey value (ITU-R BT.601)


def scale_of(x: Pixels) -> float:
    """Returns the pixels here per pixel of a 32×32 image: the shorter side / 32, never below 1.

    The benchmark's blurs are a pixel wide at 32 px; a quarter of that would not be a blur.
    """
    side: int = min(x.shape[-2:])
    return max(1.0, side / 32)


def draws(streams: Streams, draw: Callable[[np.random.Generator], NDArray[np.generic] | np.float64 | float]) -> Pixels:
    """Returns one draw per image, each from the image's own stream, `[b, ...]`."""
    return np.stack([np.asarray(draw(stream), np.float32) for stream in streams])


def ratio(a: Pixels, b: Pixels) -> Pixels:
    """Returns a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def grey_of(x: Pixels) -> Pixels:
    """Returns the grey values of images, `[b, 1, H, W]`."""
    if x.shape[1] == 1:
        return x
    red, green, blue = (x[:, c : c + 1] * LUMA[c] for c in range(3))
    out: Pixels = red + green + blue
    return out


def tint(rgb: Sequence[float], channels: int) -> Pixels:
    """Returns a colour as `[channels, 1, 1]`; for one channel its grey value."""
    colour = np.array(rgb, np.float32)
    if channels == 1:
        colour = np.array([float((colour * LUMA).sum())], np.float32)
    return colour[:, None, None]


def smooth(x: Pixels, sigma: float) -> Pixels:
    """Returns each plane `[..., H, W]` with a Gaussian blur."""
    from scipy import ndimage  # here, not above: slow to import, and few commands corrupt anything

    out: Pixels = ndimage.gaussian_filter(x, (0,) * (x.ndim - 2) + (sigma, sigma), mode="nearest")
    return out


def _neighbours(at: Pixels, length: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Pixels]:
    """Returns the two samples around each coordinate (clamped to the image) and the weight of the second."""
    low = np.floor(at)
    share = (at - low).astype(np.float32)
    first = low.astype(np.intp)
    return first.clip(0, length - 1), (first + 1).clip(0, length - 1), share


def resample(x: Pixels, rows: Pixels, columns: Pixels) -> Pixels:
    """Returns bilinear samples of the planes `[..., H, W]` on a grid of rows `[h]` and columns `[w]`, `[..., h, w]`."""
    top, bottom, share = _neighbours(rows, x.shape[-2])
    upper = np.take(x, top, -2)
    lines = upper + (np.take(x, bottom, -2) - upper) * share[:, None]
    left, right, share = _neighbours(columns, x.shape[-1])
    near = np.take(lines, left, -1)
    out: Pixels = near + (np.take(lines, right, -1) - near) * share
    return out


def warp(x: Pixels, rows: Pixels, columns: Pixels) -> Pixels:
    """Returns bilinear samples of each image at its own places: rows and columns `[b, H, W]`."""
    b, c, h, w = x.shape
    top, bottom, down = _neighbours(rows, h)
    left, right, across = _neighbours(columns, w)
    planes = np.ascontiguousarray(x.transpose(1, 0, 2, 3)).reshape(c, -1)  # images side by side: one index for all
    start = (np.arange(b) * h * w)[:, None, None]

    def at(y: NDArray[np.intp], z: NDArray[np.intp]) -> Pixels:
        taken: Pixels = np.take(planes, start + y * w + z, 1)
        return taken

    upper, lower = at(top, left), at(bottom, left)
    upper += (at(top, right) - upper) * across
    lower += (at(bottom, right) - lower) * across
    return (upper + (lower - upper) * down).transpose(1, 0, 2, 3)


def convolve(x: Pixels, taps: Taps, beyond: Literal["edge", "wrap"] = "edge") -> Pixels:
    """Returns the weighted mean of shifted copies of `[..., H, W]`.

    beyond: what is outside the image: the pixels of its border (`edge`), or its other side (`wrap`).
    """
    h, w = x.shape[-2:]
    reach = max(max(abs(dy), abs(dx)) for dy, dx, _ in taps)
    wide = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(reach, reach)] * 2, mode=beyond)
    out, part = np.zeros_like(x), np.empty_like(x)
    total = sum(weight for _, _, weight in taps)
    for dy, dx, weight in taps:
        shifted = wide[..., reach + dy : reach + dy + h, reach + dx : reach + dx + w]
        np.multiply(shifted, np.float32(weight / total), out=part)
        out += part
    return out


def pooled(x: Pixels, size: int) -> Pixels:
    """Returns each plane `[..., H, W]` in pixels `size` times as wide: a mean over size × size, twice, so a tent.

    Tents `size` apart add up to a constant, so a kernel for small pixels has no gaps with its taps that far apart.
    """
    from scipy import ndimage

    for half in (0, -((size + 1) % 2)):  # if size is even, the second mean undoes the first one's shift by half a pixel
        x = ndimage.uniform_filter(
            x, (1,) * (x.ndim - 2) + (size, size), mode="nearest", origin=(0,) * (x.ndim - 2) + (half, half)
        )
    return x


def disc(radius: float, sigma: float) -> Taps:
    """Returns an aperture: a filled circle with its edge softened by a Gaussian of width sigma."""
    from scipy import ndimage

    reach = math.ceil(radius + 3 * sigma)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    weights = ndimage.gaussian_filter((y**2 + x**2 <= radius**2).astype(np.float64), sigma, mode="constant")
    weights[weights < weights.max() / 1000] = 0  # less than a quarter of a grey level
    return [(int(i) - reach, int(j) - reach, float(weights[i, j])) for i, j in np.argwhere(weights)]


def smear(x: Pixels, reach: float, sigma: float, degrees: Pixels, beyond: Literal["edge", "wrap"] = "edge") -> Pixels:
    """Returns motion in one direction per image: half a Gaussian of width sigma, cut `reach` pixels from its peak."""
    far = np.arange(math.floor(reach + 0.5) + 1)
    weights = np.exp(-(far**2) / (2 * sigma**2))
    far, weights = far[weights > 1e-3], weights[weights > 1e-3]
    out = np.empty_like(x)
    for i, angle in enumerate(np.radians(degrees.astype(np.float64))):
        down, right = np.rint(far * math.sin(angle)).astype(int), np.rint(far * math.cos(angle)).astype(int)
        taps = list(zip(down.tolist(), right.tolist(), weights.tolist(), strict=True))
        out[i] = convolve(x[i], taps, beyond)
    return out


def plasma(streams: Streams, side: int, fall: float) -> Pixels:
    """Returns clouds `[b, side', side']` in 0..1, side' the next power of two: midpoint displacement on a torus.

    Each halving of the grid adds noise `fall` times weaker than the one before.
    """
    coarse = np.zeros((len(streams), 1, 1), np.float32)
    weight = np.float32(1)
    for _ in range(max(1, math.ceil(math.log2(side)))):
        k = coarse.shape[-1]
        noise = weight * np.stack([s.uniform(-1, 1, (3, k, k)) for s in streams]).astype(np.float32)
        right, below = np.roll(coarse, -1, 2), np.roll(coarse, -1, 1)
        middle = (coarse + right + below + np.roll(right, -1, 1)) / 4 + noise[:, 0]
        fine = np.empty((len(streams), 2 * k, 2 * k), np.float32)
        fine[:, ::2, ::2], fine[:, 1::2, 1::2] = coarse, middle
        fine[:, ::2, 1::2] = (coarse + right + middle + np.roll(middle, 1, 1)) / 4 + noise[:, 1]
        fine[:, 1::2, ::2] = (coarse + below + middle + np.roll(middle, 1, 2)) / 4 + noise[:, 2]
        coarse, weight = fine, weight / np.float32(fall)
    coarse -= coarse.min((1, 2), keepdims=True)
    out: Pixels = coarse / coarse.max((1, 2), keepdims=True)
    return out


def _unit_noise(rng: np.random.Generator, height: int, width: int, sigma: float) -> Pixels:
    """Returns noise smoothed over sigma pixels, with deviation 1."""
    noise = smooth(rng.standard_normal((height, width), np.float32), sigma)
    out: Pixels = noise / noise.std()
    return out


@lru_cache(maxsize=2 * SHEETS)
def frost_sheet(number: int, height: int, width: int, scale: float) -> Pixels:
    """Returns frost on a window, `[height, width]` in 0..1: our own texture, not the benchmark's photographs.

    The pane is divided among crystals (the cells nearest to random points). Each has its own direction, with feathered
    needles along it, and rims where two meet. These are bright lines on dark, a tenth of white on average. The
    published weights darken the image faster than they add ice (from 3 to 4 they add none). So with a bright texture,
    a higher severity would restore images to what they were.
    """
    from scipy.spatial import cKDTree

    rng = rng_of("corruption", "frost", "sheet", number)
    spacing = (9, 11, 13, 15, 18)[number] * scale  # pixels from crystal to crystal
    count = max(4, round(height * width / spacing**2))
    seeds = rng.uniform(0, 1, (count, 2)) * (height, width)
    angles = rng.uniform(0, math.pi, count)
    grain, drift = (_unit_noise(rng, height, width, sigma * scale) for sigma in (0.8, 6))
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    reach, cell = cKDTree(seeds).query(np.stack([y, x], -1), k=2)
    own = cell[..., 0]
    y, x = y - seeds[own, 0], x - seeds[own, 1]
    along = y * np.sin(angles)[own] + x * np.cos(angles)[own]
    across = x * np.sin(angles)[own] - y * np.cos(angles)[own]
    # Barbs leave the needle at an angle, as in a feather: hence |across| in the phase. Grain makes them ragged.
    barbs = 0.5 + 0.5 * np.cos((along + 1.7 * np.abs(across)) * 2 * math.pi / (4.5 * scale) + 1.2 * grain)
    needle = np.exp(-np.abs(across) / (0.08 * spacing))
    rim = np.exp(-(reach[..., 1] - reach[..., 0]) / (1.5 * scale))
    thick = (0.75 + 0.6 * drift).clip(0, None)  # more ice in some places, none in others
    ice = thick * (needle * (0.35 + 0.65 * barbs) + 0.5 * rim**2 * barbs + 0.05 * grain)
    sheet: Pixels = ice.clip(0, 1).astype(np.float32)
    sheet.setflags(write=False)  # the cache returns the same array to all callers
    return sheet


def frost_crops(streams: Streams, height: int, width: int, scale: float) -> Pixels:
    """Returns a random crop of a random sheet per image, `[b, 1, H, W]`."""
    out = np.empty((len(streams), 1, height, width), np.float32)
    for i, stream in enumerate(streams):
        sheet = frost_sheet(int(stream.integers(SHEETS)), 4 * height, 4 * width, scale)
        top, left = int(stream.integers(3 * height + 1)), int(stream.integers(3 * width + 1))
        out[i, 0] = sheet[top : top + height, left : left + width]
    return out


def affine_of(before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the maps of three points to three others: `[b, 3, 2]` twice -> `[b, 3, 2]`, for rows (y, x, 1)."""
    ones = np.ones((*before.shape[:2], 1))
    maps: NDArray[np.float64] = np.linalg.solve(np.concatenate([before, ones], 2), after)
    return maps
