"""The nineteen corruptions: published names and numbers, results that depend on the right things."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from perada.data import corruptions
from perada.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupted
from perada.data.digits import digits
from perada.errors import InputError

from .pictures import crops, flat

FIFTEEN = [
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
]
FOUR = ["speckle_noise", "gaussian_blur", "spatter", "saturate"]
# Their published parameters do not ask for ever larger differences.
UNEVEN = ("saturate", "elastic_transform", "glass_blur")
DRAWN = [n for n in CORRUPTIONS if n.endswith("noise")] + [
    *("glass_blur", "motion_blur", "snow", "frost", "fog", "elastic_transform", "spatter")
]


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    return crops(48, 32)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(float) - b) ** 2).mean())


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    """The mean over images of the correlation of their pixels."""
    return float(np.mean([np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in zip(a, b, strict=True)]))


# Names, shapes, severities.


def test_the_names_are_the_published_ones() -> None:
    assert list(CORRUPTIONS) == FIFTEEN + FOUR
    assert all(len(kind.levels) == 5 for kind in CORRUPTIONS.values())


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_higher_severity_changes_images_more(name: str, side: int) -> None:
    images = crops(48, side)
    before = images.copy()
    copies = [corrupt(images, name, s) for s in SEVERITIES]
    assert np.array_equal(images, before)
    assert all(c.shape == images.shape and c.dtype == np.uint8 for c in copies)
    changes = [difference(c, images) for c in copies]
    assert changes[0] > 1
    assert name in UNEVEN or all(a < b for a, b in pairwise(changes)), changes
    assert all((c != images).any((1, 2, 3)).mean() > 0.9 for c in copies)  # not a few images only


def test_frost_hides_more_of_the_image_at_a_higher_severity(photos: np.ndarray) -> None:
    found = [likeness(corrupt(photos, "frost", s), photos) for s in SEVERITIES]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.95
    assert found[4] < 0.92


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_images_are_still_like_the_image(name: str, photos: np.ndarray) -> None:
    own = likeness(corrupt(photos, name, 2), photos)
    other = likeness(corrupt(photos, name, 2), np.roll(photos, 1, 0))
    assert own > 0.75 > other + 0.3


# What a result depends on.


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_knows_nothing_of_its_neighbours(
    name: str, photos: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = corrupt(photos, name, 4)
    assert np.array_equal(corrupt(photos[:7], name, 4), whole[:7])
    others = photos.copy()
    others[:5] = 255 - others[:5]
    assert np.array_equal(corrupt(others, name, 4)[5:], whole[5:])
    monkeypatch.setattr(corruptions, "BLOCK", 5)
    assert np.array_equal(corrupt(photos, name, 4), whole)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_place_choose_the_draws(name: str) -> None:
    ramp = np.arange(3 * 32 * 32, dtype=np.uint32).reshape(3, 32, 32) * 255 // 3072
    images = np.stack([ramp] * 6).astype(np.uint8)
    a, b = corrupt(images, name, 5), corrupt(images, name, 5, seed=1)
    assert np.array_equal(a, corrupt(images, name, 5, seed=0))
    assert np.array_equal(b, corrupt(images, name, 5, seed=np.int64(1)))
    drawn = name in DRAWN
    assert np.array_equal(a, b) != drawn
    assert np.array_equal(a[0], a[1]) != drawn


def test_severities_share_their_draws() -> None:
    noise = [corrupt(flat(128), "gaussian_noise", s).astype(float).ravel() - 128 for s in (1, 5)]
    assert np.corrcoef(*noise)[0, 1] > 0.99
    assert noise[1].std() == pytest.approx(2.5 * noise[0].std(), rel=0.02)
    # A value that is black or white at one severity is so at the next.
    hit = [corrupt(flat(128, n=9), "impulse_noise", s) for s in SEVERITIES]
    assert all((b[a != 128] == a[a != 128]).all() for a, b in pairwise(hit))


def test_strided_images_give_the_same(photos: np.ndarray) -> None:
    strided = np.asfortranarray(photos[:4])
    for name in ("contrast", "elastic_transform", "pixelate"):
        assert np.array_equal(corrupt(strided, name, 3), corrupt(photos[:4], name, 3))


@pytest.mark.parametrize("workers", [1, 3])
def test_all_copies_in_order_whatever_the_workers(
    workers: int, photos: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruptions, "BLOCK", 10)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(corruptions, "cores", lambda: workers)
    names = list(CORRUPTIONS)
    found = list(corrupted(photos[:25], names, [5, 2], progress=lambda *a: seen.append(a)))
    assert [(n, s) for n, s, _ in found] == [(n, s) for n in names for s in (5, 2)]
    assert all(np.array_equal(copy, corrupt(photos[:25], n, s)) for n, s, copy in found)
    assert seen == [(i, 38) for i in range(1, 39)]


def test_nobody_has_to_take_all_copies(photos: np.ndarray) -> None:
    made = corrupted(photos, list(CORRUPTIONS), SEVERITIES)
    assert next(made)[:2] == ("gaussian_noise", 1)
    made.close()  # type: ignore[attr-defined]
    assert [len(x) for _, _, x in corrupted(photos[:0], ["fog"], [1, 2])] == [0, 0]


# Sizes and channels.


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_grey_images_of_eight_pixels(name: str) -> None:
    images = digits().images[:40]
    copies = [corrupt(images, name, s) for s in SEVERITIES]
    assert all(c.shape == (40, 1, 8, 8) and c.dtype == np.uint8 for c in copies)
    assert all((c != images).any((1, 2, 3)).mean() > 0.3 for c in copies)  # spatter misses some images this small
    least = 0.3 if name == "glass_blur" else 0.5  # which moves pixels by one or two, of eight
    assert all(likeness(c, images) > least for c in copies)
    assert name in UNEVEN or difference(copies[4], images) > 1.5 * difference(copies[0], images)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 24, 40), (3, 71, 50)])
def test_other_sizes(name: str, shape: tuple[int, ...]) -> None:
    y, x = np.mgrid[0 : shape[1], 0 : shape[2]]
    image = 128 + 60 * np.sin(y / 1.2) + 60 * np.cos(x / 1.3)
    images = np.stack([np.broadcast_to(image, shape), np.broadcast_to(255 - image, shape)]).astype(np.uint8)
    images[:, -1] //= 2
    for severity in (1, 5):
        found = corrupt(images, name, severity)
        assert found.shape == images.shape
        assert difference(found, images) > 0.5


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"saturate"}))
def test_grey_images_in_three_channels_are_corrupted_as_in_one(name: str) -> None:
    # Independent noise a channel and the tints of ice, water and mud aside, colour plays no part.
    y, x = np.mgrid[0:32, 0:32]
    one = np.broadcast_to(128 + 50 * np.sin(y / 3) + 50 * np.cos(x / 4), (24, 1, 32, 32)).astype(np.uint8)
    grey, colour = corrupt(one, name, 3), corrupt(np.repeat(one, 3, 1), name, 3)
    if name in ("frost", "spatter", "jpeg_compression"):
        luma = (colour * np.array([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdims=True)
        assert np.abs(luma - grey).mean() < 2.5
    elif name.endswith("noise"):
        assert difference(colour, one) == pytest.approx(difference(grey, one), rel=0.15)
    else:
        assert np.array_equal(colour, np.repeat(grey, 3, 1))


@pytest.mark.parametrize(("side", "width"), [(8, 1), (32, 1), (64, 2), (128, 4)])
def test_a_blur_is_as_wide_as_the_image_asks(side: int, width: float) -> None:
    images = flat(0, side=side)
    images[..., side // 2] = 255  # a line
    line = corrupt(images, "gaussian_blur", 5)[0, 0, 0].astype(float)
    far = np.arange(side) - side // 2
    assert np.sqrt((line * far**2).sum() / line.sum()) == pytest.approx(width, rel=0.05)


@pytest.mark.parametrize("name", ["spatter", "snow", "frost", "fog", "elastic_transform", "motion_blur"])
@pytest.mark.parametrize("severity", [2, 5])
def test_a_larger_image_is_corrupted_about_as_much(name: str, severity: int) -> None:
    y, x = np.mgrid[0:128, 0:128] / 4
    smooth = 110 + 50 * np.sin(y / 3) + 50 * np.cos(x / 4)
    large = np.broadcast_to(smooth, (24, 1, 128, 128)).astype(np.uint8)
    small = large[..., 2::4, 2::4]
    ratio = difference(corrupt(large, name, severity), large) / difference(corrupt(small, name, severity), small)
    assert 0.5 < ratio < 2


# Refusals.


@pytest.mark.parametrize("severity", [0, 6, -1])
def test_severities_are_one_to_five(severity: int) -> None:
    with pytest.raises(InputError, match=f"^severity must be 1 to 5, not {severity}$"):
        corrupt(flat(0), "fog", severity)
    with pytest.raises(InputError, match="1 to 5"):
        corrupted(flat(0), ["fog"], [1, severity])  # at once, not when the first copy is taken


def test_unknown_names() -> None:
    with pytest.raises(InputError, match=r"^unknown corruption 'gausian_noise': did you mean 'gaussian_noise'\?$"):
        corrupt(flat(0), "gausian_noise", 1)
    with pytest.raises(InputError, match=r"^unknown corruption 'xyz': known: brightness, contrast, "):
        corrupted(flat(0), ["fog", "xyz"], [1])


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.zeros((2, 3, 32, 32), np.float32), r"float32 \[2, 3, 32, 32\]"),
        (np.zeros((3, 32, 32), np.uint8), r"uint8 \[3, 32, 32\]"),
        (np.zeros((2, 32, 32, 3), np.uint8), r"uint8 \[2, 32, 32, 3\]"),
        (np.zeros((2, 3, 32, 7), np.uint8), r"uint8 \[2, 3, 32, 7\]"),
    ],
    ids=["float", "one image", "channels last", "seven pixels"],
)
def test_images_that_cannot_be_corrupted(images: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=rf"^corruptions need uint8 images .* not {said}$"):
        corrupt(images, "fog", 1)
    with pytest.raises(InputError, match="corruptions need"):
        corrupted(images, ["fog"], [1])


def test_a_cache_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^cannot make the cache folder .*file.*; choose another$"):
        corrupted(flat(0), ["fog"], [1], cache=tmp_path / "file")
