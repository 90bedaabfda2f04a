"""Your own arrays: in memory, or in one `.npz` file, read without pickle.

| what | keys of a file | shape |
| --- | --- | --- |
| images | images, x, data | `[n, H, W]`, `[n, H, W, C]` or `[n, C, H, W]`, C 1 or 3; uint8, or float in [0, 1] |
| … or as image files | jpeg (or png, encoded) and offset | all bytes, uint8, and where each image starts, `[n + 1]` |
| labels | labels, y, targets, label | `[n]` (or `[n, 1]`) numbers or names; several: 0, 1, NaN (not known) `[n, L]` |
| names of the classes, optional | classes, class_names, label_names | `[classes]` |
| owners, optional | site, domain, client | `[n]` names, or numbers into sites, domains or clients |
| split, optional | split | `[n]` of train, val and test; or `test` and `val` as `[n]` of 0 and 1 |

Instead of one array there may be one per split: x_train, y_train, x_test, y_test (and x_val, y_val) or train_images,
train_labels, test_images, … Other keys are ignored.
"""

import io
import itertools
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..inputs import CLASSES, plain_file, user_path
from ..lanes.machine import free_memory
from .images import IMAGENET, opened_image
from .source import UNKNOWN, Mask, Pixels, Source, Targets

IMAGES = ("images", "x", "X", "data")
ENCODED = ("jpeg", "png", "encoded")
LABELS = ("labels", "y", "Y", "targets", "label")
CLASSES_KEYS = ("classes", "class_names", "label_names")
SITES = {"site": ("sites", "site_names"), "domain": ("domains", "domain_names"), "client": ("clients", "client_names")}
PIECES = (("x_{}", "y_{}"), ("{}_images", "{}_labels"), ("images_{}", "labels_{}"))
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
KEYS = {
    *(*IMAGES, *ENCODED, *LABELS, *CLASSES_KEYS, *SITES, "offset", "split", "test", "val"),
    *(name for names in SITES.values() for name in names),
    *(pattern.format(word) for pair in PIECES for pattern in pair for word in SPLITS),
}
MORE = 1000  # class numbers that labels may always have; beyond, ten times as many as there are images
Array = NDArray[Any]
Arrays = dict[str, Array]
Pair = tuple[Any, Any]  # images and labels, numpy or torch


class _Part(NamedTuple):
    """Some images and their labels; `where` names them in an error."""

    where: str
    images: Pixels
    labels: Array
    split: str = "train"
    site: str | None = None


def _part(where: str, images: Any, labels: Any, split: str = "train", site: str | None = None) -> _Part:
    x = pixels_of(where, images)
    return _Part(where, x, _labels(where, labels, len(x)), split, site)


def from_sites(sites: Mapping[str, Pair], classes: Sequence[str] | None = None, **sets: Mapping[str, Pair]) -> Source:
    """Returns a `Source` of each site's images and labels; sets: `val` and `test` data of the same sites."""
    if not sites:
        raise InputError('no sites: give {"site": (images, labels)}')
    parts = []  # sorted, so that the order of the mapping does not matter
    for split, pairs in {"train": sites, **sets}.items():
        for site in sorted({*sites, *pairs}):
            where = f"site {site!r}" if split == "train" else f"{split} data of site {site!r}"
            if site not in sites:
                raise unknown(f"site of {split} data", site, sites)
            if site not in pairs:
                raise InputError(f"no {where}: give every site a set of its own, or one share for all")
            try:
                x, y = pairs[site]
            except (TypeError, ValueError) as error:
                raise InputError(f"{where}: give a pair (images, labels)") from error
            parts.append(_part(where, x, y, split, site))
    return _source("arrays", parts, classes)


def npz(path: str) -> Source:
    """Returns a `Source` of the arrays in a file; the module's docstring has the keys."""
    file = user_path(path)
    arrays = _load(file)
    names = _first(arrays, CLASSES_KEYS)
    classes = None if names is None else names.ravel().tolist()
    if parts := _per_split(file, arrays):
        return _source(file.stem, parts, classes)
    images, labels = _images(file, arrays), _first(arrays, LABELS)
    if labels is None:
        raise InputError(f"{file}: no labels: expected one of {', '.join(LABELS)}, or y_train with x_train")
    source = _source(file.stem, [_part(str(file), images, labels)], classes)
    count = len(source.images)
    test, val = _split(file, arrays, count)
    return replace(source, site=_site(file, arrays, count), test=test, val=val)


