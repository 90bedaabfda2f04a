"""How many classes, sites and columns data may have, and how much memory it takes to refuse more."""

from __future__ import annotations

import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perada.data import DataOptions, Federation, build_federation
from perada.data import arrays as arrays_module
from perada.data.arrays import npz
from perada.data.manifest import manifest, read_table
from perada.data.source import Source
from perada.errors import InputError
from perada.inputs import CLASSES, NAME, SITES, user_path

X = np.zeros((6, 8, 8), np.uint8)


def refused(load: Callable[[], Any], *words: str, mb: float = 1.0) -> None:
    """One line, and little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            load()
        peak = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    assert peak < mb
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.array([0, 1, 2, 0, 1, 2**32 - 1]), "label 4294967295 for 6 images: the most classes here are 1,000"),
        (np.array([0, 1, 2, 0, 1, 2**64 - 1], np.uint64), "label 18446744073709551615 for 6 images"),
        (np.array([0, 1, 2, 0, 1, 1000]), "number them from 0, or give all their names as classes"),
        (np.array([0, 1, -1, 0, 1, 2]), "label -1 of image 2 is out of range"),
        (np.full(6, -(2**63)), "label -9223372036854775808 of image 0 is out of range"),
        (np.array([0, 1, np.nan, 0, 1, 2]), "labels of type float64"),
        (np.zeros((6, CLASSES + 1), np.bool_), "100,001 labels per image"),
    ],
    ids=["32 bits", "64 bits", "1000", "below zero", "far below zero", "nan", "many labels"],
)
def test_labels_that_are_no_classes(labels: np.ndarray, says: str, tmp_path: Path) -> None:
    """A name was built per number: label 4294967295 took 9.6 GB."""
    np.savez_compressed(tmp_path / "x.npz", x=X, y=labels)
    refused(lambda: npz(str(tmp_path / "x.npz")), "x.npz", says, mb=10)
    refused(lambda: Federation.from_arrays({"a": (X, labels)}), "site 'a'", says, mb=10)


def test_as_many_classes_as_ever(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=X, y=np.array([0, 999, 2, 3, 4, 5]))
    assert len(npz(str(tmp_path / "x.npz")).classes) == 1000
    names = [f"c{i}" for i in range(5000)]
    np.savez(tmp_path / "x.npz", x=X, y=np.array([0, 4999, 2, 3, 4, 5]), classes=names)
    assert npz(str(tmp_path / "x.npz")).classes[4999] == "c4999"


def source(**changes: Any) -> Source:
    return Source(
        **{"name": "mine", "images": X[:, None], "targets": np.arange(6), "classes": tuple("abcdef")} | changes
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"classes": tuple(map(str, range(CLASSES + 1)))}, "mine: 100,001 classes, and the most is 100,000"),
        ({"classes": tuple("abcdea")}, "mine: two classes are named 'a'"),
        ({"classes": ("x" * (NAME + 1), *"abcde")}, "the name of a class has 256 characters, and the most is 255"),
        ({"site": np.array(["x" * (NAME + 1), *"abcde"])}, "the name of a site has 256 characters"),
        ({"site": np.arange(SITES + 1).astype(str)}, "mine: 100,001 sites, and the most is 100,000"),
    ],
    ids=["classes", "a class twice", "a long class", "a long site", "sites"],
)
def test_what_no_data_set_has(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_federation(DataOptions(name="given", partition="site"), source=source(**changes))


def test_tables(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(",".join(f"c{i}" for i in range(CLASSES + 1)) + "\n")
    refused(lambda: read_table(file), "x.csv: 100,001 columns", mb=30)
    file.write_text("path,label\n" + "".join(f"{i}.png,name-{i}\n" for i in range(CLASSES + 1)))
    with pytest.raises(InputError, match=r"x\.csv: column label: 100,001 classes"):
        manifest(str(file))
    file.write_text(f"path,label\na.png,{'1' * 5000}\n")  # Python reads at most 4,300 digits
    refused(lambda: manifest(str(file)), "column label: the name of a class has 5,000 characters")
    for name in ("a\0b.png", "a" * 5000 + ".png"):
        file.write_text(f"path,label\n{name},1\nb.png,1\n")
        refused(lambda: manifest(str(file)), "row 2: no image")
        refused(lambda: manifest(str(file), skip_bad=True), "cannot read 2 of 2 images")


def test_many_sites_are_split_in_one_pass() -> None:
    """What each site gets is what it got when each looked through all samples."""
    rng = np.random.default_rng(0)
    site = rng.choice(["b", "a", "ü", "10"], 400)
    many = source(images=np.zeros((400, 1, 8, 8), np.uint8), targets=rng.integers(0, 3, 400), site=site)
    f = build_federation(DataOptions(name="given", partition="site", val=0, test=0), source=many)
    for client in f.clients:
        assert client.train.tolist() == np.flatnonzero(site == client.name).tolist()


# Array files.


def test_an_array_file_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=np.zeros((5000, 64, 64), np.uint8), y=np.zeros(5000, np.int64))
    assert file.stat().st_size < 100_000
    monkeypatch.setattr(arrays_module, "free_memory", lambda device: 10_000_000)
    refused(lambda: npz(str(file)), "x.npz: its arrays take 20,520,000 bytes, and 10,000,000 are free")
    np.savez_compressed(file, x=X, y=np.arange(6), other=np.zeros(1 << 25, np.uint8))
    assert npz(str(file)).images.shape == (6, 1, 8, 8), "other keys are not even read"


def test_a_header_that_says_more_than_there_is(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    data = (tmp_path / "x.npy").read_bytes().replace(b"(6, 8, 8), }    ", b"(6, 8, 800000)} ")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", data)
    refused(lambda: npz(str(tmp_path / "x.npz")), "cannot read", "x.npz")
    (tmp_path / "x.npz").write_bytes(data)  # an .npy file under another name
    refused(lambda: npz(str(tmp_path / "x.npz")), "one array without labels")


@pytest.mark.parametrize("site", [np.arange(6) / 2, np.zeros((6, 2), int), np.array([b"\xff"] * 6)], ids=str)
def test_sites_that_are_no_names(site: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=X, y=np.arange(6), site=site)
    refused(lambda: npz(str(tmp_path / "x.npz")), "x.npz: site", "a name or number for each")


# Paths.


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "a" * 5000, "b/" * 5000])
@pytest.mark.parametrize(
    "read",
    [
        user_path,
        npz,
        manifest,
        Federation.from_folder,
        lambda path: build_federation(DataOptions(name="cifar10", root=path)),
        lambda path: build_federation(DataOptions(name="office-home", root=path)),
        lambda path: build_federation(DataOptions(name="chexpert", root=path)),
    ],
)
def test_what_is_no_path(read: Callable[[str], Any], path: str) -> None:
    refused(lambda: read(path), "is not a path")


def test_steps_that_nobody_can_count() -> None:
    from perada.data.batches import ClientBatches

    f = build_federation(
        DataOptions(name="given", partition="site", val=0, test=0), source=source(site=np.array(["a"] * 6))
    )
    with pytest.raises(MemoryError, match=r"lower Train\.epochs"):
        ClientBatches(f, [0], [10**18], 8, 0, 0, torch.float32)
