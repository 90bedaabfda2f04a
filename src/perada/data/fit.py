"""How an image of any shape becomes one of the network's size: cropped, padded or stretched."""

from typing import Literal

import numpy as np
from PIL import Image

from .source import Pixels

Fit = Literal["crop", "pad", "stretch"]
LONGEST = 8  # times the shorter side: what `crop` keeps of the longer one before it scales


def fitted(image: Image.Image, height: int, width: int, fit: Fit = "crop") -> Pixels:
    """Returns an RGB image as uint8 `[3, height, width]`.

    crop: the shorter side is scaled to fit, and the middle is kept. pad: the longer side is scaled to fit, with black
    at both sides. stretch: both sides are scaled to fit.
    """
    if fit == "stretch":
        return _pixels(scaled(image, height, width))
    if fit == "pad":
        scale = min(width / image.width, height / image.height)
        small = scaled(image, max(1, round(image.height * scale)), max(1, round(image.width * scale)))
        framed = Image.new("RGB", (width, height))
        framed.paste(small, ((width - small.width) // 2, (height - small.height) // 2))
        return _pixels(framed)
    image = _middle(image)
    scale = max(width / image.width, height / image.height)
    image = scaled(image, max(height, round(image.height * scale)), max(width, round(image.width * scale)))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return _pixels(image.crop((left, top, left + width, top + height)))


def lost_share(image: Image.Image, height: int, width: int, fit: Fit) -> float:
    """Returns the share of an image's pixels that `fitted` leaves out."""
    ratio = (image.width * height) / (image.height * width)
    return 1 - min(ratio, 1 / ratio) if fit == "crop" else 0.0


def scaled(image: Image.Image, height: int, width: int) -> Image.Image:
    """Returns an image scaled by antialiased bicubic interpolation, first its rows and then its columns.

    Pillow 13 begins with the columns of a tall image, which rounds other values than older versions. In two steps the
    pixels are the same with every version, and the same as in an exported program.
    """
    bicubic = Image.Resampling.BICUBIC
    return image.resize((width, image.height), bicubic).resize((width, height), bicubic)


def _pixels(image: Image.Image) -> Pixels:
    pixels: Pixels = np.asarray(image, np.uint8)
    return pixels.transpose(2, 0, 1)


def _middle(image: Image.Image) -> Image.Image:
    """Returns the middle of a very long image: scaled, the whole of it might need gigabytes."""
    most = LONGEST * min(image.size)
    left, top = (max(0, length - most) // 2 for length in image.size)
    box = (left, top, min(image.width, left + most), min(image.height, top + most))
    return image if box == (0, 0, *image.size) else image.crop(box)
