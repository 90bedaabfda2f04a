"""Every real data source, from small files in the layout of the official archives."""

from __future__ import annotations

import csv
import os
import pickle
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perada.data import SOURCES, DataOptions, public_images
from perada.data.cifar import CIFAR10_CLASSES, cifar10, cifar10_1, cifar10_c, cifar100, stl10, stl10_public
from perada.data.corruptions import CORRUPTIONS
from perada.data.folder import office_home
from perada.data.manifest import DISEASES, chexpert
from perada.data.source import UNKNOWN
from perada.errors import InputError

RNG = np.random.default_rng(0)
EACH = 4  # images in a CIFAR batch
X10, Y10 = RNG.integers(0, 256, (6 * EACH, 3, 32, 32), np.uint8), np.arange(6 * EACH) % 10
X100, FINE, COARSE = RNG.integers(0, 256, (9, 3, 32, 32), np.uint8), np.arange(9) * 11, np.arange(9) + 1
BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def refused(load: Any, *words: str) -> None:
    """One line that names the file and says what is wrong."""
    with pytest.raises(InputError) as error:
        load()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def python2(value: Any) -> bytes:
    """Opcodes as Python 2 wrote them into the official archives (protocol 2): text is a byte string."""
    if isinstance(value, np.ndarray):
        kind = (
            b"cnumpy\ndtype\n" + python2((b"u1", 0, 1)) + b"R" + python2((3, b"|", None, None, None, -1, -1, 0)) + b"b"
        )
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + python2((0,)) + python2(b"b") + b"tR"
        shape = python2(tuple(int(n) for n in value.shape))
        return made + b"(" + python2(1) + shape + kind + b"\x89" + python2(value.tobytes()) + b"tb"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(k.encode()) + python2(v) for k, v in value.items()) + b"u"
    if isinstance(value, list | tuple):
        inner = b"".join(python2(v) for v in value)
        return b"](" + inner + b"e" if isinstance(value, list) else b"(" + inner + b"t"
    if isinstance(value, bytes):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
    return b"N" if value is None else b"J" + struct.pack("<i", value)


