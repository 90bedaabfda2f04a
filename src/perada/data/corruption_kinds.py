"""The nineteen corruptions: functions of pixels `[b, C, H, W]`, one random stream per image, and parameters.

Pixels are float32 in 0..1. The parameters above each function are the benchmark's at severities 1 to 5, for 32 px; `s`
is `scale_of`, how many pixels here are one of theirs. Results may leave 0..1; `corruptions.corrupt` clips and rounds
them. A result depends on the image's own pixels and stream alone.
"""

from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from .corruption_textures import (
    Pixels,
    Streams,
    affine_of,
    convolve,
    disc,
    draws,
    frost_crops,
    grey_of,
    plasma,
    pooled,
    ratio,
    resample,
    scale_of,
    smear,
    smooth,
    tint,
    warp,
)

Level = tuple[float, ...]
Apply = Callable[..., Pixels]

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
ICE = (0.83, 0.93, 1.0)


class Kind(NamedTuple):
    """Holds a corruption's function and its parameters at severities 1 to 5."""

    apply: Apply
    levels: tuple[Level, ...]


CORRUPTIONS: dict[str, Kind] = {}


def _levels(*levels: Level) -> Callable[[Apply], Apply]:
    """Puts a function into `CORRUPTIONS` under its name, with its parameters at severities 1 to 5."""

    def add(apply: Apply) -> Apply:
        CORRUPTIONS[apply.__name__] = Kind(apply, levels)
        return apply

    return add


def _normal(x: Pixels, streams: Streams) -> Pixels:
    return draws(streams, lambda s: s.standard_normal(x.shape[1:], np.float32))


# Noise: in grey levels, so the size of the image does not matter.


@_levels((0.04,), (0.06,), (0.08,), (0.09,), (0.1,))
def gaussian_noise(x: Pixels, streams: Streams, deviation: float) -> Pixels:
    """Adds noise of this standard deviation."""
    return x + _normal(x, streams) * np.float32(deviation)


@_levels((500,), (250,), (100,), (75,), (50,))
def shot_noise(x: Pixels, streams: Streams, photons: float) -> Pixels:
    """Counts photons; this many make white."""
    counts = [stream.poisson(image * np.float64(photons)) for image, stream in zip(x, streams, strict=True)]
    return np.stack(counts).astype(np.float32) / np.float32(photons)


@_levels((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))
def impulse_noise(x: Pixels, streams: Streams, share: float) -> Pixels:
    """Makes a share of the values black or white, half each."""
    lot = draws(streams, lambda s: s.random(x.shape[1:], np.float32))
    half = np.float32(share / 2)
    return np.where(lot < half, np.float32(0), np.where(lot >= 1 - half, np.float32(1), x))


# Blur: widths in pixels, times s.


