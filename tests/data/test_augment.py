"""Random views: what they may do to an image, and that nothing but the client's key decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perada.data.augment import AUGMENT, Augment, crop, flip, resized_crop

KINDS = [kind for kind in AUGMENT.values() if kind is not None]
KEYS = torch.tensor([7, -3, 2**40, 99])


def pictures(lanes: int = 4, batch: int = 16, size: int = 32, channels: int = 3) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(1, 256, (lanes * batch, channels, size, size), np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3), (33, 3)])
def test_shape_and_type_stay(kind: Augment, size: int, channels: int) -> None:
    images = pictures(size=size, channels=channels)
    seen = kind(images, KEYS)
    assert seen.shape == images.shape
    assert seen.dtype == torch.uint8
    assert not torch.equal(seen, images)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lanes_views_hang_on_its_key_alone(kind: Augment) -> None:
    images = pictures()
    together = kind(images, KEYS)
    for k in range(4):
        alone = kind(images[k * 16 : (k + 1) * 16], KEYS[k : k + 1])
        assert torch.equal(alone, together[k * 16 : (k + 1) * 16])
    twice = kind(torch.cat([images[:16], images[:16]]), KEYS[[0, 0]])  # personal and local lane of one client
    assert torch.equal(twice[:16], twice[16:])
    other = kind(images[:16], KEYS[1:2])
    assert not torch.equal(other, together[:16])


def test_flip_is_a_mirror_for_half_the_images() -> None:
    images = pictures(lanes=4, batch=500, size=8)
    seen = flip(images, KEYS)
    mirrored = (seen == images.flip(-1)).flatten(1).all(1)
    assert bool(((seen == images).flatten(1).all(1) | mirrored).all())
    assert 0.45 < mirrored.float().mean() < 0.55


def test_crop_is_a_shift_of_at_most_an_eighth_with_zeros_outside() -> None:
    images = pictures(batch=300)
    seen = crop(images, KEYS).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    found = set()
    for image, view in zip(padded, seen, strict=True):
        where = [
            (y, x, side)
            for side in (1, -1)
            for y in range(9)
            for x in range(9)
            if (image[0, y : y + 32, ::side][0, x : x + 32] == view[0, 0]).all()
            and np.array_equal(image[:, y : y + 32, ::side][:, :, x : x + 32], view)
        ]
        assert len(where) == 1
        found.add(where[0])
    assert len(found) == 162  # every shift, mirrored and not, comes up among 1,200 images


def test_resized_crop_stays_inside_the_image_and_its_range() -> None:
    """On a ramp from left to right a view is a ramp too: its ends say which part of the image it shows."""
    ramp = torch.arange(0, 256, 4, dtype=torch.uint8).view(1, 1, 1, 64).expand(1200, 1, 64, 64).contiguous()
    seen = resized_crop(ramp, KEYS).float()
    assert seen.min() >= 0
    assert seen.max() <= 252
    steps = seen[:, 0, 0].diff(dim=1)
    left = (steps.median(1).values > 0).float().mean()
    assert 0.45 < left < 0.55  # the others are mirrored
    share = (seen[:, 0, 0].amax(1) - seen[:, 0, 0].amin(1)) / 252  # of the width
    assert share.min() > 0.4  # a quarter of the area in a 3:4 rectangle is 0.433 wide
    assert share.max() > 0.98
    assert torch.equal(
        resized_crop(torch.full((16, 3, 32, 32), 200, dtype=torch.uint8), KEYS[:1]).unique(),
        torch.tensor([200], dtype=torch.uint8),
    )
