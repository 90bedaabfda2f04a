"""The nineteen corruptions: published names and numbers, results that depend on the right things, a safe cache."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perada.data import corruptions
from perada.data.corruption_textures import frost_sheet, plasma
from perada.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupted
from perada.data.digits import digits
from perada.errors import InputError
from perada.lanes import rng_of

FIFTEEN = [
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
]
FOUR = ["speckle_noise", "gaussian_blur", "spatter", "saturate"]
# Their published parameters do not ask for ever larger differences. frost: from severity 3 on the image's share falls
# while the ice's hardly rises, and a darker image is nearer to the one that ice has brightened.
UNEVEN = ("saturate", "elastic_transform", "glass_blur", "frost")
DRAWN = [n for n in CORRUPTIONS if n.endswith("noise")] + [
    *("glass_blur", "motion_blur", "snow", "frost", "fog", "elastic_transform", "spatter")
]


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    """Crops of scikit-learn's two photographs, 65 to 255 pixels wide, made 32×32: `[48, 3, 32, 32]`."""
    from sklearn.datasets import load_sample_images

    rng, out, pictures = np.random.default_rng(0), [], load_sample_images().images
    for i in range(48):
        picture = pictures[i % 2]
        side = int(rng.integers(65, 256))
        top, left = (int(rng.integers(n - side)) for n in picture.shape[:2])
        crop = Image.fromarray(picture[top : top + side, left : left + side]).resize((32, 32), Image.Resampling.BOX)
        out.append(np.asarray(crop).transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(out))


def flat(*colour: int, n: int = 1, side: int = 32) -> np.ndarray:
    """n images of one colour."""
    return np.broadcast_to(np.array(colour, np.uint8)[:, None, None], (n, len(colour), side, side)).copy()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(float) - b) ** 2).mean())


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    """The mean over images of the correlation of their pixels."""
    return float(np.mean([np.corrcoef(x.ravel(), y.ravel())[0, 1] for x, y in zip(a, b, strict=True)]))


# Names, shapes, severities.


def test_the_names_are_the_published_ones() -> None:
    assert list(CORRUPTIONS) == FIFTEEN + FOUR
    assert all(len(kind.levels) == 5 for kind in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_higher_severity_changes_images_more(name: str, photos: np.ndarray) -> None:
    before = photos.copy()
    copies = [corrupt(photos, name, s) for s in SEVERITIES]
    assert np.array_equal(photos, before)
    assert all(c.shape == photos.shape and c.dtype == np.uint8 for c in copies)
    changes = [difference(c, photos) for c in copies]
    assert changes[0] > 1
    if name == "motion_blur":
        # Severities 3 and 4 differ in where the smear is cut (13 and 17 pixels): a sigma of 2 has ended by then.
        assert changes.pop(3) == pytest.approx(changes[2], rel=0.1)
    if name not in UNEVEN:
        assert all(a < b for a, b in pairwise(changes)), changes
    assert all((c != photos).any((1, 2, 3)).mean() > 0.9 for c in copies)  # not a few images only


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
def test_seed_place_and_severity_choose_the_draws(name: str) -> None:
    ramp = np.arange(3 * 32 * 32, dtype=np.uint32).reshape(3, 32, 32) * 255 // 3072
    images = np.stack([ramp] * 6).astype(np.uint8)
    a, b = corrupt(images, name, 5), corrupt(images, name, 5, seed=1)
    assert np.array_equal(a, corrupt(images, name, 5, seed=0))
    assert np.array_equal(b, corrupt(images, name, 5, seed=np.int64(1)))
    drawn = name in DRAWN
    assert np.array_equal(a, b) != drawn
    assert np.array_equal(a[0], a[1]) != drawn


def test_draws_of_two_severities_differ() -> None:
    noise = [corrupt(flat(128), "gaussian_noise", s).astype(float).ravel() - 128 for s in (4, 5)]
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.1


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
    names = list(CORRUPTIONS)
    found = list(corrupted(photos[:25], names, [5, 2], workers=workers, progress=lambda *a: seen.append(a)))
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
    one = np.broadcast_to(128 + 50 * np.sin(y / 3) + 50 * np.cos(x / 4), (4, 1, 32, 32)).astype(np.uint8)
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


# Numbers to check by hand.


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    "name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "contrast", "elastic_transform", "pixelate"]
)
def test_one_colour_has_nothing_to_lose(name: str, severity: int) -> None:
    images = flat(10, 130, 250, side=20)
    assert np.array_equal(corrupt(images, name, severity), images)


