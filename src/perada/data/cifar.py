"""CIFAR-10 and CIFAR-100, the test sets CIFAR-10.1 and CIFAR-10-C, and STL-10, as their archives unpack.

`root` is the folder that holds the official one (`cifar-10-batches-py`, `stl10_binary`, …) or that folder itself.
Python batches are pickles. A pickle is a program: here only the few names that the official files use are known,
each stands for an inert class of our own, and any other name is refused before anything is done with it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from .arrays import npz
from .images import resized, stamp
from .source import Pixels, Source

Labels = NDArray[np.int64]
Part = tuple[Pixels, Labels]  # images [n, 3, 32, 32] and labels [n]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Means and standard deviations over all training pixels of a channel.
CIFAR10_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_STATS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
STL10_STATS = ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    *("speckle_noise", "gaussian_blur", "spatter", "saturate"),  # the four extra ones
)
SEVERITIES = 5
_PIXELS = 3 * 32 * 32
_STL_SIDE = 96


def cifar10(root: str) -> Source:
    """50,000 + 10,000 images `[60000, 3, 32, 32]`, ten classes; `test` marks the official test batch.

    From `cifar-10-batches-py`, `cifar-10-batches-bin` or a `cifar10.npz` (x_train, y_train, x_test, y_test).
    """
    base = _inside(root, "cifar-10-batches-py", "data_batch_1")
    if base is not None:
        meta = _unpickle(base / "batches.meta")
        classes = _names(base / "batches.meta", meta.get("label_names"))
        parts = [_python_batch(base / name, "labels", len(classes)) for name in _batches("")]
        _same_length(base, parts, meta.get("num_cases_per_batch"))
        return _source("cifar10", parts[:5], parts[5:], classes, CIFAR10_STATS)
    base = _inside(root, "cifar-10-batches-bin", "data_batch_1.bin")
    if base is not None:
        classes = _lines(base / "batches.meta.txt")
        parts = [_binary_batch(base / name, 1, len(classes)) for name in _batches(".bin")]
        _same_length(base, parts, None)
        return _source("cifar10", parts[:5], parts[5:], classes, CIFAR10_STATS)
    return _from_npz(root, "cifar10", 10, CIFAR10_CLASSES, CIFAR10_STATS)


def cifar100(root: str) -> Source:
    """50,000 + 10,000 images `[60000, 3, 32, 32]`, the hundred fine classes; `test` marks the official test file.

    From `cifar-100-python`, `cifar-100-binary` or a `cifar100.npz`.
    """
    base = _inside(root, "cifar-100-python", "train")
    if base is not None:
        classes = _names(base / "meta", _unpickle(base / "meta").get("fine_label_names"))
        train, test = (_python_batch(base / name, "fine_labels", len(classes)) for name in ("train", "test"))
        return _source("cifar100", [train], [test], classes, CIFAR100_STATS)
    base = _inside(root, "cifar-100-binary", "train.bin")
    if base is not None:
        classes = _lines(base / "fine_label_names.txt")
        train, test = (_binary_batch(base / name, 2, len(classes)) for name in ("train.bin", "test.bin"))
        return _source("cifar100", [train], [test], classes, CIFAR100_STATS)
    return _from_npz(root, "cifar100", 100, None, CIFAR100_STATS)


def cifar10_1(root: str) -> Part:
    """CIFAR-10.1 v6: 2,000 new test images `[2000, 3, 32, 32]` and their labels `[2000]`."""
    base = _inside(root, "CIFAR-10.1", "cifar10.1_v6_data.npy")
    if base is not None and (base / "datasets").is_dir():
        base /= "datasets"  # a clone of the authors' repository
    if base is None:
        raise _missing(root, "CIFAR-10.1", "cifar10.1_v6_data.npy", "cifar10.1")
    images, labels = (_npy(base / f"cifar10.1_v6_{name}.npy") for name in ("data", "labels"))
    return _planes(base / "cifar10.1_v6_data.npy", images), _labels(
        base / "cifar10.1_v6_labels.npy", labels, len(images), 10
    )


def cifar10_c(root: str, name: str, severity: int) -> Part:
    """CIFAR-10-C: the 10,000 test images under one corruption, `[10000, 3, 32, 32]`, and their labels `[10000]`.

    A file holds the five severities one after the other; only the one asked for is read from disk.
    """
    base = _inside(root, "CIFAR-10-C", "labels.npy")
    if base is None:
        raise _missing(root, "CIFAR-10-C", "labels.npy", "cifar10-c")
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in range(1, SEVERITIES + 1):
        raise InputError(f"{name}: severity must be 1 to {SEVERITIES}, not {severity}")
    path = base / f"{name}.npy"
    images = _npy(path)
    labels = _labels(base / "labels.npy", _npy(base / "labels.npy"), len(images), 10)
    if len(images) % SEVERITIES:
        raise _damaged(path, f"{len(images)} images are not {SEVERITIES} severities of equal length")
    each = len(images) // SEVERITIES
    mine = slice((severity - 1) * each, severity * each)
    return _planes(path, images[mine]), labels[mine]


def stl10(root: str, size: int = 32) -> Source:
    """5,000 + 8,000 labelled images `[13000, 3, size, size]`, ten classes; `test` marks the official test files."""
    base = _stl(root)
    classes = _lines(base / "class_names.txt")
    parts = []
    for name in ("train", "test"):
        images = _stl_images(base / f"{name}_X.bin")
        labels = _bytes(base / f"{name}_y.bin").astype(np.int64) - 1  # in the files the classes are 1 to 10
        parts.append((_stl_sized(images, size, base, name), _labels(base / f"{name}_y.bin", labels, len(images), 10)))
    return _source("stl10", parts[:1], parts[1:], classes, STL10_STATS)


def stl10_public(root: str, size: int = 32) -> Pixels:
    """Public images without labels, unlabelled then train: `[n, 3, size, size]`.

    The official files hold 100,000 + 5,000 = 105,000; the paper's figure for "unlabelled + train" is 100.5k. All
    of both are taken: nothing says which 4,500 the authors left out.
    """
    base = _stl(root)
    parts = [_stl_sized(_stl_images(base / f"{n}_X.bin"), size, base, n) for n in ("unlabeled", "train")]
    return np.concatenate(parts)


# Finding and refusing.


def _inside(root: str, inner: str, marker: str) -> Path | None:
    base = Path(root or ".").expanduser()
    if (base / inner).is_dir():
        return base / inner
    return base if (base.is_dir() and base.resolve().name == inner) or (base / marker).is_file() else None


def _missing(root: str, folder: str, marker: str, name: str) -> InputError:
    return InputError(
        f"data.root: no {folder} (with {marker}) in {root or '.'!r}: give --data FOLDER, or perada data get {name}"
    )


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: {why}: the file is damaged or cut short; fetch it again")


def _bytes(path: Path) -> Pixels:
    """A file of bytes, mapped: nothing is read until it is used."""
    try:
        return np.memmap(path, np.uint8, "r")
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: the data set is incomplete; fetch it again") from error
    except (OSError, ValueError) as error:  # ValueError: nothing in it
        raise _damaged(path, "cannot be read") from error


def _npy(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: the data set is incomplete; fetch it again") from error
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, "cannot be read as an array of numbers") from error
    if not isinstance(found, np.ndarray):
        found.close()  # an npz under another name
        raise _damaged(path, "is no npy file")
    return found


def _lines(path: Path) -> tuple[str, ...]:
    try:
        found = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the class names: the data set is incomplete; fetch it again") from error
    return _names(path, list(found))


def _names(path: Path, found: Any) -> tuple[str, ...]:
    names = tuple(n.decode("latin1") if isinstance(n, bytes) else str(n) for n in found or ())
    if not names:
        raise _damaged(path, "holds no class names")
    return names


def _labels(path: Path, found: Any, count: int, classes: int) -> Labels:
    """int64 `[count]` within the classes, or a refusal that names the first bad one."""
    labels = np.asarray(found)
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


# CIFAR's files.


def _batches(ending: str) -> list[str]:
    return [f"{name}{ending}" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")]


def _same_length(base: Path, parts: list[Part], wanted: Any) -> None:
    """All six CIFAR-10 batches hold equally many images: one cut off between two images shows here only."""
    wanted = wanted if isinstance(wanted, int) else max(len(images) for images, _ in parts)
    for name, (images, _) in zip(_batches(""), parts, strict=True):
        if len(images) != wanted:
            raise _damaged(base / name, f"{len(images)} images instead of {wanted}")


def _source(
    name: str,
    train: list[Part],
    test: list[Part],
    classes: tuple[str, ...],
    stats: tuple[tuple[float, ...], tuple[float, ...]],
) -> Source:
    parts = train + test
    mask = np.arange(sum(len(x) for x, _ in parts)) >= sum(len(x) for x, _ in train)
    images, targets = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return Source(name, images, targets, classes, *stats, test=mask)


def _from_npz(
    root: str,
    name: str,
    count: int,
    classes: tuple[str, ...] | None,
    stats: tuple[tuple[float, ...], tuple[float, ...]],
) -> Source:
    base = Path(root or ".").expanduser()
    path = base if base.suffix == ".npz" else base / f"{name}.npz"
    if not path.is_file():
        folder = "cifar-10-batches-py" if count == 10 else "cifar-100-python"
        raise _missing(root, folder, f"its batches, or a {path.name}", name)
    source = npz(str(path))
    if source.multilabel or source.images.shape[1:] != (3, 32, 32) or len(source.classes) > count:
        raise InputError(
            f"{path} is no {name}: it needs x_train, y_train, x_test, y_test with {count} classes at 32×32"
        )
    classes = classes or tuple(str(i) for i in range(count))
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
    found = _unpickle(path)
    rows, labels = found.get("data"), found.get(key)
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != _PIXELS or not isinstance(labels, list):
        raise _damaged(path, f"no CIFAR batch with data [n, {_PIXELS}] and {key}")
    return rows.reshape(-1, 3, 32, 32), _labels(path, labels, len(rows), classes)


class _Foreign(Exception):
    """A pickle asked for something outside the few names that CIFAR's files use."""


