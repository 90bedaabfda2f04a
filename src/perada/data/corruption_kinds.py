"""The nineteen corruptions, each a function of (pixels `[b, C, H, W]` float32 in 0..1, parameters, streams).

The parameters are the benchmark's for 32 px; `s` is `scale_of`, how many pixels here are one of theirs. Results may
leave 0..1; `corruptions.corrupt` clips and rounds them. A result depends on the image's own pixels and stream alone.
"""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
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

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
ICE = (0.83, 0.93, 1.0)


def _normal(x: Pixels, streams: Streams) -> Pixels:
    return draws(streams, lambda s: s.standard_normal(x.shape[1:], np.float32))


# Noise: in grey levels, so the size of the image does not matter.


def gaussian_noise(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: standard deviation."""
    return x + _normal(x, streams) * np.float32(level[0])


def shot_noise(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: photons that make white."""
    counts = [stream.poisson(image * np.float64(level[0])) for image, stream in zip(x, streams, strict=True)]
    return np.stack(counts).astype(np.float32) / np.float32(level[0])


def impulse_noise(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: share of the values that become black or white, half each."""
    lot = draws(streams, lambda s: s.random(x.shape[1:], np.float32))
    half = np.float32(level[0] / 2)
    return np.where(lot < half, np.float32(0), np.where(lot >= 1 - half, np.float32(1), x))


def speckle_noise(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: standard deviation, of white; in proportion to the pixel."""
    return x + x * _normal(x, streams) * np.float32(level[0])


# Blur: widths in pixels, times s.


def gaussian_blur(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: sigma."""
    return smooth(x, level[0] * scale_of(x))


def defocus_blur(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: the aperture's radius, the softness of its edge.

    The aperture is drawn in the pixels of a 32×32 image and enlarged s times. With a finer circle, severity 4 (wider,
    with a harder edge) would blur less than 3.
    """
    s = scale_of(x)
    taps = [(round(down * s), round(right * s), weight) for down, right, weight in disc(*level)]
    return convolve(pooled(x, round(s)), taps)


def glass_blur(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: sigma of the blur before and after, reach d, rounds.

    In a round, every pixel takes the value of one from -d to d - 1 rows and columns away (one-sided for d = 1, as in
    the benchmark).
    """
    sigma, reach, rounds = level[0] * scale_of(x), max(1, round(level[1] * scale_of(x))), int(level[2])
    b, c, h, w = x.shape
    rows, columns = np.arange(h)[:, None], np.arange(w)
    planes = smooth(x, sigma).reshape(b, c, h * w)
    for _ in range(rounds):
        moves = np.stack([s.integers(-reach, reach, (2, h, w)) for s in streams])
        y, z = (rows + moves[:, 0]).clip(0, h - 1), (columns + moves[:, 1]).clip(0, w - 1)
        planes = np.take_along_axis(planes, (y * w + z).reshape(b, 1, h * w), 2)
    return smooth(planes.reshape(x.shape), sigma)


def motion_blur(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: radius, sigma. The direction is within 45° of the horizontal.

    radius is taken as the length of the whole bell, from cut to cut, less one pixel. A motion leaves one half of it, so
    the smear ends radius / 2 pixels (3, 3, 3, 4, 4.5) from where it starts. Taken as the length of that half, the cut
    would come where a sigma of 2 has ended anyway. Severities 3 and 4, which differ in it alone, would coincide.
    """
    s = scale_of(x)
    return smear(x, level[0] / 2 * s, level[1] * s, draws(streams, lambda r: r.uniform(-45, 45)))


def zoom_blur(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: the largest zoom and the step from 1 to it. The mean of all zooms and once more the image."""
    h, w = x.shape[-2:]
    y, z = (np.arange(n, dtype=np.float32) - np.float32((n - 1) / 2) for n in (h, w))
    steps = round((level[0] - 1) / level[1])
    total = 2 * x  # the image, and zoom 1
    for step in range(1, steps + 1):
        zoom = np.float32(1 + step * level[1])
        total += resample(x, y / zoom + np.float32((h - 1) / 2), z / zoom + np.float32((w - 1) / 2))
    return total / np.float32(steps + 2)


# Weather.


def snow(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: mean and deviation of the layer of flakes, their size, threshold, fall (radius, sigma), what stays.

    The layer falls within 45° of the vertical, up to 2·radius pixels. It is laid over the whitened image twice, once
    upside down.
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


def frost(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: weights of the image and of the ice, which is our own texture (`frost_sheet`)."""
    h, w = x.shape[-2:]
    ice = frost_crops(streams, h, w, scale_of(x)) * tint(ICE, x.shape[1])
    return np.float32(level[0]) * x + np.float32(level[1]) * ice


def fog(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: density, decay. A cloud the size of the image; the brightest pixel's value is kept.

    The decay counts twice (a halving of the grid divides the noise by its square), as in the benchmark.
    """
    h, w = x.shape[-2:]
    clouds = plasma(streams, max(h, w), level[1] ** 2)[:, None, :h, :w]
    peak = x.max((1, 2, 3), keepdims=True)
    out: Pixels = (x + np.float32(level[0]) * clouds) * (peak / (peak + np.float32(level[0])))
    return out


def brightness(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: added to the value (of hue, saturation and value), that is to the largest channel; hues stay."""
    value = x.max(1, keepdims=True)
    brighter = np.minimum(value + np.float32(level[0]), 1)
    # Black has no hue to keep, so it turns grey.
    out: Pixels = np.where(value > 0, x * ratio(brighter, value), brighter)
    return out


def spatter(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: mean and deviation of the liquid, its smoothness, threshold, strength (mud: softness), 1 for mud."""
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


# Digital.


def contrast(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: what is kept of the distance to the channel's mean."""
    mean = x.reshape(*x.shape[:2], -1).mean(2, dtype=np.float64).astype(np.float32)[..., None, None]
    out: Pixels = (x - mean) * np.float32(level[0]) + mean
    return out


def saturate(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: (factor, extra) of the saturation; hue and value stay. A grey pixel's hue is red, as is usual in HSV.

    An image of one channel has no colour. Instead, its distance from its own mean is multiplied by factor + extra.
    """
    factor, extra = level
    if x.shape[1] == 1:
        return contrast(x, (factor + extra,), streams)
    value, least = x.max(1, keepdims=True), x.min(1, keepdims=True)
    spread = value - least
    old = ratio(spread, value)
    new = (old * np.float32(factor) + np.float32(extra)).clip(0, 1)
    depth = ratio(value - x, spread)  # 0 at the largest channel, 1 at the least
    depth[:, 1:] = np.where(spread > 0, depth[:, 1:], np.float32(1))
    out: Pixels = value - value * new * depth
    return out


def elastic_transform(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: strength and smoothness of the field, reach of the affine map; each a share of the side.

    A random affine map (three points move) and a random field, drawn at 32×32 and stretched over the image; one
    bilinear sampling for both.
    """
    strength, sigma, reach = level
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


def _pictures(x: Pixels) -> list[Image.Image]:
    """Pillow images, L or RGB."""
    levels = np.rint(x * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(np.ascontiguousarray(p[..., 0] if p.shape[-1] == 1 else p)) for p in levels]


def _pixels(pictures: list[Image.Image]) -> Pixels:
    stack: NDArray[np.uint8] = np.stack([np.asarray(p) for p in pictures])
    planes = stack[:, None] if stack.ndim == 3 else stack.transpose(0, 3, 1, 2)
    return planes.astype(np.float32) / np.float32(255)


def pixelate(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: the smaller side, as a share of the side; box filters both ways."""
    h, w = x.shape[-2:]
    small = (max(1, int(w * level[0])), max(1, int(h * level[0])))
    box = Image.Resampling.BOX
    return _pixels([p.resize(small, box).resize((w, h), box) for p in _pictures(x)])


def jpeg_compression(x: Pixels, level: Level, streams: Streams) -> Pixels:
    """level: quality."""
    out: list[Image.Image] = []
    for picture in _pictures(x):
        file = BytesIO()
        picture.save(file, "JPEG", quality=int(level[0]))
        out.append(Image.open(file))
    return _pixels(out)
