"""The nineteen corruptions one by one: numbers to check by hand, at the published parameters."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from perada.data.corruption_textures import SHEETS, frost_sheet, plasma, pooled
from perada.data.corruptions import SEVERITIES, corrupt
from perada.lanes import rng_of

from .pictures import crops, flat


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    return crops(48, 32)


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


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_wider_pixels_are_centred_and_leave_no_gaps(size: int) -> None:
    point = np.zeros((29, 29), np.float32)
    point[14, 14] = 1
    tent = pooled(point, size)
    assert tent.sum() == pytest.approx(1)
    assert np.allclose(tent, tent[::-1, ::-1], atol=1e-6)
    assert np.allclose(sum(np.roll(tent.sum(0), k * size) for k in range(-2, 3))[14 - size : 15 + size], 1 / size)


def test_a_larger_image_sees_the_same_aperture_enlarged() -> None:
    images = flat(0, side=64)
    images[..., 31:34, 31:34] = 240
    # Severity 4 is a cross of five pixels: here five tents two pixels apart.
    tent = np.zeros((64, 64))
    tent[30:35, 30:35] = np.outer(line := np.array([1, 3, 4, 3, 1]) / 4, line) * 240
    cross = sum(np.roll(tent, move, (0, 1)) for move in ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2))) / 5
    assert np.abs(corrupt(images, "defocus_blur", 4)[0, 0] - cross).max() <= 1


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


def test_motion_ends_half_a_radius_behind() -> None:
    images = flat(0, n=40)
    images[..., 16] = 255  # an upright line: it is smeared across, by the cosine of the angle
    for severity, reach in zip(SEVERITIES, (3, 3, 3, 4, 5), strict=True):
        lit = (corrupt(images, "motion_blur", severity) > 0).any((0, 1, 2))
        assert np.flatnonzero(lit).tolist() == list(range(16 - reach, 17))


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
    for side in (32, 64, 224):
        sheets = np.stack([frost_sheet(i, 4 * side, 4 * side, side / 32) for i in range(SHEETS)])
        assert (abs(sheets.mean((1, 2)) - 0.11) < 0.03).all()  # dark, so that darkening the image counts
        assert (sheets.std((1, 2)) > 0.12).all()
        assert (sheets.max((1, 2)) > 0.9).all()  # bright needles
    sheet = frost_sheet(2, 128, 128, 1.0)
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