def test_noise_is_as_strong_as_published() -> None:
    grey = flat(128, n=60)
    x = 128 / 255
    for severity in SEVERITIES:
        for name, deviation in (
            ("gaussian_noise", [0.04, 0.06, 0.08, 0.09, 0.10]),
            ("shot_noise", np.sqrt(x / np.array([500, 250, 100, 75, 50]))),
            ("speckle_noise", x * np.array([0.06, 0.1, 0.12, 0.16, 0.2])),
        ):
            found = corrupt(grey, name, severity) / 255 - x
            assert found.std() == pytest.approx(deviation[severity - 1], rel=0.02)
            assert abs(found.mean()) < 0.002
        found = corrupt(grey, "impulse_noise", severity)
        assert set(np.unique(found)) == {0, 128, 255}
        share = [0.01, 0.02, 0.03, 0.05, 0.07][severity - 1] / 2
        assert np.mean(found == 0) == pytest.approx(share, rel=0.15)
        assert np.mean(found == 255) == pytest.approx(share, rel=0.15)


def test_noise_in_proportion_to_light_leaves_black_alone() -> None:
    assert not corrupt(flat(0), "shot_noise", 5).any()
    assert not corrupt(flat(0), "speckle_noise", 5).any()


def test_defocus_is_a_mean_over_the_aperture() -> None:
    images = flat(0, side=9)
    images[..., 4, 4] = 252
    square, cross = np.zeros((9, 9)), np.zeros((9, 9))
    square[3:6, 3:6] = 252 / 9  # radius 1.5 reaches the corners
    cross[4, 3:6] = cross[3:6, 4] = 252 / 5  # radius 1 does not
    assert np.array_equal(corrupt(images, "defocus_blur", 5)[0, 0], square)
    assert np.abs(corrupt(images, "defocus_blur", 4)[0, 0] - cross).max() <= 0.5


def test_glass_shows_a_pixel_from_next_door(photos: np.ndarray) -> None:
    found = corrupt(photos, "glass_blur", 1)[..., 1:, 1:]  # sigma 0.05 of a pixel is no blur
    near = np.stack([photos[..., 1 - dy : 32 - dy, 1 - dx : 32 - dx] for dy in (0, 1) for dx in (0, 1)])
    assert (found == near).all(2).any(0).all()  # all channels from the same pixel
    moved = (found != near[0]).any(1)
    assert 0.5 < moved.mean() <= 0.76  # three moves of four, some to a pixel of the same colour


def test_motion_is_one_sided_and_rather_horizontal() -> None:
    images = flat(0, n=40, side=65)
    images[..., 32, 32] = 255
    far = np.arange(65) - 32
    for image in corrupt(images, "motion_blur", 3)[:, 0].astype(float):
        assert image.sum() == pytest.approx(255, rel=0.05)
        down, right = (image.sum(1) * far).sum() / image.sum(), (image.sum(0) * far).sum() / image.sum()
        assert right < -1
        assert abs(down) <= -1.1 * right


def test_zoom_flattens_a_slope_by_the_mean_zoom() -> None:
    images = np.broadcast_to(np.rint(128 + 5.0 * (np.arange(33) - 16)), (1, 1, 33, 33)).astype(np.uint8)
    for severity, steps in zip(SEVERITIES, (5, 10, 15, 20, 25), strict=True):
        slope = 5 * (2 + sum(1 / (1 + k / 100) for k in range(1, steps + 1))) / (steps + 2)
        expected = 128 + slope * (np.arange(33) - 16)
        assert np.abs(corrupt(images, "zoom_blur", severity)[0, 0] - expected).max() < 0.51


def test_snow_whitens_black_and_adds_flakes() -> None:
    for severity, stays in zip(SEVERITIES, (0.95, 0.9, 0.9, 0.85, 0.8), strict=True):
        found = corrupt(flat(0, 0, 0, n=20), "snow", severity)
        assert abs(float(found.min()) - 255 * (1 - stays) / 2) <= 0.51
        assert found.max() > found.min() + 20
        assert (found == found[:, :1]).all()  # grey flakes
        assert np.array_equal(found, found[..., ::-1, ::-1])  # laid over itself upside down


def test_it_snows_outside_the_image_too() -> None:
    found = corrupt(flat(0, n=150), "snow", 4)[:, 0].astype(float)
    inside, border = found[:, 8:24, 8:24], np.concatenate([found[:, :2], found[:, -2:]], 1)
    assert border.mean() == pytest.approx(inside.mean(), rel=0.1)
    assert border.std() == pytest.approx(inside.std(), rel=0.1)


