"""Folders of images: sites and classes from their names, and files of any kind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CPU
from PIL import Image

from perada.data import DataOptions, build_federation, read_image
from perada.data.folder import folder, unlabelled
from perada.errors import InputError


def save(path: Path, pixels: Any, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, np.uint8)) if not isinstance(pixels, Image.Image) else pixels
    image.convert(mode).save(path)
    return path


def colour(red: int, green: int, blue: int, size: int = 8) -> np.ndarray:
    return np.broadcast_to(np.array([red, green, blue], np.uint8), (size, size, 3))


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """north: 6 cats and 4 dogs; south: 5 birds and 5 dogs. Each image's red is its number."""
    number = 0
    for site, held in {"north": {"cat": 6, "dog": 4}, "south": {"bird": 5, "dog": 5}}.items():
        for name, count in held.items():
            for i in range(count):
                save(tmp_path / "data" / site / name / f"{i}.png", colour(number, 0, 255))
                number += 1
    return tmp_path / "data"


def test_site_class_image(sites: Path) -> None:
    f = build_federation(DataOptions(name="folder", root=str(sites), partition="site", size=8, val=0.2, test=0.2), CPU)
    assert [c.name for c in f.clients] == ["north", "south"]
    assert f.classes == ("bird", "cat", "dog")
    assert f.images.shape == (20, 3, 8, 8)
    for c, mine in zip(f.clients, (range(10), range(10, 20)), strict=True):
        numbers = f.images[np.concatenate([c.train, c.val, c.test]), 0, 0, 0]
        assert sorted(numbers.tolist()) == list(mine), "a site holds its own images and no others"
        assert len(c.test) == 2
        assert len(c.val) == 2
    wanted = ["cat"] * 6 + ["dog"] * 4 + ["bird"] * 5 + ["dog"] * 5
    order = f.images[:, 0, 0, 0].long()
    assert [f.classes[t] for t in f.targets[order.argsort()].tolist()] == wanted


def test_class_image_with_simulated_sites(sites: Path) -> None:
    options = DataOptions(name="folder", root=str(sites / "north"), clients=2, alpha=1.0, size=8, val=0.1, test=0.2)
    f = build_federation(options, CPU)
    assert f.classes == ("cat", "dog")
    assert [c.name for c in f.clients] == ["client-00", "client-01"]
    parts = [p for c in f.clients for p in (c.train, c.val, c.test)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))


def test_sites_may_be_mixed_into_simulated_ones(sites: Path) -> None:
    f = build_federation(DataOptions(name="folder", root=str(sites), clients=4, alpha=1.0, size=8), CPU)
    assert len(f.clients) == 4


def test_a_site_with_two_images_trains_on_them_and_one_with_one_is_refused(sites: Path) -> None:
    options = DataOptions(name="folder", root=str(sites), partition="site", size=8)
    save(sites / "west" / "cat" / "only.png", colour(99, 0, 0))
    with pytest.raises(InputError, match="but west has 1: give it more images, leave it out"):
        build_federation(options, CPU)
    save(sites / "west" / "cat" / "other.png", colour(98, 0, 0))
    west = build_federation(options, CPU).clients[-1]
    assert (west.name, len(west.train), len(west.val), len(west.test)) == ("west", 2, 0, 0)


def test_the_server_may_hold_a_part_of_the_sites_data(sites: Path) -> None:
    options = DataOptions(name="folder", root=str(sites), partition="site", size=8, server_val=0.3)
    f = build_federation(options, CPU)
    parts = [p for c in f.clients for p in (c.train, c.val, c.test)] + [f.server_val]
    assert len(f.server_val) > 0
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    grey = save(tmp_path / "grey.png", np.full((8, 8), 77, np.uint8), "L")
    assert read_image(grey, 8).shape == (3, 8, 8)
    assert np.unique(read_image(grey, 8)).tolist() == [77]
    rgba = tmp_path / "rgba.png"
    Image.new("RGBA", (8, 8), (10, 20, 30, 255)).save(rgba)
    assert read_image(rgba, 8)[:, 0, 0].tolist() == [10, 20, 30]
    palette = save(tmp_path / "palette.gif", colour(255, 0, 0), "P")
    assert read_image(palette, 8).shape == (3, 8, 8)
    bilevel = save(tmp_path / "bilevel.png", np.full((8, 8), 255, np.uint8), "1")
    assert np.unique(read_image(bilevel, 8)).tolist() == [255]
    jpeg = save(tmp_path / "photo.JPG", colour(200, 200, 200))
    assert np.abs(read_image(jpeg, 8).astype(int) - 200).max() <= 2


