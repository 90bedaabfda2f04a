"""CIFAR-10 and CIFAR-100, the test sets CIFAR-10.1 and CIFAR-10-C, and STL-10, as their archives unpack.

`root` is the folder that holds the official one (`cifar-10-batches-py`, `stl10_binary`, …), or that folder itself.
"""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..inputs import plain_file, user_path
from .arrays import npz
from .corruption_kinds import CORRUPTIONS
from .corruptions import SEVERITIES
from .images import resized, stamp
from .source import Pixels, Source

Labels = NDArray[np.int64]
Part = tuple[Pixels, Labels]  # images [n, 3, 32, 32] and labels [n]
Stats = tuple[tuple[float, ...], tuple[float, ...]]  # means and standard deviations over all training pixels

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_STATS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
STL10_STATS = ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))

_PIXELS = 3 * 32 * 32
_STL_SIDE = 96
_BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")


def cifar10(root: str) -> Source:
    """Returns 50,000 + 10,000 images `[60000, 3, 32, 32]`, ten classes; `test` marks the official test batch.

    From `cifar-10-batches-py`, `cifar-10-batches-bin` or a `cifar10.npz` (x_train, y_train, x_test, y_test).
    """
    if base := _inside(root, "cifar-10-batches-py", "data_batch_1"):
        classes = _names(base / "batches.meta", _read_pickle(base / "batches.meta").get("label_names"))
        parts = [_python_batch(base / name, "labels", len(classes)) for name in _BATCHES]
    elif base := _inside(root, "cifar-10-batches-bin", "data_batch_1.bin"):
        classes = _lines(base / "batches.meta.txt")
        parts = [_binary_batch(base / f"{name}.bin", 1, len(classes)) for name in _BATCHES]
    else:
        return _from_npz(root, "cifar10", "cifar-10-batches-py", CIFAR10_CLASSES, CIFAR10_STATS)
    most = max(len(images) for images, _ in parts)
    for name, (images, _) in zip(_BATCHES, parts, strict=True):  # only this shows a batch cut between two images
        if len(images) != most:
            raise _damaged(base / name, f"{len(images)} images instead of {most}")
    return _source("cifar10", parts, classes, CIFAR10_STATS)


def cifar100(root: str) -> Source:
    """Returns 50,000 + 10,000 images `[60000, 3, 32, 32]`, the hundred fine classes; `test` marks the test file.

    From `cifar-100-python`, `cifar-100-binary` or a `cifar100.npz`.
    """
    if base := _inside(root, "cifar-100-python", "train"):
        classes = _names(base / "meta", _read_pickle(base / "meta").get("fine_label_names"))
        parts = [_python_batch(base / name, "fine_labels", len(classes)) for name in ("train", "test")]
    elif base := _inside(root, "cifar-100-binary", "train.bin"):
        classes = _lines(base / "fine_label_names.txt")
        parts = [_binary_batch(base / f"{name}.bin", 2, len(classes)) for name in ("train", "test")]
    else:
        return _from_npz(root, "cifar100", "cifar-100-python", tuple(map(str, range(100))), CIFAR100_STATS)
    return _source("cifar100", parts, classes, CIFAR100_STATS)


def cifar10_1(root: str) -> Part:
    """Returns CIFAR-10.1 v6: 2,000 new test images `[2000, 3, 32, 32]` and their labels `[2000]`."""
    base = _required(root, "CIFAR-10.1", "cifar10.1_v6_data.npy", "cifar10.1")
    base = base / "datasets" if (base / "datasets").is_dir() else base  # a clone of the authors' repository
    data, labels = (base / f"cifar10.1_v6_{name}.npy" for name in ("data", "labels"))
    images = _planes(data, _npy(data))
    return images, _labels(labels, _npy(labels), len(images), 10)


def cifar10_c(root: str, name: str, severity: int) -> Part:
    """Returns CIFAR-10-C: 10,000 test images under one corruption, `[10000, 3, 32, 32]`, and their labels `[10000]`.

    A file has the five severities one after the other; only the one asked for is read from disk.
    """
    base = _required(root, "CIFAR-10-C", "labels.npy", "cifar10-c")
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise InputError(f"{name}: severity must be 1 to 5, not {severity}")
    path = base / f"{name}.npy"
    images = _npy(path)
    labels = _labels(base / "labels.npy", _npy(base / "labels.npy"), len(images), 10)
    count, rest = divmod(len(images), len(SEVERITIES))
    if rest:
        raise _damaged(path, f"{len(images)} images are not {len(SEVERITIES)} severities of equal length")
    part = slice((severity - 1) * count, severity * count)
    return _planes(path, images[part]), labels[part]