@_levels((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
def defocus_blur(x: Pixels, streams: Streams, radius: float, softness: float) -> Pixels:
    """Blurs with an aperture of this radius, whose edge is soft.

    The aperture is drawn in the pixels of a 32×32 image and enlarged s times. With a finer circle, severity 4 (wider,
    with a harder edge) would blur less than 3.
    """
    s = scale_of(x)
    taps = [(round(down * s), round(right * s), weight) for down, right, weight in disc(radius, softness)]
    return convolve(pooled(x, round(s)), taps)


@_levels((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
def glass_blur(x: Pixels, streams: Streams, sigma: float, reach: float, rounds: float) -> Pixels:
    """Exchanges pixels with neighbours, between two blurs of width sigma.

    In a round, every pixel takes the value of one from -reach to reach - 1 rows and columns away (one-sided for 1,
    as in the benchmark).
    """
    sigma, far = sigma * scale_of(x), max(1, round(reach * scale_of(x)))
    b, c, h, w = x.shape
    rows, columns = np.arange(h)[:, None], np.arange(w)
    planes = smooth(x, sigma).reshape(b, c, h * w)
    for _ in range(int(rounds)):
        moves = np.stack([s.integers(-far, far, (2, h, w)) for s in streams])
        y, z = (rows + moves[:, 0]).clip(0, h - 1), (columns + moves[:, 1]).clip(0, w - 1)
        planes = np.take_along_axis(planes, (y * w + z).reshape(b, 1, h * w), 2)
    return smooth(planes.reshape(x.shape), sigma)


@_levels((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
def motion_blur(x: Pixels, streams: Streams, radius: float, sigma: float) -> Pixels:
    """Smears in a direction within 45° of the horizontal.

    We take the radius as the length of the whole bell, from cut to cut, less one pixel. A motion leaves one half of it,
    so the smear ends radius / 2 pixels (3, 3, 3, 4, 4.5) from where it starts. If it were the length of that half, the
    cut would come where a sigma of 2 has ended anyway. Severities 3 and 4 differ in it alone, and would coincide.
    """
    s = scale_of(x)
    return smear(x, radius / 2 * s, sigma * s, draws(streams, lambda r: r.uniform(-45, 45)))


@_levels((1.05, 0.01), (1.1, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01))
def zoom_blur(x: Pixels, streams: Streams, most: float, step: float) -> Pixels:
    """Returns the mean of all zooms from 1 to `most` by steps, and once more the image."""
    h, w = x.shape[-2:]
    y, z = (np.arange(n, dtype=np.float32) - np.float32((n - 1) / 2) for n in (h, w))
    steps = round((most - 1) / step)
    total = 2 * x  # the image, and zoom 1
    for number in range(1, steps + 1):
        zoom = np.float32(1 + number * step)
        total += resample(x, y / zoom + np.float32((h - 1) / 2), z / zoom + np.float32((w - 1) / 2))
    return total / np.float32(steps + 2)


# Weather.


@_levels(
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def snow(x: Pixels, streams: Streams, *level: float) -> Pixels:
    """Whitens all but the share `stays` of the image, and lays flakes over it twice, once upside down.

    mean, deviation: of the layer of flakes. It falls within 45° of the vertical, up to 2·radius pixels.
    """
    mean, deviation, size, threshold, radius, sigma, stays = level
    s, (h, w) = scale_of(x), x.shape[-2:]
    fall = draws(streams, lambda r: r.uniform(-135, -45))  # before the grid, whose size the severity chooses
    cells = [int(np.ceil(n / (size * s))) + 1 for n in (h, w)]
    grid = draws(streams, lambda r: r.standard_normal((1, *cells), np.float32)) * np.float32(deviation)
    places = (np.arange(n, dtype=np.float32) / np.float32(size * s) for n in (h, w))
    flakes = resample(grid + np.float32(mean), *places)
    flakes = np.where(flakes < threshold, np.float32(0), flakes.clip(0, 1))
    # What leaves at the bottom comes in at the top: it also snows outside the image.
    flakes = smear(flakes, 2 * radius * s, sigma * s, fall, "wrap")
    white = np.maximum(x, grey_of(x) * np.float32(1.5) + np.float32(0.5))
    out: Pixels = np.float32(stays) * x + np.float32(1 - stays) * white + flakes + flakes[..., ::-1, ::-1]
    return out


@_levels((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
def frost(x: Pixels, streams: Streams, image: float, ice: float) -> Pixels:
    """Adds image and ice with these weights; the ice is our own texture (`frost_sheet`)."""
    h, w = x.shape[-2:]
    crystals = frost_crops(streams, h, w, scale_of(x)) * tint(ICE, x.shape[1])
    return np.float32(image) * x + np.float32(ice) * crystals


@_levels((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
def fog(x: Pixels, streams: Streams, density: float, decay: float) -> Pixels:
    """Adds a cloud the size of the image, and keeps the brightest pixel's value.

    The decay counts twice (a halving of the grid divides the noise by its square), as in the benchmark.
    """
    h, w = x.shape[-2:]
    clouds = plasma(streams, max(h, w), decay**2)[:, None, :h, :w]
    peak = x.max((1, 2, 3), keepdims=True)
    out: Pixels = (x + np.float32(density) * clouds) * (peak / (peak + np.float32(density)))
    return out


@_levels((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
def brightness(x: Pixels, streams: Streams, more: float) -> Pixels:
    """Adds to the value (of hue, saturation and value), that is to the largest channel; hues stay."""
    value = x.max(1, keepdims=True)
    brighter = np.minimum(value + np.float32(more), 1)
    # Black has no hue to keep, so it turns grey.
    out: Pixels = np.where(value > 0, x * ratio(brighter, value), brighter)
    return out


# Digital.


@_levels((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
def contrast(x: Pixels, streams: Streams, kept: float) -> Pixels:
    """Keeps this share of the distance to the channel's mean."""
    mean = x.reshape(*x.shape[:2], -1).mean(2, dtype=np.float64).astype(np.float32)[..., None, None]
    out: Pixels = (x - mean) * np.float32(kept) + mean
    return out


@_levels((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
def elastic_transform(x: Pixels, streams: Streams, strength: float, sigma: float, reach: float) -> Pixels:
    """Bends the image; strength and sigma of the field and reach of the affine map are shares of the side.

    A random affine map (three points move) and a random field, which is drawn at 32×32 and stretched over the image,
    share one bilinear sampling.
    """
    b, (h, w) = len(x), x.shape[-2:]
    side = min(h, w)
    third = side // 3
    corners = np.array([(third, third), (third, -third), (-third, -third)], np.float64)
    moves = draws(streams, lambda r: r.uniform(-reach, reach, (3, 2)) * side).astype(np.float64)
    maps = affine_of(np.broadcast_to(corners, (b, 3, 2)), corners + moves)[..., None, None]
    field = smooth(draws(streams, lambda r: r.uniform(-1, 1, (2, 32, 32))), sigma * 32) * np.float32(strength * side)
    grid = (np.linspace(0, 31, n, dtype=np.float32) for n in (h, w))
    field = resample(field, *grid)
    middle = ((h - 1) / 2, (w - 1) / 2)
    y = np.arange(h)[:, None] - middle[0] + field[:, 0]
    z = np.arange(w) - middle[1] + field[:, 1]
    rows = y * maps[:, 0, 0] + z * maps[:, 1, 0] + maps[:, 2, 0] + middle[0]
    columns = y * maps[:, 0, 1] + z * maps[:, 1, 1] + maps[:, 2, 1] + middle[1]
    return warp(x, rows.astype(np.float32), columns.astype(np.float32))


def _by_pillow(x: Pixels, change: Callable[[Image.Image], Image.Image]) -> Pixels:
    """Returns each image as Pillow changes it, in 256 levels."""
    levels = np.rint(x * 255).astype(np.uint8)
    for planes in levels:
        picture = Image.fromarray(planes[0] if len(planes) == 1 else np.ascontiguousarray(planes.transpose(1, 2, 0)))
        planes[:] = np.atleast_3d(np.asarray(change(picture))).transpose(2, 0, 1)
    return levels.astype(np.float32) / np.float32(255)


@_levels((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
def pixelate(x: Pixels, streams: Streams, share: float) -> Pixels:
    """Scales to this share of the side and back, with box filters."""
    h, w = x.shape[-2:]
    small = (max(1, int(w * share)), max(1, int(h * share)))
    box = Image.Resampling.BOX
    return _by_pillow(x, lambda picture: picture.resize(small, box).resize((w, h), box))


@_levels((80,), (65,), (58,), (50,), (40,))
def jpeg_compression(x: Pixels, streams: Streams, quality: float) -> Pixels:
    def saved(picture: Image.Image) -> Image.Image:
        file = BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        return Image.open(file)

    return _by_pillow(x, saved)


# The four that the benchmark sets aside for choosing settings.


@_levels((0.06,), (0.1,), (0.12,), (0.16,), (0.2,))
def speckle_noise(x: Pixels, streams: Streams, deviation: float) -> Pixels:
    """Adds noise in proportion to the pixel, of this standard deviation at white."""
    return x + x * _normal(x, streams) * np.float32(deviation)


@_levels((0.4,), (0.6,), (0.7,), (0.8,), (1,))
def gaussian_blur(x: Pixels, streams: Streams, sigma: float) -> Pixels:
    return smooth(x, sigma * scale_of(x))


@_levels(
    (0.62, 0.1, 0.7, 0.7, 0.5, 0),
    (0.65, 0.1, 0.8, 0.7, 0.5, 0),
    (0.65, 0.3, 1, 0.69, 0.5, 0),
    (0.65, 0.1, 0.7, 0.69, 0.6, 1),
    (0.65, 0.1, 0.5, 0.68, 0.6, 1),
)
def spatter(x: Pixels, streams: Streams, *level: float) -> Pixels:
    """Splashes water or mud where smooth noise is above a threshold; strength: how bright water is, how soft mud is."""
    mean, deviation, sigma, threshold, strength, mud = level
    s = scale_of(x)
    # Smoothing over s times the pixels divides the deviation by s: noise drawn s times as large wets as much.
    noise = draws(streams, lambda r: r.standard_normal(x.shape[-2:], np.float32)) * np.float32(deviation * s)
    liquid = smooth(noise + np.float32(mean), sigma * s)
    wet = (liquid > threshold).astype(np.float32)
    if mud:
        cover = smooth(wet, strength * s)[:, None]
        cover[cover < 0.8] = 0
        return x * (1 - cover) + tint(MUD, x.shape[1]) * cover
    # Drops are clear inside; lit from the upper left, their lower right rims shine. The square makes the highlights
    # small and sharp: a broader shine would change images more than mud, which should be worse.
    down, right = np.gradient(smooth(wet, s), axis=(1, 2))
    shine = wet * liquid * (-down - right).clip(0, None)
    peak = shine.max((1, 2), keepdims=True)
    shine = ratio(shine, peak) ** 2 * np.float32(strength)
    out: Pixels = x + shine[:, None] * tint(WATER, x.shape[1])
    return out


@_levels((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
def saturate(x: Pixels, streams: Streams, factor: float, extra: float) -> Pixels:
    """Multiplies the saturation by factor and adds extra; hue and value stay.

    A grey pixel's hue is red, as is usual in HSV. An image of one channel has no colour: its distance from its own mean
    is multiplied by factor + extra.
    """
    if x.shape[1] == 1:
        return contrast(x, streams, factor + extra)
    value, least = x.max(1, keepdims=True), x.min(1, keepdims=True)
    spread = value - least
    old = ratio(spread, value)
    new = (old * np.float32(factor) + np.float32(extra)).clip(0, 1)
    depth = ratio(value - x, spread)  # 0 at the largest channel, 1 at the least
    depth[:, 1:] = np.where(spread > 0, depth[:, 1:], np.float32(1))
    out: Pixels = value - value * new * depth
    return out
