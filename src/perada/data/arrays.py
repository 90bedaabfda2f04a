"""Your own arrays: one `.npz` file, read without pickle.

| what | keys | shape |
| --- | --- | --- |
| images | images, x, data | uint8 `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]` with C of 1 or 3 |
| … or as image files | jpeg (or png, encoded) and offset | all bytes, uint8, and where each image starts, `[n + 1]` |
| labels | labels, y, targets, label | `[n]` (or `[n, 1]`) whole numbers or names; 0 or 1 `[n, L]` for several labels |
| the classes' names, optional | classes, class_names, label_names | `[classes]` |
| owners, optional | site, domain, client | `[n]` names, or numbers into sites, domains or clients |
| split, optional | split | `[n]` of train, val and test; or `test` and `val` as `[n]` of 0 and 1 |

Instead of one array the images may come apart, as x_train, y_train, x_test, y_test (and x_val, y_val) or
train_images, train_labels, test_images, …: then the name is the split. Other keys are passed over.
"""

from __future__ import annotations

import io
import itertools
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError
from .federation import Source
from .images import IMAGENET, Mask, Pixels

IMAGES = ("images", "x", "X", "data")
ENCODED = ("jpeg", "png", "encoded")
LABELS = ("labels", "y", "Y", "targets", "label")
CLASSES = ("classes", "class_names", "label_names")
SITES = {"site": ("sites", "site_names"), "domain": ("domains", "domain_names"), "client": ("clients", "client_names")}
PIECES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("images_{}", "labels_{}"))
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
Arrays = dict[str, NDArray[Any]]


def npz(path: str) -> Source:
    """A `Source` of the arrays in a file; the module's docstring has the keys."""
    file = Path(path).expanduser()
    held = _load(file)
    for images_key, labels_key in PIECES:
        if images_key.format("train") in held:
            held = _joined(file, held, images_key, labels_key)
            break
    images = _images(file, held)
    count = len(images)
    raw = _first(held, LABELS)
    if raw is None:
        raise InputError(f"{file}: no labels: expected one of {', '.join(LABELS)}, or y_train beside x_train")
    names = _first(held, CLASSES)
    targets, classes = _targets(file, raw, None if names is None else tuple(str(n) for n in names.ravel()), count)
    test, val = _split(file, held, count)
    source = Source(file.stem, images, targets, classes, test=test, site=_site(file, held, count), val=val)
    return source if images.shape[1] == 1 else replace(source, mean=IMAGENET[0], std=IMAGENET[1])