def _unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in one of CIFAR's pickles, its keys as text and its arrays as uint8.

    Every class is made anew for each file, so that nothing a pickle does to them outlives it.
    """

    class Kind:  # numpy.dtype
        def __init__(self, *args: Any) -> None:
            self.name = args[0] if args else None

        def __setstate__(self, state: Any) -> None:
            pass

    class Array:  # numpy.ndarray
        state: Any = None

        def __setstate__(self, state: Any) -> None:
            self.state = state

    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "dtype"): Kind,
        ("numpy", "ndarray"): Array,
        ("_codecs", "encode"): lambda text, coding: text.encode(
            "latin1"
        ),  # bytes as Python 3 writes them in protocol 2
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        known[module, "_reconstruct"] = lambda *args: Array()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in known:
                raise _Foreign(f"{module}.{name}")
            return known[module, name]

    try:
        with path.open("rb") as f:
            found = Unpickler(f, encoding="bytes").load()
        fields = {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in found.items()}
        return {k: _array(v.state) if isinstance(v, Array) else v for k, v in fields.items()}
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: the data set is incomplete; fetch it again") from error
    except _Foreign as error:
        raise InputError(
            f"{path}: no CIFAR file: its pickle asks for {error}, which is not run; fetch it again"
        ) from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise _damaged(path, "cannot be read as a CIFAR pickle") from error


def _array(state: Any) -> Pixels:
    """What numpy put into the pickle: version, shape, type, column order, bytes."""
    _, shape, kind, by_columns, data = state
    if kind.name not in ("u1", b"u1") or not isinstance(data, bytes) or math.prod(shape) != len(data):
        raise ValueError("no array of bytes")
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape, order="F" if by_columns else "C")


# STL-10's files.


def _stl(root: str) -> Path:
    base = _inside(root, "stl10_binary", "train_X.bin")
    if base is None:
        raise _missing(root, "stl10_binary", "train_X.bin", "stl10")
    return base


def _stl_images(path: Path) -> Pixels:
    """`[n, 3, 96, 96]`, mapped: the files hold each channel column by column."""
    data = _bytes(path)
    if len(data) % (3 * _STL_SIDE**2):
        raise _damaged(path, f"{len(data)} bytes are not whole images of {3 * _STL_SIDE**2}")
    return data.reshape(-1, 3, _STL_SIDE, _STL_SIDE).transpose(0, 1, 3, 2)


def _stl_sized(images: Pixels, size: int, base: Path, name: str) -> Pixels:
    if size == _STL_SIDE:
        return np.ascontiguousarray(images)
    return resized(images, size, ("stl10", str(base.resolve()), stamp(base / f"{name}_X.bin")))