def dump(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02" + python2(value) + b".")


def cifar10_files(root: Path) -> Path:
    python, binary = root / "cifar-10-batches-py", root / "cifar-10-batches-bin"
    binary.mkdir(parents=True)
    for i, name in enumerate(BATCHES):
        x, y = X10[i * EACH : (i + 1) * EACH].reshape(EACH, -1), Y10[i * EACH : (i + 1) * EACH]
        held = {"batch_label": b"batch", "labels": y.tolist(), "data": x, "filenames": [b"a.png"] * EACH}
        dump(python / name, held)
        (binary / f"{name}.bin").write_bytes(np.hstack([y[:, None].astype(np.uint8), x]).tobytes())
    names = "".join(f"S'{name}'\np{i}\na" for i, name in enumerate(CIFAR10_CLASSES, 5))  # this one is in protocol 0
    meta = f"(dp1\nS'num_cases_per_batch'\np2\nI{EACH}\nsS'label_names'\np3\n(lp4\n{names}sS'num_vis'\nI3072\ns."
    (python / "batches.meta").write_text(meta)
    (binary / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n\n")
    return root


def cifar100_files(root: Path) -> Path:
    names = [f"class{i}" for i in range(100)]
    for name, part in (("train", slice(0, 6)), ("test", slice(6, 9))):
        x = X100[part].reshape(-1, 3072)
        held = {"data": x, "fine_labels": FINE[part].tolist(), "coarse_labels": COARSE[part].tolist()}
        dump(root / "cifar-100-python" / name, held)
        (root / "cifar-100-binary").mkdir(exist_ok=True)
        rows = np.hstack([COARSE[part, None].astype(np.uint8), FINE[part, None].astype(np.uint8), x])
        (root / "cifar-100-binary" / f"{name}.bin").write_bytes(rows.tobytes())
    dump(root / "cifar-100-python" / "meta", {"fine_label_names": [n.encode() for n in names]})
    (root / "cifar-100-binary" / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    return root


def test_our_python_2_pickles_are_what_numpy_reads(tmp_path: Path) -> None:
    dump(tmp_path / "x", {"data": X10[:2].reshape(2, -1), "labels": [1, 300]})
    found = pickle.loads((tmp_path / "x").read_bytes(), encoding="bytes")
    assert np.array_equal(found[b"data"].reshape(2, 3, 32, 32), X10[:2])
    assert found[b"labels"] == [1, 300]


def public(name: str, root: str, size: int) -> np.ndarray:
    found = public_images(name, size, root)
    assert found is not None
    return found.numpy()


@pytest.mark.parametrize("layout", ["cifar-10-batches-py", "cifar-10-batches-bin", "npz"])
@pytest.mark.parametrize("inner", [False, True])
def test_cifar10(tmp_path: Path, layout: str, inner: bool) -> None:
    root = tmp_path
    if layout == "npz":
        x, cut = X10.transpose(0, 2, 3, 1), 5 * EACH
        np.savez(tmp_path / "cifar10.npz", x_train=x[:cut], y_train=Y10[:cut], x_test=x[cut:], y_test=Y10[cut:])
        root = tmp_path / "cifar10.npz" if inner else tmp_path
    else:
        shutil.copytree(cifar10_files(tmp_path / "all") / layout, tmp_path / layout)
        root = (tmp_path / layout).rename(tmp_path / "renamed") if inner else tmp_path
    source = SOURCES["cifar10"](DataOptions(name="cifar10", root=str(root), size=32))
    assert np.array_equal(source.images, X10)
    assert np.array_equal(source.targets, Y10)
    assert source.targets.dtype == np.int64
    assert source.test is not None
    assert np.flatnonzero(source.test).tolist() == list(range(5 * EACH, 6 * EACH))
    assert source.classes == CIFAR10_CLASSES
    assert source.mean == (0.4914, 0.4822, 0.4465)


@pytest.mark.parametrize("layout", ["cifar-100-python", "cifar-100-binary"])
def test_cifar100_has_the_fine_labels(tmp_path: Path, layout: str) -> None:
    source = cifar100(str(cifar100_files(tmp_path) / layout))
    assert np.array_equal(source.images, X100)
    assert np.array_equal(source.targets, FINE)
    assert source.classes[:2] == ("class0", "class1")
    assert source.test is not None
    assert source.test.tolist() == [False] * 6 + [True] * 3


def test_public_images_are_the_training_ones_at_the_size_asked_for(tmp_path: Path) -> None:
    root = str(cifar10_files(tmp_path))
    assert np.array_equal(public("cifar10", root, 32), X10[: 5 * EACH])
    found = public("cifar10", root, 16)
    assert found.shape == (5 * EACH, 3, 16, 16)
    assert np.abs(found.mean((2, 3)) - X10[: 5 * EACH].mean((2, 3))).max() < 2


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_written_again_by_python_3(tmp_path: Path, protocol: int) -> None:
    root = cifar10_files(tmp_path)
    for i, name in enumerate(BATCHES):
        x, y = X10[i * EACH : (i + 1) * EACH].reshape(EACH, -1), Y10[i * EACH : (i + 1) * EACH].tolist()
        held = {b"data": np.asfortranarray(x) if i == 1 else x, b"labels": y}
        (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(held, protocol))
    assert np.array_equal(cifar10(str(root)).images, X10)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    root = cifar10_files(tmp_path)
    batch = root / "cifar-10-batches-py" / "data_batch_2"
    good = batch.read_bytes()
    for protocol in (0, 2, 4):
        batch.write_bytes(pickle.dumps({"data": Evil(tmp_path / "owned")}, protocol))
        refused(lambda: cifar10(str(root)), "data_batch_2", "mkdir", "not run")
    for code in (b"cbuiltins\neval\n(U\x011tR.", b"c__builtin__\ngetattr\n.", b"cnumpy\nload\n.", b"(inumpy\nload\n."):
        batch.write_bytes(b"\x80\x02" + code)
        refused(lambda: cifar10(str(root)), "data_batch_2", "not run")
    assert not (tmp_path / "owned").exists()
    # Setting attributes of the classes that stand for numpy's must not outlast the file.
    batch.write_bytes(b"\x80\x02cnumpy\nndarray\n(N}U\x0c__setstate__U\x01xstb.")
    refused(lambda: cifar10(str(root)), "data_batch_2")
    batch.write_bytes(good)
    assert np.array_equal(cifar10(str(root)).images, X10)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-100], "a record short": data[:-3073], "empty": b"", "text": b"hello"}[how])