def test_sixteen_bit_grey_keeps_its_shades(tmp_path: Path) -> None:
    """X-rays come so. Cut off at 255 of 65,535 they are white."""
    ramp = np.tile(np.linspace(0, 65535, 8).astype(np.uint16), (8, 1))
    Image.fromarray(ramp).save(tmp_path / "xray.png")
    found = read_image(tmp_path / "xray.png", 8)[0, 0].astype(int)
    assert np.abs(found - np.linspace(0, 255, 8)).max() <= 2


def test_an_image_is_scaled_by_its_shorter_side_and_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40, 1] = 255  # the middle square is green
    found = read_image(save(tmp_path / "wide.png", wide), 8)
    assert found.shape == (3, 8, 8)
    assert found[1].min() > 200 or found[1, :, 2:-2].min() == 255
    tall = read_image(save(tmp_path / "tall.png", wide.transpose(1, 0, 2)), 8)
    assert np.array_equal(tall, found.transpose(0, 2, 1))
    assert read_image(save(tmp_path / "tiny.png", colour(9, 9, 9, size=1)), 8).shape == (3, 8, 8)


def test_an_unreadable_file_is_named(sites: Path) -> None:
    (sites / "north" / "cat" / "bad.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(InputError, match=r"north/cat/bad\.png.*DataOptions\.skip_bad=true"):
        folder(str(sites), 8, skip_bad=False)
    source = folder(str(sites), 8, skip_bad=True)
    assert len(source.images) == len(source.targets) == 20
    assert source.skipped == (str(sites / "north" / "cat" / "bad.png"),)
    for i in range(5):
        (sites / "south" / "dog" / f"bad{i}.jpg").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"cannot read 6 of 26 images, \S+bad\.png, .*and 1 more: .*DataOptions\.skip_bad=true"
    ):
        folder(str(sites), 8, skip_bad=False)


def test_an_image_cut_in_half_is_unreadable(sites: Path) -> None:
    whole = save(sites / "north" / "cat" / "cut.png", np.random.default_rng(0).integers(0, 255, (64, 64, 3)))
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"cut\.png"):
        folder(str(sites), 8, skip_bad=False)


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "bad.png").write_bytes(b"x")
    with pytest.raises(InputError, match=r"bad\.png"):
        folder(str(tmp_path), 8, skip_bad=True)


def test_other_files_are_passed_over(sites: Path) -> None:
    (sites / "README.md").write_text("hello")
    (sites / "north" / "cat" / "Thumbs.db").write_bytes(b"x")
    (sites / "north" / ".DS_Store").write_bytes(b"x")
    assert len(folder(str(sites), 8, skip_bad=False).images) == 20


def test_hidden_files_that_look_like_images_are_passed_over(sites: Path) -> None:
    """macOS leaves `._photo.png` beside photo.png on foreign disks: no image, and no reason to stop."""
    (sites / "north" / "cat" / "._0.png").write_bytes(b"\x00\x05\x16\x07")
    assert len(folder(str(sites), 8, skip_bad=False).images) == 20


def test_hidden_folders_are_no_sites_and_no_classes(sites: Path, tmp_path: Path) -> None:
    """Version control and tools keep pictures of their own beside the user's."""
    wanted = folder(str(sites), 8, skip_bad=False)
    for place in (".git/x", "north/.thumbnails", ".cache/a/b/c"):
        save(sites / place / "a.png", colour(1, 2, 3))
    found = folder(str(sites), 8, skip_bad=False)
    assert found.classes == wanted.classes
    assert found.site is not None
    assert set(found.site.tolist()) == {"north", "south"}
    assert len(found.images) == 20
    assert len(unlabelled(str(sites), 8)) == 20
    shutil.copytree(sites, tmp_path / ".mine" / "data")
    assert len(folder(str(tmp_path / ".mine" / "data"), 8, skip_bad=False).images) == 20, "hidden is what is below"


@pytest.mark.parametrize("depth", [1, 4])
def test_images_too_high_or_too_deep_are_refused(tmp_path: Path, depth: int) -> None:
    save(tmp_path.joinpath(*"abcd"[: depth - 1], "x.png"), colour(1, 2, 3))
    with pytest.raises(InputError, match=r"site/class/image\.png"):
        folder(str(tmp_path), 8, skip_bad=False)
