"""What `data.fit` does to images that are not square, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perada.config import resolve
from perada.config.objects import about_data
from perada.data import Federation, read_image
from perada.data import images as module
from perada.data.fit import Fit, fitted, lost_share

RNG = np.random.default_rng(3)


def picture(height: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def fit(pixels: np.ndarray, how: Fit, height: int = 8, width: int = 8) -> np.ndarray:
    return fitted(Image.fromarray(pixels), height, width, how).transpose(1, 2, 0)


def test_at_the_wanted_size_nothing_changes() -> None:
    pixels = picture(8, 8)
    assert all(np.array_equal(fit(pixels, how), pixels) for how in ("crop", "pad", "stretch"))


@pytest.mark.parametrize("turned", [False, True])
def test_a_picture_twice_as_wide(turned: bool) -> None:
    """Eight rows of 16: cropped, the middle is left; padded, four rows of half as many columns between black."""
    pixels = picture(8, 16)
    given = pixels.transpose(1, 0, 2).copy() if turned else pixels
    found = {how: fit(given, how) for how in ("crop", "pad", "stretch")}
    if turned:
        found = {how: pixels.transpose(1, 0, 2) for how, pixels in found.items()}
    assert np.array_equal(found["crop"], pixels[:, 4:12])
    small = np.asarray(Image.fromarray(given).resize((4, 8) if turned else (8, 4)))
    small = small.transpose(1, 0, 2) if turned else small
    assert np.array_equal(found["pad"][2:6], small)
    assert not found["pad"][[0, 1, 6, 7]].any()
    wide = np.asarray(Image.fromarray(given).resize((8, 8)))
    assert np.array_equal(found["stretch"], wide.transpose(1, 0, 2) if turned else wide)


def test_the_wanted_shape_need_not_be_square() -> None:
    pixels = picture(6, 18)
    assert np.array_equal(fit(pixels, "crop", 6, 10), pixels[:, 4:14])
    assert fit(pixels, "pad", 12, 18)[3:9].tolist() == pixels.tolist()
    assert fit(pixels, "stretch", 5, 7).shape == (5, 7, 3)


def test_the_share_that_is_lost() -> None:
    image = Image.fromarray(picture(10, 40))
    assert lost_share(image, 8, 8, "crop") == pytest.approx(0.75)
    assert lost_share(image, 8, 16, "crop") == pytest.approx(0.5)
    assert lost_share(image, 8, 64, "crop") == pytest.approx(0.5), "rows, where the wanted shape is wider"
    assert lost_share(image, 8, 32, "crop") == pytest.approx(0)
    assert lost_share(image, 8, 8, "pad") == lost_share(image, 8, 8, "stretch") == 0


def test_an_extremely_long_image_needs_no_memory() -> None:
    pixels = np.zeros((1, 200_000, 3), np.uint8)
    for how in ("crop", "pad", "stretch"):
        assert fit(pixels, how, 64, 64).shape == (64, 64, 3)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Two sites of 16 images; half of the north's are twice as wide as high, and one is four times as high."""
    for site, wide in (("north", 8), ("south", 0)):
        for i in range(16):
            shape = (80, 20) if (site, i) == ("north", 15) else (20, 40) if i < wide else (20, 20)
            path = tmp_path / site / f"class{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(*shape)).save(path)
    return tmp_path


@pytest.mark.parametrize("cached", [False, True])
def test_one_line_says_what_is_lost(cached: bool, sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr(module, "CACHE_FROM", 1 if cached else 1000)
    for _ in range(2):  # the second time from the cache
        federation = Federation.from_folder(sites, size=8)
        (remark,) = federation.remarks
        assert "9 of 32 images" in remark
        assert "53% of their pixels on average and at most 75%" in remark  # (8 · 50 + 75) / 9
        assert "DataOptions.fit=crop" in remark
        assert about_data(federation) == [f"warning: {remark}"]
    for how in ("pad", "stretch"):
        other = Federation.from_folder(sites, size=8, fit=how)
        assert other.remarks == ()
        assert not (other.images == federation.images).all(), "the cache tells them apart"
        assert (other.images == federation.images)[20:].all(), "square images are the same"


def test_training_reads_the_fit_and_an_old_file_means_crop(sites: Path, tmp_path: Path) -> None:
    assert resolve("folder").data.fit == "crop"
    path = sites / "north" / "class0" / "0.png"
    federation = Federation.from_folder(sites, size=8, fit="pad")
    assert any((image.numpy() == read_image(path, 8, "pad")).all() for image in federation.images)