@pytest.mark.parametrize(
    ("file", "how", "says"),
    [
        ("cifar-10-batches-py/data_batch_3", "cut", "cut short"),
        ("cifar-10-batches-py/test_batch", "gone", "missing"),
        ("cifar-10-batches-py/batches.meta", "empty", "cut short"),
        ("cifar-10-batches-py/data_batch_1", "text", "pickle"),
        ("cifar-10-batches-bin/data_batch_3.bin", "cut", "whole records"),
        ("cifar-10-batches-bin/data_batch_3.bin", "a record short", "3 images instead of 4"),
        ("cifar-10-batches-bin/test_batch.bin", "empty", "cut short"),
        ("cifar-10-batches-bin/batches.meta.txt", "gone", "class names"),
    ],
)
def test_a_damaged_cifar_file_is_named(tmp_path: Path, file: str, how: str, says: str) -> None:
    root = cifar10_files(tmp_path)
    damage(root / file, how)
    refused(lambda: cifar10(str((root / file).parent)), Path(file).stem.split(".")[0], says)


def test_cifar_labels_out_of_range_and_missing_folders(tmp_path: Path) -> None:
    refused(lambda: cifar10(str(tmp_path)), "cifar-10-batches-py", "perada data get cifar10", str(tmp_path))
    refused(lambda: cifar100(str(tmp_path)), "cifar-100-python", "perada data get cifar100")
    root = cifar10_files(tmp_path)
    bad = root / "cifar-10-batches-bin" / "data_batch_4.bin"
    bad.write_bytes(b"\x0c" + bad.read_bytes()[1:])
    refused(lambda: cifar10(str(bad.parent)), "data_batch_4.bin", "label 12", "0 to 9")
    held = {"labels": [0, 1, 2, -1], "data": X10[:4].reshape(4, -1)}
    dump(root / "cifar-10-batches-py" / "data_batch_5", held)
    refused(lambda: cifar10(str(root)), "data_batch_5", "label -1")
    np.savez(tmp_path / "other.npz", images=X10[:, :, :8, :8], labels=Y10)
    refused(lambda: cifar10(str(tmp_path / "other.npz")), "other.npz", "x_train")


def test_cifar10_1(tmp_path: Path) -> None:
    data, labels = tmp_path / "cifar10.1_v6_data.npy", tmp_path / "cifar10.1_v6_labels.npy"
    refused(lambda: cifar10_1(str(tmp_path)), "perada data get cifar10.1")
    np.save(data, X10.transpose(0, 2, 3, 1))
    np.save(labels, Y10.astype(np.int32))
    images, found = cifar10_1(str(tmp_path))
    assert np.array_equal(images, X10)
    assert np.array_equal(found, Y10)
    np.save(labels, np.where(Y10 == 3, 10, Y10).astype(np.int32))
    refused(lambda: cifar10_1(str(tmp_path)), labels.name, "label 10 of image 3")
    np.save(data, X10)
    refused(lambda: cifar10_1(str(tmp_path)), data.name, "[n, 32, 32, 3]")
    np.save(data, np.array([Evil(tmp_path)], object), allow_pickle=True)
    refused(lambda: cifar10_1(str(tmp_path)), data.name)