def _source(name: str, parts: Sequence[_Part], classes: Sequence[object] | None) -> Source:
    """Joins the parts; classes: by default those of the labels."""
    first = parts[0]
    for part in parts:
        size, expected = list(part.images.shape[1:]), list(first.images.shape[1:])
        if size != expected:
            raise InputError(f"{part.where}: images {size}, but {first.where} has {expected}")
        if _kind(part.labels) != _kind(first.labels):
            raise InputError(f"{part.where}: labels of another kind than those of {first.where}")
    every = np.concatenate([p.labels for p in parts])
    names = _class_names(first.where, every) if classes is None else tuple(map(str, classes))
    images = np.concatenate([p.images for p in parts])
    targets = np.concatenate([_numbered(p.where, p.labels, names) for p in parts])
    counts = [len(p.images) for p in parts]
    site = None if first.site is None else np.repeat([str(p.site) for p in parts], counts)
    test, val = split_masks(np.repeat([p.split for p in parts], counts).tolist())
    mean, std = IMAGENET if images.shape[1] == 3 else ((0.5,), (0.25,))
    return Source(name, images, targets, names, mean, std, test, site, val)


def _kind(labels: Array) -> tuple[Any, ...]:
    """Returns what labels must have in common: whether they are names, and how many one image has."""
    return labels.dtype.kind == "U", *labels.shape[1:]


def _load(file: Path) -> Arrays:
    """Returns the arrays with known names; refuses a file whose arrays need more memory than there is."""
    try:
        with plain_file(file).open("rb") as f:  # opened here: numpy leaves a damaged file open
            if f.read(6) == b"\x93NUMPY":
                raise InputError(f"{file} has one array without labels: expected an .npz with images and labels")
            f.seek(0)
            with np.load(f, allow_pickle=False) as stored:
                sizes = {key: _length(stored.zip, key) for key in stored.files if key in KEYS}
                if sum(sizes.values()) > (free := free_memory(torch.device("cpu"))):
                    raise InputError(f"{file}: its arrays take {sum(sizes.values()):,} bytes, and {free:,} are free")
                return {key: stored[key] for key in sizes}
    except FileNotFoundError as error:
        raise InputError(f"no such file: {file}") from error
    except InputError:
        raise
    except Exception as error:  # a damaged file can break a reader in any way
        if "Object arrays" in str(error):
            raise InputError(
                f"{file}: contains Python objects, which are not loaded: save plain arrays of numbers and text "
                "(numpy.savez with dtype uint8, int64 or str)"
            ) from error
        raise InputError(f"cannot read {file}: it is damaged, or not an .npz file") from error


def _length(archive: zipfile.ZipFile, key: str) -> int:
    """Returns the bytes of an array by its header; refuses a header that says more than the file has."""
    name = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
    with archive.open(name) as f:
        version = np.lib.format.read_magic(f)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(f)
    length = math.prod(shape) * dtype.itemsize
    if length > archive.getinfo(name).file_size and not dtype.hasobject:
        raise ValueError(f"{key} is cut short")
    return length


def _first(arrays: Arrays, keys: tuple[str, ...]) -> Array | None:
    return next((arrays[key] for key in keys if key in arrays), None)


def _per_split(file: Path, arrays: Arrays) -> list[_Part]:
    """Returns x_train, x_test, … with their labels; nothing if the file has no x_train."""
    for images_key, labels_key in PIECES:
        names = [(images_key.format(word), labels_key.format(word), word) for word in SPLITS]
        if names[0][0] not in arrays:
            continue
        for x, y, _ in names:
            if x in arrays and y not in arrays:
                raise InputError(f"{file}: {x} needs a {y} of the same length")
        return [_part(f"{file}: {x}", arrays[x], arrays[y], word) for x, y, word in names if x in arrays]
    return []


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
    if 0 in x.shape[1:]:
        raise InputError(f"{where}: images {list(x.shape)} have no pixels")
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
    """Returns the pixels of image files that are stored end to end, `[n, H, W, 3]`; all have one size."""
    if data.dtype != np.uint8 or data.ndim != 1 or offset.dtype.kind not in "iu" or offset.ndim != 1:
        raise InputError(f"{file}: compressed images need bytes (uint8) and whole numbers as their offsets")
    ends = offset.astype(np.int64)
    if len(ends) < 2 or ends[0] < 0 or ends[-1] > len(data) or (np.diff(ends) <= 0).any():
        raise InputError(f"{file}: the offsets do not cut the {len(data)} bytes into images: the file is damaged")
    images: list[Array] = []
    for i, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
        image = opened_image(io.BytesIO(data[start:end].tobytes()), f"{i} in {file}")
        images.append(np.asarray(image, np.uint8))
        if len(ends) * images[0].nbytes > (free := free_memory(torch.device("cpu"))):
            raise InputError(f"{file}: its images take {len(ends) * images[0].nbytes:,} bytes, and {free:,} are free")
        if images[i].shape != images[0].shape:
            raise InputError(f"{file}: image {i} has another size than the first: save all at one size")
    return np.stack(images)