def test_frost_is_white_to_blue_and_weighted_as_published() -> None:
    black = flat(0, 0, 0, n=60)
    first, second = (corrupt(black, "frost", s).astype(float) for s in (1, 2))
    assert second.mean() / first.mean() == pytest.approx(1.5, rel=0.05)
    assert (first[:, 0] <= first[:, 1]).all()
    assert (first[:, 1] <= first[:, 2]).all()
    assert first[:, 2].max() <= 0.2 * 255 + 0.5
    sheet = frost_sheet(2, 128, 128, 1.0)
    assert 0.3 < sheet.mean() < 0.7
    assert sheet.std() > 0.15
    with pytest.raises(ValueError, match="read-only"):
        sheet[0, 0] = 1


def test_fog_on_white_and_on_black() -> None:
    assert not corrupt(flat(0), "fog", 5).any()
    for severity, density in zip(SEVERITIES, (0.2, 0.5, 0.75, 1, 1.5), strict=True):
        found = corrupt(flat(255), "fog", severity)
        assert found.max() == 255  # the thickest place, and the brightest
        assert abs(float(found.min()) - 255 / (1 + density)) <= 0.51


def test_clouds_are_finer_where_the_noise_falls_more_slowly() -> None:
    rough = []
    for fall in (9, 6.25, 4, 3.0625):
        clouds = plasma([rng_of("clouds", i) for i in range(60)], 32, fall)
        assert clouds.shape == (60, 32, 32)
        assert (clouds.min((1, 2)) == 0).all()
        assert (clouds.max((1, 2)) == 1).all()
        rough.append(float((np.diff(clouds, 2, axis=2).std((1, 2)) / clouds.std((1, 2))).mean()))
        seam = np.abs(clouds[:, :, 0] - clouds[:, :, -1]).mean()
        assert seam < 1.5 * np.abs(np.diff(clouds, axis=2)).mean()  # a torus has no border
    assert rough == sorted(rough)
    assert rough[3] > 1.5 * rough[0]
    assert plasma([rng_of("clouds")], 33, 4).shape == (1, 64, 64)


def test_brightness_lifts_the_largest_channel_and_keeps_the_hue() -> None:
    for severity, more in zip(SEVERITIES, (0.05, 0.1, 0.15, 0.2, 0.3), strict=True):
        black = corrupt(flat(0, 0, 0), "brightness", severity)
        assert np.abs(black - 255 * more).max() <= 0.51
        orange = corrupt(flat(100, 50, 0), "brightness", severity)[0, :, 0, 0]
        assert np.abs(orange - np.array([1, 0.5, 0]) * (100 + 255 * more)).max() <= 0.51
    assert (corrupt(flat(255, 100, 0), "brightness", 5) == flat(255, 100, 0)).all()


def test_contrast_shrinks_to_the_mean_of_each_channel() -> None:
    images = flat(0, 100, 40)
    images[..., 16:] += np.array([200, 100, 0], np.uint8)[:, None, None]
    for severity, keep in zip(SEVERITIES, (0.75, 0.5, 0.4, 0.3, 0.15), strict=True):
        found = corrupt(images, "contrast", severity)[0]
        for side, sign in ((0, -1), (16, 1)):
            expected = np.array([100, 150, 40]) + sign * keep * np.array([100, 50, 0])
            assert np.abs(found[:, :, side] - expected[:, None]).max() <= 0.51


def test_elastic_at_severity_one_is_affine_and_at_five_is_not() -> None:
    images = np.broadcast_to(np.arange(64) * 4, (20, 1, 64, 64)).astype(np.uint8)
    bends = []
    for severity in (1, 5):
        found = corrupt(images, "elastic_transform", severity)[:, 0, 20:44, 20:44].astype(float)
        slopes = found[..., 1:] - found[..., :-1]
        bends.append(np.abs(slopes - slopes.mean((1, 2), keepdims=True)).max())
    assert bends[0] <= 1.01  # rounding
    assert bends[1] > 2