def test_cifar10_c_reads_one_severity_of_one_corruption(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    each = 200
    x = RNG.integers(0, 256, (5 * each, 32, 32, 3), np.uint8)
    y = np.tile(np.arange(each) % 10, 5)
    np.save(folder / "fog.npy", x)
    np.save(folder / "labels.npy", y)
    for severity in (1, 4, 5):
        images, labels = cifar10_c(str(tmp_path), "fog", severity)
        assert np.array_equal(images, x[(severity - 1) * each : severity * each].transpose(0, 3, 1, 2))
        assert np.array_equal(labels, y[:each])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cifar10_c(str(folder), "fog", 2)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < x.nbytes / 2, "the other severities stay on disk"
    assert len(CORRUPTIONS) == 19
    refused(lambda: cifar10_c(str(tmp_path), "fogg", 1), "did you mean 'fog'?")
    refused(lambda: cifar10_c(str(tmp_path), "fog", 6), "1 to 5")
    refused(lambda: cifar10_c(str(tmp_path), "snow", 1), "snow.npy is missing")
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:-1000])
    refused(lambda: cifar10_c(str(tmp_path), "fog", 1), "fog.npy", "cut short")


@pytest.fixture
def stl(tmp_path: Path) -> Path:
    """Four images each, with a white square at rows 0-23 and columns 48-95 of channel 1."""
    x = np.zeros((4, 3, 96, 96), np.uint8)
    x[:, 1, :24, 48:] = 255
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for i, name in enumerate(("train", "test", "unlabeled")):
        x[:, 2] = 10 * (i + 1)
        (folder / f"{name}_X.bin").write_bytes(x.transpose(0, 1, 3, 2).tobytes())  # column by column
        (folder / f"{name}_y.bin").write_bytes(bytes([1, 2, 10, 3]))
    (folder / "unlabeled_y.bin").unlink()
    (folder / "class_names.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n")
    return tmp_path


@pytest.mark.parametrize("size", [96, 32])
def test_stl10(stl: Path, size: int) -> None:
    source = SOURCES["stl10"](DataOptions(name="stl10", root=str(stl), size=size))
    assert source.images.shape == (8, 3, size, size)
    assert source.targets.tolist() == [0, 1, 9, 2] * 2
    assert source.test is not None
    assert source.test.tolist() == [False] * 4 + [True] * 4
    a = size // 8
    assert source.images[0, 1, a, 6 * a] == 255, "up on the right, not down on the left"
    assert source.images[0, 1, 6 * a, a] == 0
    found = public("stl10", str(stl / "stl10_binary"), size)
    assert found[:, 2, -1, 0].tolist() == [30] * 4 + [10] * 4, "unlabelled and train, not test"


def test_bad_stl10(stl: Path) -> None:
    folder = stl / "stl10_binary"
    (folder / "train_y.bin").write_bytes(bytes([1, 2, 0, 3]))
    refused(lambda: stl10(str(stl), 96), "train_y.bin", "image 2 is out of range")
    damage(folder / "unlabeled_X.bin", "cut")
    refused(lambda: stl10_public(str(stl), 96), "unlabeled_X.bin", "whole images")


def picture(path: Path, red: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (10, 8), (red, 20, 30)).save(path)
    return path