def _labels(where: str, labels: Any, count: int) -> Array:
    """Returns labels as given, checked: whole numbers or names `[n]`, or 0, 1 and UNKNOWN `[n, labels]`."""
    y = _numpy(where, labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != count:
        raise InputError(f"{where}: labels {list(y.shape)} for {count} images: expected [n] or [n, labels]")
    if count == 0:
        raise InputError(f"{where}: no images in it")
    if y.ndim == 2:
        blank = np.isnan(y) if y.dtype.kind == "f" else False
        if y.dtype.kind not in "biuf" or not (np.isin(y, (0, 1)) | blank).all():
            raise InputError(f"{where}: labels {list(y.shape)} must be 0 or 1 everywhere, or NaN where not known")
        return y if blank is False else np.where(blank, UNKNOWN, y)
    if y.dtype.kind == "O" and all(isinstance(name, str) for name in y):  # as pandas has text
        return y.astype(np.str_)
    if y.dtype.kind not in "biuU":
        raise InputError(f"{where}: labels of type {y.dtype}: expected whole numbers or names")
    return y


def _class_names(where: str, labels: Array) -> tuple[str, ...]:
    """Returns names for classes that have none: those of the labels, or numbers."""
    if labels.dtype.kind == "U":
        return tuple(sorted(set(labels.tolist())))
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    most = CLASSES if labels.ndim == 2 else min(CLASSES, max(MORE, 10 * len(labels)))
    if count > most:
        what = f"{count:,} labels per image" if labels.ndim == 2 else f"label {labels.max()} for {len(labels)} images"
        raise InputError(
            f"{where}: {what}: the most classes here are {most:,}: number them from 0, or give all their names as "
            "classes"
        )
    return tuple(f"label-{i}" if labels.ndim == 2 else str(i) for i in range(count))


def _numbered(where: str, labels: Array, classes: tuple[str, ...]) -> Targets:
    """Returns labels as targets, `[n]` or `[n, labels]`; refuses one that is not among the classes."""
    if labels.ndim == 2:
        if len(classes) != labels.shape[1]:
            raise InputError(f"{where}: {len(classes)} class names for {labels.shape[1]} labels")
        return labels.astype(np.uint8)
    if labels.dtype.kind == "U":
        number = {name: i for i, name in enumerate(classes)}
        others = sorted(set(labels.tolist()) - number.keys())
        if others:
            raise InputError(f"{where}: label {others[0]!r} is not one of its classes")
        return np.array([number[label] for label in labels.tolist()], np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(bad):
        raise InputError(f"{where}: label {labels[bad[0]]} of image {bad[0]} is out of range (0 to {len(classes) - 1})")
    return labels.astype(np.int64)


def _site(file: Path, arrays: Arrays, count: int) -> NDArray[np.str_] | None:
    """Returns the owner of each image, None if the file has none."""
    for key, tables in SITES.items():
        if key not in arrays:
            continue
        site, names = arrays[key], _first(arrays, tables)
        if site.shape != (count,) or site.dtype.kind not in "iuU" or (names is not None and names.ndim != 1):
            raise InputError(
                f"{file}: {key} {list(site.shape)} of type {site.dtype} for {count} images: expected a name or number "
                "for each"
            )
        if names is not None and site.dtype.kind in "iu":
            if site.min() < 0 or site.max() >= len(names):
                raise InputError(f"{file}: {key} {site.max()} is out of range: {len(names)} names")
            site = names[site]
        return site.astype(np.str_)
    return None


def _split(file: Path, arrays: Arrays, count: int) -> tuple[Mask | None, Mask | None]:
    """Returns masks of the test and the validation images, None if there are none."""
    if "split" in arrays:
        words = [str(word).lower() for word in arrays["split"].ravel()]
        others = sorted(set(words) - SPLITS.keys())
        if others:
            raise InputError(f"{file}: split {others[0]!r}: expected train, val or test")
        if len(words) != count:
            raise InputError(f"{file}: split must have one entry for each image")
        return split_masks(words)
    for name in ("test", "val"):
        mask = arrays.get(name)
        if mask is not None and (mask.shape != (count,) or not np.isin(mask, (0, 1)).all()):
            raise InputError(f"{file}: {name} must have 0 or 1 for each image")
    none = np.zeros(count)
    return _any(arrays.get("test", none) == 1), _any(arrays.get("val", none) == 1)


def split_masks(words: Sequence[str]) -> tuple[Mask | None, Mask | None]:
    """Returns masks of the test and the validation images from a word per image, None if there are none."""
    names = np.array([SPLITS[word] for word in words])
    return _any(names == "test"), _any(names == "val")


def _any(mask: Mask) -> Mask | None:
    return mask if mask.any() else None
