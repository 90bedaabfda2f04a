"""Random views of training images, for all lanes at once, on the device.

The draws are a hash of (the lane's key of this step, the sample's place in its batch). So a client's personal and
local lanes see the same views, whatever the cohort, the grouping of lanes or the machine.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lanes import fold, uniform

SALT = 0x61756731  # keeps these draws apart from those of dropout, which use the same keys
_AREA, _RATIO = (0.25, 1.0), (3 / 4, 4 / 3)

Augment = Callable[[Tensor, Tensor], Tensor]
"""uint8 `[k·B, C, H, W]`, lane-major, and the lanes' keys int64 `[k]` -> the same shape."""


def _draws(images: Tensor, keys: Tensor, each: int) -> Tensor:
    """Returns uniform draws `[k·B, each]`."""
    return uniform(fold(keys, SALT), len(images) // len(keys) * each).view(len(images), each)


def _flip(images: Tensor, draw: Tensor) -> Tensor:
    """Mirrors left to right with probability one half; draw `[n]`."""
    return torch.where((draw < 0.5).view(-1, 1, 1, 1), images.flip(-1), images)


def flip(images: Tensor, keys: Tensor) -> Tensor:
    return _flip(images, _draws(images, keys, 1)[:, 0])


def padding(images: Tensor) -> int:
    """Returns how far `crop` shifts at most."""
    return max(1, round(min(images.shape[-2:]) / 8))


def crop(images: Tensor, keys: Tensor) -> Tensor:
    """Mirrors, and shifts by up to an eighth of the side (4 of 32 pixels); pixels from outside are zero."""
    height, width = images.shape[-2:]
    pad = padding(images)
    draw = _draws(images, keys, 3)
    down, right = (draw[:, 1:] * (2 * pad + 1)).long().unbind(1)
    padded = F.pad(_flip(images, draw[:, 0]), (pad, pad, pad, pad))
    rows = down[:, None] + torch.arange(height, device=images.device)  # [n, H]
    columns = right[:, None] + torch.arange(width, device=images.device)
    image = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def resized_crop(images: Tensor, keys: Tensor) -> Tensor:
    """Mirrors, and scales a random rectangle (a quarter to all of the area, sides 3:4 to 4:3) to full size."""
    draw = _draws(images, keys, 5)
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * draw[:, 1]
    ratio = torch.exp(math.log(_RATIO[0]) + (math.log(_RATIO[1]) - math.log(_RATIO[0])) * draw[:, 2])
    wide, high = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    right, down = (1 - wide) * (2 * draw[:, 3] - 1), (1 - high) * (2 * draw[:, 4] - 1)  # of the centre, in [-1, 1]
    mirrored = torch.where(draw[:, 0] < 0.5, -wide, wide)
    zero = torch.zeros_like(wide)
    theta = torch.stack([mirrored, zero, right, zero, high, down], 1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    scaled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return scaled.round().clamp(0, 255).to(torch.uint8)


AUGMENT: dict[str, Augment | None] = {"none": None, "flip": flip, "crop": crop, "resized-crop": resized_crop}

DRAWS: dict[Augment | None, int] = {None: 0, flip: 1, crop: 3}
"""Draws per sample, of the augmentations that `Ops.views` knows."""