def _load(file: Path) -> Arrays:
    try:
        with file.open("rb") as f:  # opened here: numpy leaves a damaged file open
            found = np.load(f, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise InputError(f"{file} holds one array without labels: expected an .npz with images and labels")
            return {key: found[key] for key in found.files}
    except FileNotFoundError as error:
        raise InputError(f"no such file: {file}") from error
    except ValueError as error:
        if "Object arrays" in str(error):
            raise InputError(
                f"{file}: holds Python objects, which are not run: save plain arrays of numbers and text "
                "(numpy.savez with dtype uint8, int64 or str)"
            ) from error
        raise InputError(f"cannot read {file}: damaged, or no .npz file") from error
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise InputError(f"cannot read {file}: damaged, or no .npz file") from error


def _first(held: Arrays, keys: tuple[str, ...]) -> NDArray[Any] | None:
    return next((held[key] for key in keys if key in held), None)


def _joined(file: Path, held: Arrays, images_key: str, labels_key: str) -> Arrays:
    """x_train, x_test, … as one array with a split."""
    images, labels, split = [], [], []
    for spoken, name in SPLITS.items():
        key, beside = images_key.format(spoken), labels_key.format(spoken)
        if key not in held:
            continue
        if beside not in held or len(held[beside]) != len(held[key]):
            raise InputError(f"{file}: {key} needs a {beside} of the same length")
        images.append(held[key])
        labels.append(held[beside])
        split += [name] * len(held[key])
    if len({part.shape[1:] for part in images}) > 1 or len({part.ndim for part in labels}) > 1:
        raise InputError(f"{file}: training and test images or labels have different shapes")
    whole = {"images": np.concatenate(images), "labels": np.concatenate(labels), "split": np.array(split)}
    return {key: value for key, value in held.items() if key in CLASSES} | whole


def _images(file: Path, held: Arrays) -> Pixels:
    images = _first(held, IMAGES)
    if images is None:
        encoded = _first(held, ENCODED)
        if encoded is None or "offset" not in held:
            raise InputError(f"{file}: no images: expected one of {', '.join(IMAGES)}, or jpeg with offset, or x_train")
        images = _decoded(file, encoded, held["offset"])
    if images.dtype != np.uint8:
        raise InputError(f"{file}: images of type {images.dtype}: expected uint8, 0 to 255")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise InputError(f"{file}: images {list(images.shape)}: expected [n, H, W], [n, H, W, C] or [n, C, H, W], C 1 or 3")


def _decoded(file: Path, data: NDArray[Any], offset: NDArray[Any]) -> Pixels:
    """Image files one behind the other -> `[n, H, W, 3]`; all of one size, as arrays are."""
    if data.dtype != np.uint8 or data.ndim != 1 or offset.dtype.kind not in "iu" or offset.ndim != 1:
        raise InputError(f"{file}: compressed images need bytes (uint8) and whole numbers as their offsets")
    ends = offset.astype(np.int64)
    if len(ends) < 2 or ends[0] < 0 or ends[-1] > len(data) or (np.diff(ends) <= 0).any():
        raise InputError(f"{file}: the offsets do not cut the {len(data)} bytes into images: the file is damaged")
    images: list[NDArray[Any]] = []
    for i, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
        try:
            with Image.open(io.BytesIO(data[start:end].tobytes())) as image:
                images.append(np.asarray(image.convert("RGB"), np.uint8))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(f"{file}: image {i} is damaged or not an image") from error
        if images[i].shape != images[0].shape:
            raise InputError(f"{file}: image {i} has another size than the first: save all at one size")
    return np.stack(images)


def _targets(
    file: Path, raw: NDArray[Any], names: tuple[str, ...] | None, count: int
) -> tuple[NDArray[np.int64] | NDArray[np.uint8], tuple[str, ...]]:
    if raw.ndim == 2 and raw.shape[1] == 1:
        raw = raw[:, 0]
    if raw.ndim not in (1, 2) or len(raw) != count:
        raise InputError(f"{file}: labels {list(raw.shape)} for {count} images: expected [n] or [n, labels]")
    if count == 0:
        raise InputError(f"{file}: no images in it")
    if raw.ndim == 2:
        if raw.dtype.kind not in "biuf" or not np.isin(raw, (0, 1)).all():
            raise InputError(f"{file}: labels {list(raw.shape)} must be 0 or 1 everywhere")
        names = names or tuple(f"label-{i}" for i in range(raw.shape[1]))
        if len(names) != raw.shape[1]:
            raise InputError(f"{file}: {len(names)} class names for {raw.shape[1]} labels")
        return raw.astype(np.uint8), names
    if raw.dtype.kind == "U":
        names = names or tuple(sorted(set(raw.tolist())))
        strange = sorted(set(raw.tolist()) - set(names))
        if strange:
            raise InputError(f"{file}: label {strange[0]!r} is none of its classes")
        number = {name: i for i, name in enumerate(names)}
        return np.array([number[label] for label in raw.tolist()], np.int64), names
    if raw.dtype.kind not in "biu":
        raise InputError(f"{file}: labels of type {raw.dtype}: expected whole numbers or names")
    targets = raw.astype(np.int64)
    names = names or tuple(str(i) for i in range(int(targets.max()) + 1))
    bad = np.flatnonzero((targets < 0) | (targets >= len(names)))
    if len(bad):
        raise InputError(f"{file}: label {targets[bad[0]]} of image {bad[0]} is out of range (0 to {len(names) - 1})")
    return targets, names


def _site(file: Path, held: Arrays, count: int) -> NDArray[np.str_] | None:
    for key, tables in SITES.items():
        if key not in held:
            continue
        site, names = held[key], _first(held, tables)
        if site.shape != (count,):
            raise InputError(f"{file}: {key} {list(site.shape)} for {count} images")
        if names is not None and site.dtype.kind in "iu":
            if site.min() < 0 or site.max() >= len(names):
                raise InputError(f"{file}: {key} {site.max()} is out of range: {len(names)} names")
            site = names[site]
        return site.astype(np.str_)
    return None


def _split(file: Path, held: Arrays, count: int) -> tuple[Mask | None, Mask | None]:
    """Masks of the test and the validation images, None where there are none."""
    masks: list[Mask | None] = []
    for name in ("test", "val"):
        mask: NDArray[Any] | None = None
        if "split" in held:
            spoken = [str(s).lower() for s in held["split"].ravel()]
            strange = sorted(set(spoken) - SPLITS.keys())
            if strange:
                raise InputError(f"{file}: split {strange[0]!r}: expected train, val or test")
            mask = np.array([SPLITS[s] == name for s in spoken], np.bool_)
        elif name in held:
            mask = held[name]
        if mask is not None and (mask.shape != (count,) or not np.isin(mask, (0, 1)).all()):
            raise InputError(f"{file}: {name if 'split' not in held else 'split'} must have one entry for each image")
        masks.append(None if mask is None or not mask.any() else mask.astype(np.bool_))
    return masks[0], masks[1]
