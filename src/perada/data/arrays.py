"""Your own arrays: in memory, or in one `.npz` file, read without pickle.

| what | keys of a file | shape |
| --- | --- | --- |
| images | images, x, data | `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]`, C 1 or 3; uint8, or float in [0, 1] |
| … or as image files | jpeg (or png, encoded) and offset | all bytes, uint8, and where each image starts, `[n + 1]` |
| labels | labels, y, targets, label | `[n]` (or `[n, 1]`) whole numbers or names; 0 or 1 `[n, L]` for several labels |
| names of the classes, optional | classes, class_names, label_names | `[classes]` |
| owners, optional | site, domain, client | `[n]` names, or numbers into sites, domains or clients |
| split, optional | split | `[n]` of train, val and test; or `test` and `val` as `[n]` of 0 and 1 |

Instead of one array there may be one per split: x_train, y_train, x_test, y_test (and x_val, y_val) or train_images,
train_labels, test_images, … Other keys are ignored.
"""

from __future__ import annotations

import io
import itertools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError, unknown
from .images import IMAGENET
from .source import Mask, Pixels, Source, Targets

IMAGES = ("images", "x", "X", "data")
ENCODED = ("jpeg", "png", "encoded")
LABELS = ("labels", "y", "Y", "targets", "label")
CLASSES = ("classes", "class_names", "label_names")
SITES = {"site": ("sites", "site_names"), "domain": ("domains", "domain_names"), "client": ("clients", "client_names")}
PIECES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("images_{}", "labels_{}"))
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
Array = NDArray[Any]
Arrays = dict[str, Array]
Pair = tuple[Any, Any]  # images and labels, numpy or torch


class _Part(NamedTuple):
    """The images and labels of one site for one split; `where` names them in an error."""

    where: str
    site: str
    split: str
    images: Pixels
    labels: Array


def from_sites(sites: Mapping[str, Pair], classes: Sequence[str] | None = None, **sets: Mapping[str, Pair]) -> Source:
    """Returns a `Source` of each site's images and labels; `val` and `test` are further ones of the same sites."""
    if not sites:
        raise InputError('no sites: give {"site": (images, labels)}')
    parts = []  # sorted, so that the order of the mapping does not matter
    for split, given in {"train": sites, **sets}.items():
        for site in sorted({*sites, *given}):
            where = f"site {site!r}" if split == "train" else f"{split} data of site {site!r}"
            if site not in sites:
                raise unknown(f"site of {split} data", site, sites)
            if site not in given:
                raise InputError(f"no {where}: give every site a set of its own, or one share for all")
            try:
                x, y = given[site]
            except (TypeError, ValueError) as error:
                raise InputError(f"{where}: give a pair (images, labels)") from error
            images = pixels_of(where, x)
            parts.append(_Part(where, site, split, images, _labels(where, y, len(images))))

    def kind(labels: Array) -> tuple[Any, ...]:
        return labels.dtype.kind == "U", *labels.shape[1:]

    for p in parts:
        size, wanted = list(p.images.shape[1:]), list(parts[0].images.shape[1:])
        if size != wanted:
            raise InputError(f"{p.where}: images {size}, at other sites {wanted}")
        if kind(p.labels) != kind(parts[0].labels):
            raise InputError(f"{p.where}: labels of another kind than at other sites")
    names = _class_names(np.concatenate([p.labels for p in parts])) if classes is None else tuple(map(str, classes))
    targets = np.concatenate([_numbered(p.where, p.labels, names) for p in parts])
    counts = [len(p.images) for p in parts]
    owner = np.repeat(np.array([p.site for p in parts]), counts)
    test, val = split_masks(np.repeat([p.split for p in parts], counts).tolist())
    return _source("arrays", np.concatenate([p.images for p in parts]), targets, names, owner, test, val)


def npz(path: str) -> Source:
    """Returns a `Source` of the arrays in a file; the module's docstring has the keys."""
    file = Path(path).expanduser()
    arrays = _load(file)
    for images_key, labels_key in PIECES:
        if images_key.format("train") in arrays:
            arrays = _joined(file, arrays, images_key, labels_key)
            break
    images = _images(file, arrays)
    count = len(images)
    raw = _first(arrays, LABELS)
    if raw is None:
        raise InputError(f"{file}: no labels: expected one of {', '.join(LABELS)}, or y_train beside x_train")
    labels = _labels(str(file), raw, count)
    names = _first(arrays, CLASSES)
    classes = _class_names(labels) if names is None else tuple(str(n) for n in names.ravel())
    targets = _numbered(str(file), labels, classes)
    return _source(file.stem, images, targets, classes, _site(file, arrays, count), *_split(file, arrays, count))


