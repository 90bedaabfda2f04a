"""Your own images: decoding and its cache on disk, `.npz` files, manifests."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from perada.data import DataOptions, own
from perada.data import images as module
from perada.data.arrays import npz
from perada.data.images import decode, resized
from perada.data.manifest import manifest
from perada.errors import InputError

RNG = np.random.default_rng(0)


def refused(load: Any, *words: str) -> None:
    with pytest.raises(InputError) as error:
        load()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def picture(path: Path, red: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (red, 20, 30)).save(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "cache" / "deep"))
    monkeypatch.setattr(module, "CACHE_FROM", 1)
    return tmp_path / "cache" / "deep"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Image i's red is i."""
    return [picture(tmp_path / "data" / f"{i:02}.png", i) for i in range(20)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files decoded from here on."""
    seen: list[Path] = []
    real = module.read_and_measure

    def spy(path: Path, size: int, fit: Any) -> Any:
        seen.append(path)
        return real(path, size, fit)

    monkeypatch.setattr(module, "read_and_measure", spy)
    return seen


def reds(images: np.ndarray) -> list[int]:
    assert images.dtype == np.uint8
    assert images.shape[1:] == (3, 8, 8)
    return [int(r) for r in images[:, 0, 4, 4]]


def load(files: list[Path], skip_bad: bool = False, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return decode(files, files[0].parent, size, skip_bad)[:2]


# The cache.


def test_a_second_time_nothing_is_decoded(cache: Path, files: list[Path], reads: list[Path]) -> None:
    first, kept = load(files)
    assert sorted(reads) == files
    reads.clear()
    again, also = load(files)
    assert reads == []
    assert isinstance(again, np.memmap)
    assert reds(first) == reds(again) == list(range(20))
    assert (kept & also).all()
    (stored,) = cache.iterdir()
    assert np.array_equal(np.load(stored), first), "a plain npy file"
    torch.from_numpy(again)[0, 0, 0, 0] = 99  # warns (an error here) when the array is read-only
    assert np.load(stored)[0, 0, 0, 0] == 0, "and a change stays in memory"


@pytest.mark.parametrize("change", ["time", "length", "name", "order", "size", "fewer", "format"])
def test_whatever_the_pixels_depend_on_makes_another_key(
    cache: Path, files: list[Path], reads: list[Path], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(files)
    reads.clear()
    at = files[3].stat()
    if change == "time":
        os.utime(files[3], ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    elif change == "length":
        files[3].write_bytes(files[3].read_bytes() + b"x")
        os.utime(files[3], ns=(at.st_atime_ns, at.st_mtime_ns))
    elif change == "name":
        files[3] = files[3].rename(files[3].with_name("other.png"))
    elif change == "order":
        files.reverse()
    elif change == "fewer":
        files.pop()
    elif change == "format":
        monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    images, _ = load(files, size=9 if change == "size" else 8)
    assert len(reads) == len(files)
    if change == "order":
        assert reds(images) == list(range(19, -1, -1))


@pytest.mark.parametrize("how", ["flipped pixel", "flipped mask", "header", "cut", "longer", "empty", "a folder"])
def test_a_damaged_cache_file_is_made_again(cache: Path, files: list[Path], reads: list[Path], how: str) -> None:
    load(files)
    (stored,) = cache.iterdir()
    data = bytearray(stored.read_bytes())
    if how == "a folder":
        stored.unlink()
        stored.mkdir()
        (stored / "x").write_text("x")
    else:
        data[{"flipped pixel": 500, "flipped mask": -5, "header": 3}.get(how, 0)] ^= 1 if how[0] in "fh" else 0
        stored.write_bytes({"cut": data[:-1], "longer": data + b"x", "empty": b""}.get(how, data))
    reads.clear()
    assert reds(load(files)[0]) == list(range(20))
    assert len(set(reads)) == 20
    if how != "a folder":
        reads.clear()
        load(files)
        assert reads == [], "the new file is whole"


def test_unreadable_images_are_remembered_and_refused_all_the_same(
    cache: Path, files: list[Path], reads: list[Path]
) -> None:
    files[4].write_bytes(b"no image")
    files[7].unlink()
    refused(lambda: load(files), "04.png", "07.png", "DataOptions.skip_bad=true")
    assert list(cache.iterdir()) == [], "nothing is left of a refused set"
    for _ in range(2):
        images, kept = load(files, skip_bad=True)
        assert np.flatnonzero(~kept).tolist() == [4, 7]
        assert reds(images) == [i for i in range(20) if i not in (4, 7)]
    assert len(reads) == 40
    refused(lambda: load(files), "04.png", "07.png")
    for path in files:
        path.write_bytes(b"")
    refused(lambda: load(files, skip_bad=True), "cannot read 20 of 20", "00.png", "and 15 more")


def test_it_works_without_a_cache(cache: Path, files: list[Path], monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "file" / "cache"))
    assert reds(load(files)[0]) == list(range(20))
    monkeypatch.setenv("PERADA_CACHE", str(cache))

    full = MagicMock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(module.os, "replace", full)
    assert reds(load(files)[0]) == list(range(20))
    assert list(cache.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("PERADA_CACHE", str(cache))
    load(files)
    assert list(cache.iterdir()) == [], "20 images are too few to be worth a file"


PROGRAM = """
import sys, time
from pathlib import Path
from perada.data import images
images.CACHE_FROM, images._WINDOW, real = 1, 4, images.read_and_measure
def slow(path, size, fit):
    time.sleep(float(sys.argv[2]))
    return real(path, size, fit)
images.read_and_measure = slow
files = sorted(Path(sys.argv[1]).iterdir())
print(images.decode(files, Path(sys.argv[1]), 8, False)[0][:, 0, 4, 4].tolist())
"""


def start(folder: Path, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(pause)], stdout=-1, text=True)


def test_two_processes_and_one_that_is_killed(cache: Path, files: list[Path], reads: list[Path]) -> None:
    both = [start(files[0].parent, 0.02) for _ in range(2)]
    assert [p.communicate(timeout=60)[0].strip() for p in both] == [str(list(range(20)))] * 2
    (stored,) = cache.iterdir()
    stored.unlink()
    killed = start(files[0].parent, 0.5)
    limit = time.monotonic() + 60
    while not (parts := list(cache.glob(".images-*.part"))) and time.monotonic() < limit:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert parts
    assert list(cache.iterdir()) == parts, "only the part is left"
    assert reds(load(files)[0]) == list(range(20))
    assert len(reads) == 20
    assert parts[0].exists(), "it might belong to a process that lives"
    os.utime(parts[0], (1, 1))
    load(files[1:])
    assert not parts[0].exists()
    assert len(list(cache.iterdir())) == 2


def test_resizing(cache: Path) -> None:
    ramp = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (2, 1, 32, 1))  # [2, 1, 32, 32], brighter to the right
    found = resized(ramp, 8)
    assert found.shape == (2, 3, 8, 8)
    assert (np.diff(found[0, 2, 3].astype(int)) > 20).all()
    assert np.array_equal(found[0, 0], found[0, 2])
    stripes = np.zeros((1, 3, 64, 64), np.uint8)
    stripes[..., ::2] = 255
    assert np.abs(resized(stripes, 8).astype(int) - 127).max() < 10, "antialiased: thin stripes become grey"
    assert not np.array_equal(resized(255 - ramp, 8), found), "keyed by what is in it"


# npz files.


def jpegs(count: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    blobs = []
    for i in range(count):
        held = io.BytesIO()
        Image.new("RGB", (size, size), (40 * i, 0, 0)).save(held, "JPEG", quality=95)
        blobs.append(held.getvalue())
    return np.frombuffer(b"".join(blobs), np.uint8), np.cumsum([0, *map(len, blobs)])


def test_npz_layouts(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    x = RNG.integers(0, 256, (6, 3, 8, 9), np.uint8)
    for key, held in (("images", x), ("x", x.transpose(0, 2, 3, 1))):
        np.savez(path, **{key: held, "y": np.array([0, 1, 2, 0, 1, 2], np.uint8)})
        source = own(DataOptions(name="folder", root=str(path), size=8))
        assert np.array_equal(source.images, x)
        assert source.targets.tolist() == [0, 1, 2, 0, 1, 2]
        assert (source.classes, source.name) == (("0", "1", "2"), "mine")
        assert source.mean == (0.485, 0.456, 0.406)
    labels = np.array([[1, 0], [0, 0], [1, 1], [0, 1], [0, 0], [1, 0]])
    split = np.array(["train", "val", "test", "train", "test", "train"])
    np.savez(path, images=x[:, 0], labels=labels, classes=["edema", "nodule"], split=split, site=list("abcabc"))
    source = npz(str(path))
    assert source.images.shape == (6, 1, 8, 9)
    assert (source.targets.dtype, source.targets.tolist()) == (np.uint8, labels.tolist())
    assert (source.classes, source.mean) == (("edema", "nodule"), (0.5,))
    assert source.test is not None
    assert source.val is not None
    assert np.flatnonzero(source.test).tolist() == [2, 4]
    assert np.flatnonzero(source.val).tolist() == [1]
    assert source.site is not None
    assert source.site.tolist() == list("abcabc")


def test_npz_in_pieces_and_of_jpegs(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    x = RNG.integers(0, 256, (6, 8, 8, 3), np.uint8)
    pieces = {"train_images": x[:3], "val_images": x[3:4], "test_images": x[4:]}
    labels = {"train_labels": [["cat"], ["dog"], ["cat"]], "val_labels": [["emu"]], "test_labels": [["dog"], ["dog"]]}
    np.savez(path, **pieces, **labels)
    source = npz(str(path))
    assert [source.classes[t] for t in source.targets] == ["cat", "dog", "cat", "emu", "dog", "dog"]
    assert source.test is not None
    assert source.test.tolist() == [False] * 4 + [True] * 2
    assert np.array_equal(source.images, x.transpose(0, 3, 1, 2))
    data, offset = jpegs(4)
    held: dict[str, Any] = {"jpeg": data, "offset": offset, "y": [0, 1, 0, 1], "domain": [0, 1, 1, 0]}
    np.savez(path, **held, domains=["art", "photo"], classes=["a", "b"])
    source = npz(str(path))
    assert np.abs(source.images[:, 0, 0, 0].astype(int) - [0, 40, 80, 120]).max() < 4
    assert source.site is not None
    assert source.site.tolist() == ["art", "photo", "photo", "art"]
    np.savez(path, **held | {"offset": offset[::-1]})
    refused(lambda: npz(str(path)), "mine.npz", "offsets")


ONE = np.zeros((3, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"images": np.array([{}, 1, 2], object), "labels": [0, 1, 2]}, "Python objects"),
        ({"images": ONE, "labels": np.array([{}, 1, 2], object)}, "Python objects"),
        ({"images": ONE.astype(np.int16), "labels": [0, 1, 2]}, "images of type int16: expected uint8"),
        ({"images": ONE + np.float32(1.5), "labels": [0, 1, 2]}, "float images must lie in [0, 1], not [1.5, 1.5]"),
        ({"images": np.full((3, 8, 8), np.nan), "labels": [0, 1, 2]}, "float images must lie in [0, 1]"),
        ({"images": np.zeros((3, 8, 8, 4), np.uint8), "labels": [0, 1, 2]}, "[3, 8, 8, 4]"),
        ({"images": ONE}, "no labels"),
        ({"labels": [0]}, "no images"),
        ({"images": ONE, "labels": [0, 1]}, "for 3 images"),
        ({"images": ONE[:0], "labels": np.zeros(0, int)}, "no images in it"),
        ({"images": ONE, "labels": [0, -1, 1]}, "label -1 of image 1 is out of range"),
        ({"images": ONE, "labels": [0, 2, 1], "classes": ["a", "b"]}, "label 2 of image 1 is out of range"),
        ({"images": ONE, "labels": [0.5, 1, 1]}, "float64"),
        ({"images": ONE, "labels": [[0, 2], [0, 0], [0, 1]]}, "0 or 1"),
        ({"images": ONE, "labels": ["a", "c", "a"], "classes": ["a", "b"]}, "'c'"),
        ({"images": ONE, "labels": [0, 1, 1], "split": ["train", "tst", "test"]}, "'tst'"),
        ({"images": ONE, "labels": [0, 1, 1], "split": ["train"]}, "split"),
        ({"images": ONE, "labels": [0, 1, 1], "domain": [0, 1, 2], "domains": ["a", "b"]}, "out of range"),
        ({"x_train": ONE, "y_train": [0, 1, 1], "x_test": ONE}, "y_test"),
    ],
)
def test_bad_npz(tmp_path: Path, held: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "mine.npz", **held)
    refused(lambda: npz(str(tmp_path / "mine.npz")), str(tmp_path / "mine.npz"), says)


def test_a_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    refused(lambda: npz(str(path)), "no such file", "mine.npz")
    np.savez_compressed(path, images=ONE, labels=[0, 1, 1])
    data = path.read_bytes()
    for bad in (data[:-40], b"", b"hello", data[:60] + b"\xff" * 20 + data[80:]):
        path.write_bytes(bad)
        refused(lambda: npz(str(path)), "cannot read", "mine.npz")
    np.save(path.with_suffix(".npy"), ONE)
    refused(lambda: npz(str(path.with_suffix(".npy"))), "mine.npy", "without labels")


# Manifests.


def table(tmp_path: Path, text: str, name: str = "list.csv") -> str:
    for i in range(4):
        picture(tmp_path / "pictures" / f"{i}.png", 50 * i)
    (tmp_path / name).write_text(text, encoding="utf-8-sig" if name == "bom.csv" else "utf-8")
    return str(tmp_path / name)


ROWS = "path,site,split,label\npictures/0.png,a,train,9\npictures/1.png,b,test,10\n\npictures/2.png,b,,9\n"


@pytest.mark.parametrize(
    ("between", "name"), [(",", "list.csv"), ("\t", "list.tsv"), (";", "list.csv"), (",", "bom.csv")]
)
def test_manifest_of_one_label(tmp_path: Path, between: str, name: str) -> None:
    source = own(DataOptions(name="folder", root=table(tmp_path, ROWS.replace(",", between), name), size=8))
    assert reds(source.images) == [0, 50, 100]
    assert source.classes == ("9", "10"), "numbers by their size"
    assert source.targets.tolist() == [0, 1, 0]
    assert source.site is not None
    assert source.site.tolist() == ["a", "b", "b"]
    assert source.test is not None
    assert source.test.tolist() == [False, True, False]
    assert source.val is None


def test_manifest_of_several_labels(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"x")
    text = (
        "Path,Edema,Site,Nodule,Split\npictures/3.png,1,b,0,val\nbroken.png,0,c,0,test\npictures/1.png,1,a,1.0,train\n"
    )
    refused(lambda: manifest(table(tmp_path, text), 8), "broken.png", "DataOptions.skip_bad=true")
    source = manifest(table(tmp_path, text), 8, skip_bad=True)
    assert source.classes == ("Edema", "Nodule")
    assert source.targets.tolist() == [[1, 0], [1, 1]]
    assert source.site is not None
    assert source.val is not None
    assert (source.site.tolist(), source.val.tolist(), source.test) == (["b", "a"], [True, False], None)
    assert reds(source.images) == [150, 50]
    noted = manifest(table(tmp_path, f"path,label,age\n{tmp_path}/pictures/3.png,cat,77\n"), 8)
    assert (noted.classes, noted.site, reds(noted.images)) == (("cat",), None, [150])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ROWS.replace("path", "file"), ["no column 'path'"]),
        ("path,site\npictures/0.png,a\n", ["no column 'label'"]),
        (ROWS.replace("2.png", "7.png"), ["row 5", "pictures/7.png"]),
        (ROWS.replace(",10\n", ",\n"), ["row 3", "label is blank"]),
        (ROWS.replace("test", "tset"), ["row 3", "'tset'", "train, val or test"]),
        (ROWS.replace("png,a", "png,"), ["row 2", "site is blank"]),
        ("path,edema,age\npictures/0.png,1,1\npictures/1.png,0,37\n", ["row 3", "age is '37'", "0 or 1"]),
        (ROWS.replace("2.png", "0.png"), ["row 5: pictures/0.png is in row 2 already"]),
        (ROWS.replace("pictures/2.png", "pictures/../pictures/1.png"), ["row 5", "is in row 3 already"]),
        ("path,label\npictures/0.png\n", ["row 2", "1 values for 2 columns"]),
        ("path,label,label\n", ["first row"]),
        ("path,site,label\n", ["no images"]),
        ("", ["no images"]),
    ],
)
def test_bad_manifest(tmp_path: Path, text: str, says: list[str]) -> None:
    refused(lambda: manifest(table(tmp_path, text), 8), str(tmp_path / "list.csv"), *says)


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    refused(lambda: manifest(str(tmp_path / "gone.csv")), "gone.csv")
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    refused(lambda: manifest(str(tmp_path / "list.csv")), "list.csv", "UTF-8")