def stl10(root: str, size: int = 32) -> Source:
    """Returns 5,000 + 8,000 labelled images `[13000, 3, size, size]`, ten classes; `test` marks the test files."""
    base = _required(root, "stl10_binary", "train_X.bin", "stl10")
    classes = _lines(base / "class_names.txt")
    parts = []
    for name in ("train", "test"):
        images = _stl_images(base, name, size)
        labels = _bytes(base / f"{name}_y.bin").astype(np.int64) - 1  # in the files the classes are 1 to 10
        parts.append((images, _labels(base / f"{name}_y.bin", labels, len(images), 10)))
    return _source("stl10", parts, classes, STL10_STATS)


def stl10_public(root: str, size: int = 32) -> Pixels:
    """Returns public images without labels, unlabelled then train: `[n, 3, size, size]`.

    The official files have 100,000 + 5,000 = 105,000; the paper says 100.5k for "unlabelled + train". All are taken,
    because nothing says which 4,500 the authors left out.
    """
    base = _required(root, "stl10_binary", "train_X.bin", "stl10")
    return np.concatenate([_stl_images(base, name, size) for name in ("unlabeled", "train")])


# Finding and refusing.


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: {why}: the file is damaged or cut short; fetch it again")


def _missing(path: Path) -> InputError:
    return InputError(f"{path} is missing: the data set is incomplete; fetch it again")


def _inside(root: str, inner: str, marker: str) -> Path | None:
    """Returns the folder `inner` in `root`, or `root` if it is that folder; `marker` is a file in it."""
    base = user_path(root or ".")
    if (base / inner).is_dir():
        return base / inner
    return base if (base.is_dir() and base.resolve().name == inner) or (base / marker).is_file() else None


def _no_folder(root: str, folder: str, marker: str, name: str) -> InputError:
    return InputError(
        f"DataOptions.root: no {folder} (with {marker}) in {root or '.'!r}: give --data FOLDER, or perada data get "
        f"{name}"
    )


def _required(root: str, folder: str, marker: str, name: str) -> Path:
    base = _inside(root, folder, marker)
    if base is None:
        raise _no_folder(root, folder, marker, name)
    return base


def _bytes(path: Path) -> Pixels:
    """Returns a file's bytes, mapped: nothing is read until it is used."""
    try:
        return np.memmap(plain_file(path), np.uint8, "r")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise _damaged(path, "cannot be read") from error


def _npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(plain_file(path), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, "cannot be read as an array of numbers") from error
    if not isinstance(array, np.ndarray):
        array.close()  # an npz under another name
        raise _damaged(path, "is not an npy file")
    return array


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return _names(path, [line.strip() for line in plain_file(path).read_text("utf-8").splitlines() if line.strip()])
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the class names: the data set is incomplete; fetch it again") from error


def _names(path: Path, names: Any) -> tuple[str, ...]:
    if not names:
        raise _damaged(path, "has no class names")
    return tuple(n.decode("latin1") if isinstance(n, bytes) else str(n) for n in names)