def test_office_home(tmp_path: Path) -> None:
    base = tmp_path / "OfficeHomeDataset_10072016"
    domains = ("Art", "Clipart", "Product", "Real World")
    for i, domain in enumerate(domains):
        for name in ("Alarm_Clock", "Bed"):
            picture(base / domain / name / "00001.png", 50 * i)
    (base / "ImageInfo.csv").write_text("x")
    source = SOURCES["office-home"](DataOptions(name="office-home", root=str(tmp_path), size=8))
    assert source.name == "office-home"
    assert source.site is not None
    assert source.site.tolist() == [d for d in domains for _ in range(2)]
    assert source.images[:, 0, 0, 0].tolist() == [0, 0, 50, 50, 100, 100, 150, 150]
    assert source.classes == ("Alarm_Clock", "Bed")
    assert source.mean == (0.485, 0.456, 0.406)
    shutil.rmtree(base / "Product" / "Bed")
    refused(lambda: office_home(str(base), 8), "Product has no images of Bed")
    shutil.rmtree(base / "Real World")
    refused(lambda: office_home(str(base), 8), "no folder Real World")
    refused(lambda: office_home(str(base / "Art"), 8), "domain/class/image")
    refused(lambda: office_home(str(tmp_path / "gone"), 8), "gone")
    for domain in ("photo", "sketch"):
        picture(tmp_path / "pacs" / domain / "dog" / "1.png")
    assert office_home(str(tmp_path / "pacs"), 8).name == "pacs"


@pytest.fixture
def xrays(tmp_path: Path) -> Path:
    base = tmp_path / "CheXpert-v1.0-small"
    head = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", "Cardiomegaly", "Edema", "Consolidation"]
    head += ["Atelectasis", "Pleural Effusion", "Support Devices"]
    labels = [["1.0", "0.0", "", "", "0.0"], ["", "-1.0", "", "1.0", ""], ["", "", "", "", "1.0"]]
    base.mkdir()
    with (base / "train.csv").open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(head)
        for i, five in enumerate(labels):
            name = f"CheXpert-v1.0-small/train/patient{i:05}/study1/view1_frontal.jpg"
            picture(tmp_path / name, 60 * i)
            writer.writerow([name, "Male", 60, "Frontal", "AP", "", *five, "-1.0"])
    (base / "valid.csv").write_text(",".join(head) + "\n")
    return base


@pytest.mark.parametrize(
    ("uncertain", "rows"),
    [
        ("ones", [[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]),
        ("zeros", [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
        ("mask", [[1, 0, 0, 0, 0], [0, UNKNOWN, 0, 1, 0], [0, 0, 0, 0, 1]]),
        ("ignore", [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]),
    ],
)
def test_chexpert(xrays: Path, uncertain: Any, rows: list[list[int]]) -> None:
    source = chexpert(str(xrays.parent), 8, uncertain)
    assert source.targets.tolist() == rows
    assert source.targets.dtype == np.uint8
    assert source.multilabel
    assert source.classes == DISEASES
    assert source.test is None
    reds = source.images[:, 0, 0, 0].astype(int)
    assert np.abs(reds - ([0, 60, 120] if len(rows) == 3 else [0, 120])).max() < 5
    assert SOURCES["chexpert"](DataOptions(name="chexpert", root=str(xrays), size=8)).targets.tolist()[1] == [
        0,
        1,
        0,
        1,
        0,
    ], "U-Ones"


def test_bad_chexpert(xrays: Path) -> None:
    table = xrays / "train.csv"
    text = table.read_text()
    gone = xrays / "train" / "patient00001" / "study1" / "view1_frontal.jpg"
    gone.unlink()
    refused(lambda: chexpert(str(xrays), 8), "train.csv", "row 3", str(gone))
    assert chexpert(str(xrays), 8, skip_bad=True).targets.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    table.write_text(text.replace("Edema", "Oedema"))
    refused(lambda: chexpert(str(xrays), 8), "train.csv", "no column 'Edema'")
    table.write_text(text.replace("-1.0,,1.0", "2.0,,1.0"))
    refused(lambda: chexpert(str(xrays), 8), "row 3", "Edema is '2.0'")
    table.write_text(text.splitlines()[0] + "\n")
    refused(lambda: chexpert(str(xrays), 8), "train.csv", "no images")
    refused(lambda: chexpert(str(xrays / "train"), 8), "train.csv", "perada data get chexpert")
    refused(lambda: chexpert(str(xrays), 8, "one"), "did you mean 'ones'?")  # type: ignore[arg-type]