def _source(
    name: str,
    images: Pixels,
    targets: Targets,
    classes: tuple[str, ...],
    site: NDArray[np.str_] | None,
    test: Mask | None,
    val: Mask | None,
) -> Source:
    mean, std = IMAGENET if images.shape[1] == 3 else ((0.5,), (0.25,))
    return Source(name, images, targets, classes, mean, std, test, site, val)


def _load(file: Path) -> Arrays:
    try:
        with file.open("rb") as f:  # opened here: numpy leaves a damaged file open
            stored = np.load(f, allow_pickle=False)
            if isinstance(stored, np.ndarray):
                raise InputError(f"{file} has one array without labels: expected an .npz with images and labels")
            return {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise InputError(f"no such file: {file}") from error
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "Object arrays" in str(error):
            raise InputError(
                f"{file}: contains Python objects, which are not loaded: save plain arrays of numbers and text "
                "(numpy.savez with dtype uint8, int64 or str)"
            ) from error
        raise InputError(f"cannot read {file}: it is damaged, or not an .npz file") from error


def _first(arrays: Arrays, keys: tuple[str, ...]) -> Array | None:
    return next((arrays[key] for key in keys if key in arrays), None)


def _joined(file: Path, arrays: Arrays, images_key: str, labels_key: str) -> Arrays:
    """x_train, x_test, … as one array with a split."""
    images, labels, split = [], [], []
    for word, name in SPLITS.items():
        x, y = images_key.format(word), labels_key.format(word)
        if x not in arrays:
            continue
        if y not in arrays or len(arrays[y]) != len(arrays[x]):
            raise InputError(f"{file}: {x} needs a {y} of the same length")
        images.append(arrays[x])
        labels.append(arrays[y])
        split += [name] * len(arrays[x])
    if len({part.shape[1:] for part in images}) > 1 or len({part.ndim for part in labels}) > 1:
        raise InputError(f"{file}: training and test images or labels have different shapes")
    whole = {"images": np.concatenate(images), "labels": np.concatenate(labels), "split": np.array(split)}
    return {key: value for key, value in arrays.items() if key in CLASSES} | whole


def _images(file: Path, arrays: Arrays) -> Pixels:
    images = _first(arrays, IMAGES)
    if images is None:
        encoded = _first(arrays, ENCODED)
        if encoded is None or "offset" not in arrays:
            raise InputError(f"{file}: no images: expected one of {', '.join(IMAGES)}, or jpeg with offset, or x_train")
        images = _decoded(file, encoded, arrays["offset"])
    return pixels_of(str(file), images)


def pixels_of(where: str, images: Any) -> Pixels:
    """Returns numpy or torch images as uint8 `[n, C, H, W]`; `where` says whose they are in an error."""
    x = _numpy(where, images)
    if x.dtype.kind == "f":
        if x.size and not (x.min() >= 0 and x.max() <= 1):  # not: NaN
            raise InputError(
                f"{where}: float images must lie in [0, 1], not [{x.min():.3g}, {x.max():.3g}]: give pixels that are "
                "not normalised"
            )
        x = np.rint(x * 255).astype(np.uint8)
    if x.dtype != np.uint8:
        raise InputError(f"{where}: images of type {x.dtype}: expected uint8, 0 to 255, or float in [0, 1]")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return x
    raise InputError(f"{where}: images {list(x.shape)}: expected [n, H, W], [n, H, W, C] or [n, C, H, W], C 1 or 3")


def _numpy(where: str, values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InputError(f"{where}: the rows have different lengths, so they are not an array") from error


def _decoded(file: Path, data: Array, offset: Array) -> Pixels:
    """Image files one behind the other -> `[n, H, W, 3]`; all of one size, as arrays are."""
    if data.dtype != np.uint8 or data.ndim != 1 or offset.dtype.kind not in "iu" or offset.ndim != 1:
        raise InputError(f"{file}: compressed images need bytes (uint8) and whole numbers as their offsets")
    ends = offset.astype(np.int64)
    if len(ends) < 2 or ends[0] < 0 or ends[-1] > len(data) or (np.diff(ends) <= 0).any():
        raise InputError(f"{file}: the offsets do not cut the {len(data)} bytes into images: the file is damaged")
    images: list[Array] = []
    for i, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
        try:
            with Image.open(io.BytesIO(data[start:end].tobytes())) as image:
                images.append(np.asarray(image.convert("RGB"), np.uint8))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{file}: image {i} is damaged or not an image") from error
        if images[i].shape != images[0].shape:
            raise InputError(f"{file}: image {i} has another size than the first: save all at one size")
    return np.stack(images)


def _labels(where: str, labels: Any, count: int) -> Array:
    """Returns labels as given: whole numbers or names `[n]`, or 0 and 1 `[n, labels]`."""
    y = _numpy(where, labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != count:
        raise InputError(f"{where}: labels {list(y.shape)} for {count} images: expected [n] or [n, labels]")
    if count == 0:
        raise InputError(f"{where}: no images in it")
    if y.ndim == 2:
        if y.dtype.kind not in "biuf" or not np.isin(y, (0, 1)).all():
            raise InputError(f"{where}: labels {list(y.shape)} must be 0 or 1 everywhere")
        return y
    if y.dtype.kind == "O" and all(isinstance(name, str) for name in y):  # as pandas has text
        return y.astype(np.str_)
    if y.dtype.kind not in "biuU":
        raise InputError(f"{where}: labels of type {y.dtype}: expected whole numbers or names")
    return y


def _class_names(labels: Array) -> tuple[str, ...]:
    """Returns names for classes that have none: those of the labels, or numbers."""
    if labels.ndim == 2:
        return tuple(f"label-{i}" for i in range(labels.shape[1]))
    return tuple(sorted(set(labels.tolist()))) if labels.dtype.kind == "U" else tuple(map(str, range(labels.max() + 1)))


def _numbered(where: str, labels: Array, classes: tuple[str, ...]) -> Targets:
    """Returns labels as targets, `[n]` or `[n, labels]`; refuses one that is not among the classes."""
    if labels.ndim == 2:
        if len(classes) != labels.shape[1]:
            raise InputError(f"{where}: {len(classes)} class names for {labels.shape[1]} labels")
        return labels.astype(np.uint8)
    if labels.dtype.kind == "U":
        number = {name: i for i, name in enumerate(classes)}
        strange = sorted(set(labels.tolist()) - number.keys())
        if strange:
            raise InputError(f"{where}: label {strange[0]!r} is not one of its classes")
        return np.array([number[label] for label in labels.tolist()], np.int64)
    targets = labels.astype(np.int64)
    bad = np.flatnonzero((targets < 0) | (targets >= len(classes)))
    if len(bad):
        raise InputError(
            f"{where}: label {targets[bad[0]]} of image {bad[0]} is out of range (0 to {len(classes) - 1})"
        )
    return targets


def _site(file: Path, arrays: Arrays, count: int) -> NDArray[np.str_] | None:
    for key, tables in SITES.items():
        if key not in arrays:
            continue
        site, names = arrays[key], _first(arrays, tables)
        if site.shape != (count,):
            raise InputError(f"{file}: {key} {list(site.shape)} for {count} images")
        if names is not None and site.dtype.kind in "iu":
            if site.min() < 0 or site.max() >= len(names):
                raise InputError(f"{file}: {key} {site.max()} is out of range: {len(names)} names")
            site = names[site]
        return site.astype(np.str_)
    return None


def _split(file: Path, arrays: Arrays, count: int) -> tuple[Mask | None, Mask | None]:
    """Masks of the test and the validation images, None if there are none."""
    if "split" not in arrays:
        for name in ("test", "val"):
            mask = arrays.get(name)
            if mask is not None and (mask.shape != (count,) or not np.isin(mask, (0, 1)).all()):
                raise InputError(f"{file}: {name} must have 0 or 1 for each image")
        test, val = (
            m.astype(np.bool_) if (m := arrays.get(name)) is not None and m.any() else None for name in ("test", "val")
        )
        return test, val
    words = [str(s).lower() for s in arrays["split"].ravel()]
    strange = sorted(set(words) - SPLITS.keys())
    if strange:
        raise InputError(f"{file}: split {strange[0]!r}: expected train, val or test")
    if len(words) != count:
        raise InputError(f"{file}: split must have one entry for each image")
    return split_masks(words)


def split_masks(words: Sequence[str]) -> tuple[Mask | None, Mask | None]:
    """Returns masks of the test and the validation images from a word per image, None if there are none."""
    names = np.array([SPLITS[word] for word in words])
    test, val = (mask if mask.any() else None for mask in (names == "test", names == "val"))
    return test, val