def test_the_elastic_field_is_a_share_of_the_image() -> None:
    bends = []
    for side in (32, 128):
        images = np.broadcast_to(np.arange(side) * (256 // side), (20, 1, side, side)).astype(np.uint8)
        middle = slice(side // 4, 3 * side // 4)
        y, x = np.mgrid[middle, middle]
        plane = np.stack([y.ravel(), x.ravel(), np.ones(y.size)], 1)
        found = corrupt(images, "elastic_transform", 5)[:, 0, middle, middle].reshape(20, -1).T / 256
        bends.append((found - plane @ np.linalg.lstsq(plane, found, rcond=None)[0]).std())  # what is not affine
    # Noise of deviation 3 ** -0.5, a mean over 2 sigma √π = 3.4 pixels of 32 each way, times a tenth of the side.
    assert bends[0] == pytest.approx(0.1 * 3**-0.5 / 3.4, rel=0.2)
    assert bends[1] == pytest.approx(bends[0], rel=0.2)


def test_pixelate_is_a_mean_over_boxes() -> None:
    # Severity 4 makes three pixels of four: the two in the middle fall into one box, which is shown twice.
    images = np.broadcast_to(np.tile([0, 80, 160, 240], 8), (1, 1, 32, 32)).astype(np.uint8)
    assert corrupt(images, "pixelate", 4)[0, 0, 0, :8].tolist() == [0, 120, 120, 240] * 2


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows_at_the_published_quality(channels: int, photos: np.ndarray) -> None:
    image = photos[:1, :channels]
    for severity, quality in zip(SEVERITIES, (80, 65, 58, 50, 40), strict=True):
        file = BytesIO()
        Image.fromarray(image[0].transpose(1, 2, 0).squeeze()).save(file, "JPEG", quality=quality)
        expected = np.asarray(Image.open(file)).reshape(32, 32, channels).transpose(2, 0, 1)
        assert np.array_equal(corrupt(image, "jpeg_compression", severity)[0], expected)


def test_spatter_is_water_then_mud() -> None:
    for severity in (1, 2, 3):
        found = corrupt(flat(0, 0, 0, n=20), "spatter", severity).astype(float)
        assert found[:, 1].max() == pytest.approx(0.5 * 238, abs=1)
        assert np.array_equal(found[:, 1], found[:, 2])
        assert np.abs(found[:, 0] - found[:, 1] * 175 / 238).max() <= 1
    for severity in (4, 5):
        found = corrupt(flat(255, 255, 255, n=20), "spatter", severity).astype(float)
        hit = (found < 255).any(1)
        assert 0.01 < hit.mean() < 0.4
        cover = (255 - found[:, 2][hit]) / (255 - 20)
        assert cover.min() >= 0.79  # mud is thick or not there
        assert np.abs(found[:, 0][hit] - (255 - cover * (255 - 63))).max() <= 1


def test_saturate_moves_colours_from_and_to_grey() -> None:
    rose = {s: corrupt(flat(200, 100, 150), "saturate", s)[0, :, 0, 0].tolist() for s in SEVERITIES}
    # Saturation 0.5 becomes 0.15, 0.05, 0.75, and 1 twice; the value, 200, stays.
    assert rose == {1: [200, 170, 185], 2: [200, 190, 195], 3: [200, 50, 125], 4: [200, 0, 100], 5: [200, 0, 100]}
    grey = [corrupt(flat(100, 100, 100), "saturate", s)[0, :, 0, 0].tolist() for s in (1, 3, 4, 5)]
    assert grey == [[100] * 3, [100] * 3, [100, 90, 90], [100, 80, 80]]
    assert not corrupt(flat(0, 0, 0), "saturate", 5).any()
    one = flat(80)
    one[..., 16:] = 120
    kept = [corrupt(one, "saturate", s)[0, 0, 0, [0, 31]].tolist() for s in SEVERITIES]
    assert kept == [[94, 106], [98, 102], [70, 130], [58, 142], [46, 154]]  # 20 × 0.3, 0.1, 1.5, 2.1, 2.7


# The cache.


def copies(images: np.ndarray, cache: Path, **more: object) -> list[np.ndarray]:
    return [x for _, _, x in corrupted(images, ["fog", "contrast"], [1, 5], cache=cache, **more)]  # type: ignore[arg-type]


def test_what_is_kept_is_not_made_again(photos: np.ndarray, tmp_path: Path) -> None:
    first = copies(photos, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(folder.name) == 64
    names = ["contrast-1.npy", "contrast-5.npy", "fog-1.npy", "fog-5.npy"]
    assert sorted(p.name for p in folder.iterdir()) == names
    np.save(folder / "fog-5.npy", photos)  # whole, and plainly not fog: it can only come from the cache
    second = copies(photos, tmp_path)
    assert np.array_equal(second[1], photos)
    assert all(np.array_equal(a, b) for i, (a, b) in enumerate(zip(first, second, strict=True)) if i != 1)


def test_other_images_shapes_and_seeds_have_folders_of_their_own(photos: np.ndarray, tmp_path: Path) -> None:
    other = photos.copy()
    other[-1, -1, -1, -1] ^= 1
    for images, seed in ((photos, 0), (photos, 1), (other, 0), (photos.reshape(24, 3, 64, 32), 0)):
        found = copies(images, tmp_path, seed=seed)
        assert np.array_equal(found[0], corrupt(images, "fog", 1, seed=seed))
    assert len(list(tmp_path.iterdir())) == 4


def _zipped(path: Path, images: np.ndarray) -> None:
    with path.open("wb") as file:
        np.savez(file, images)


def _pickled(path: Path, images: np.ndarray) -> None:
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, images: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, images: path.write_bytes(path.read_bytes()[:40]),
        lambda path, images: path.write_bytes(b""),
        lambda path, images: path.write_bytes(b"no numbers"),
        lambda path, images: path.write_bytes(b"\x93NUMPY\x01\x00" + b"\xff" * 300),
        lambda path, images: np.save(path, images[:-1]),
        lambda path, images: np.save(path, images.astype(np.int8)),
        lambda path, images: path.write_bytes(path.read_bytes() + b"more"),
        _zipped,
        _pickled,
    ],
    ids=["short", "header", "empty", "text", "noise", "shape", "dtype", "long", "npz", "pickle"],
)
def test_a_damaged_file_is_made_again(damage: object, photos: np.ndarray, tmp_path: Path) -> None:
    images = photos[:6]
    first = copies(images, tmp_path)
    path = next(tmp_path.iterdir()) / "fog-5.npy"
    whole = path.read_bytes()
    damage(path, images)  # type: ignore[operator]
    assert path.read_bytes() != whole
    assert np.array_equal(copies(images, tmp_path)[1], first[1])
    assert path.read_bytes() == whole


def test_a_copy_is_there_whole_or_not_at_all(
    photos: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = copies(photos, tmp_path)
    assert np.array_equal(found[0], corrupt(photos, "fog", 1))  # the disk costs time, not the result
    assert list(next(tmp_path.iterdir()).iterdir()) == []


class Killed(BaseException):
    pass


def test_a_kill_while_writing_leaves_nothing_that_is_read(
    photos: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*names: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            copies(photos, tmp_path)
    left = [p.name for p in next(tmp_path.iterdir()).iterdir()]
    assert len(left) == 1  # as after a kill: the part is there, under a name nobody reads
    assert left[0].endswith(".part")
    assert np.array_equal(copies(photos, tmp_path)[0], corrupt(photos, "fog", 1))


PROCESS = """
import hashlib, sys
from pathlib import Path
import numpy as np
from perada.data.corruptions import corrupted
images = np.arange(40 * 3 * 256, dtype=np.uint32).astype(np.uint8).reshape(40, 3, 16, 16)
print("ready", flush=True)
sys.stdin.readline()
digest = hashlib.sha256()
for turn in range(4):  # they write at the same time, and read what the other replaces or takes away
    for _, _, copy in corrupted(images, ["snow", "frost", "fog"], [1, 2, 3, 4, 5], cache=Path(sys.argv[1]), workers=2):
        digest.update(copy.data)
    if turn % 2:
        for path in Path(sys.argv[1]).glob("*/s*.npy"):
            path.unlink(missing_ok=True)
print(digest.hexdigest())
"""


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [p.stdout.readline() for p in both] == ["ready\n"] * 2  # so that they start together
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60) for process in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert said[0] == said[1]
    images = np.arange(40 * 3 * 256, dtype=np.uint32).astype(np.uint8).reshape(40, 3, 16, 16)
    (folder,) = tmp_path.iterdir()
    kept = sorted(p.name for p in folder.iterdir())
    assert kept == sorted(f"{n}-{s}.npy" for n in ("frost", "fog") for s in SEVERITIES)  # and no part
    assert np.array_equal(np.load(folder / "fog-3.npy"), corrupt(images, "fog", 3))


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


def test_workers_and_a_cache_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^workers must be at least 1, not 0$"):
        corrupted(flat(0), ["fog"], [1], workers=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^cannot make the cache folder .*file.*; choose another$"):
        corrupted(flat(0), ["fog"], [1], cache=tmp_path / "file")