def _labels(path: Path, values: Any, count: int, classes: int) -> Labels:
    """Returns labels int64 `[count]` within the classes, or names the first wrong one."""
    labels = np.asarray(values)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise _damaged(path, f"labels of shape {list(labels.shape)} for {count} images")
    labels = labels.astype(np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise _damaged(path, f"label {labels[bad[0]]} of image {bad[0]} is out of range (0 to {classes - 1})")
    return labels


def _planes(path: Path, images: NDArray[Any]) -> Pixels:
    """`[n, 32, 32, 3]` uint8 -> a copy `[n, 3, 32, 32]`."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise _damaged(path, f"{images.dtype} {list(images.shape)} instead of uint8 [n, 32, 32, 3]")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _source(name: str, parts: list[Part], classes: tuple[str, ...], stats: Stats) -> Source:
    """Returns a source of several files, of which the last one has the test images."""
    images, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    test = np.arange(len(images)) >= len(images) - len(parts[-1][0])
    return Source(name, images, targets, classes, *stats, test=test)


def _from_npz(root: str, name: str, folder: str, classes: tuple[str, ...], stats: Stats) -> Source:
    base = user_path(root or ".")
    path = base if base.suffix == ".npz" else base / f"{name}.npz"
    if not path.is_file():
        raise _no_folder(root, folder, f"its batches, or a {path.name}", name)
    source = npz(str(path))
    if source.multilabel or source.images.shape[1:] != (3, 32, 32) or len(source.classes) > len(classes):
        raise InputError(
            f"{path} is not {name}: it needs x_train, y_train, x_test, y_test with {len(classes)} classes at 32×32"
        )
    return replace(source, name=name, classes=classes, mean=stats[0], std=stats[1])


def _binary_batch(path: Path, labels: int, classes: int) -> Part:
    """Records of `labels` label bytes (the last one counts: CIFAR-100's fine label) and 3,072 pixels."""
    data = _bytes(path)
    record = labels + _PIXELS
    if len(data) % record:
        raise _damaged(path, f"{len(data)} bytes are not whole records of {record}")
    rows = data.reshape(-1, record)
    images = np.ascontiguousarray(rows[:, labels:]).reshape(-1, 3, 32, 32)
    return images, _labels(path, rows[:, labels - 1], len(rows), classes)


def _python_batch(path: Path, key: str, classes: int) -> Part:
    batch = _read_pickle(path)
    rows, labels = batch.get("data"), batch.get(key)
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != _PIXELS or not isinstance(labels, list):
        raise _damaged(path, f"no CIFAR batch with data [n, {_PIXELS}] and {key}")
    return rows.reshape(-1, 3, 32, 32), _labels(path, labels, len(rows), classes)


def _stl_images(base: Path, name: str, size: int) -> Pixels:
    """`[n, 3, size, size]`; the files have each channel column by column."""
    path = base / f"{name}_X.bin"
    data = _bytes(path)
    if len(data) % (3 * _STL_SIDE**2):
        raise _damaged(path, f"{len(data)} bytes are not whole images of {3 * _STL_SIDE**2}")
    images = data.reshape(-1, 3, _STL_SIDE, _STL_SIDE).transpose(0, 1, 3, 2)
    if size == _STL_SIDE:
        return np.ascontiguousarray(images)
    return resized(images, size, ("stl10", str(base.resolve()), stamp(path)))


# CIFAR's pickles, read without running them. A pickle is a program, and to admit numpy's own classes would not be safe:
# a crafted dtype makes numpy take bytes for pointers. So the names that the official files use give an inert class.

_INERT = {
    *(("numpy", "dtype"), ("numpy", "ndarray")),
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
}


def _read_pickle(path: Path) -> dict[str, Any]:
    """Returns the dictionary in one of CIFAR's pickles, its keys as text and its arrays as uint8."""

    class Inert:  # made anew per file, so that nothing a pickle does to it lasts
        state: Any = None

        def __init__(self, *args: Any) -> None:
            self.name = args[0] if args else None

        def __setstate__(self, state: Any) -> None:
            self.state = state

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _INERT:
                return Inert
            if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in protocol 2
                return lambda text, coding: text.encode("latin1")
            raise InputError(
                f"{path}: not a CIFAR file: its pickle asks for {module}.{name}, which is not run; fetch it again"
            )

    try:
        with plain_file(path).open("rb") as f:
            fields = Unpickler(f, encoding="bytes").load()
        texts = {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in fields.items()}
        return {k: _array(v.state) if isinstance(v, Inert) else v for k, v in texts.items()}
    except FileNotFoundError as error:
        raise _missing(path) from error
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise _damaged(path, "cannot be read as a CIFAR pickle") from error


def _array(state: Any) -> Pixels:
    """Returns an array from what numpy put into the pickle: version, shape, type, column order, bytes."""
    _, shape, kind, by_columns, data = state
    if kind.name not in ("u1", b"u1") or not isinstance(data, bytes) or math.prod(shape) != len(data):
        raise ValueError("no array of bytes")
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order="F" if by_columns else "C")
