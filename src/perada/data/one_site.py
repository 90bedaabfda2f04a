"""One site's own samples, with the classes, shape and normalisation of a federation that it takes part in."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from .federation import Federation, build_federation
from .named import DataOptions, own
from .source import UNKNOWN, Source, Targets


def one_site(options: DataOptions, name: str, like: Federation, device: torch.device) -> Federation:
    """Returns the data at `options.root` as a federation of one client.

    The split depends on the site's name, so a site holds out the samples that it would in a simulation of all sites.
    like: classes, shape and normalisation. Samples of other sites are left out.
    """
    source = own_samples(own(options, like.classes if like.multilabel else ()), name, options.root)
    return build_federation(options, device, conform(source, like, options.root))


def own_samples(source: Source, name: str, where: str) -> Source:
    """Returns the samples of this site; if the data name no sites, all samples are this site's."""
    if source.site is None:
        return replace(source, site=np.full(len(source.images), name))
    mine = source.site == name
    if not mine.any():
        sites = ", ".join(sorted(set(source.site.tolist()))[:5])
        raise InputError(f"{where}: no sample of site {name!r}: it has {sites}")
    arrays = ("images", "targets", "site", "test", "val")
    parts = {n: values[mine] for n in arrays if (values := getattr(source, n)) is not None}
    return replace(source, names=None if source.names is None else tuple(compress(source.names, mine)), **parts)


def conform(source: Source, like: Federation, where: str) -> Source:
    """Returns the samples with labels numbered as in the federation; refuses other shapes and classes.

    Colour images become grey where the federation's are.
    """
    shape = tuple(like.images.shape[1:])
    if shape[0] == 1 and source.images.shape[1] == 3:
        source = replace(source, images=np.rint(source.images.mean(1, keepdims=True)).astype(np.uint8))
    if source.images.shape[1:] != shape:
        raise InputError(f"{where}: images are {source.images.shape[1:]}, the federation's {shape} (channels, size)")
    if source.multilabel != like.multilabel:
        kind = {True: "several labels per image", False: "one label per image"}
        raise InputError(f"{where}: has {kind[source.multilabel]}, the federation {kind[like.multilabel]}")
    remarks = source.remarks
    if like.multilabel:
        targets, unknown = _columns(source, like, where)
        if unknown:
            remarks = (*remarks, f"{where}: {', '.join(unknown)}: not known for any image, so it is not trained here")
    else:
        targets = _numbers(source, like, where)
    name = like.name or source.name
    return replace(
        source, name=name, mean=like.mean, std=like.std, targets=targets, classes=like.classes, remarks=remarks
    )


def _columns(source: Source, like: Federation, where: str) -> tuple[Targets, list[str]]:
    """Returns the label columns in the federation's order, and the labels of which nothing is known here.

    Labels that the federation does not have are left out.
    """
    targets = np.full((len(source.targets), len(like.classes)), UNKNOWN, np.uint8)
    for j, name in enumerate(like.classes):
        if name in source.classes:
            targets[:, j] = source.targets[:, source.classes.index(name)]
    unknown = [name for name, column in zip(like.classes, targets.T, strict=True) if (column == UNKNOWN).all()]
    if len(unknown) == len(like.classes):
        raise InputError(f"{where}: none of the federation's labels ({', '.join(like.classes)}) is known for an image")
    return targets, unknown


def _numbers(source: Source, like: Federation, where: str) -> np.ndarray[Any, Any]:
    """Returns each sample's class number in the federation."""
    unknown = [c for c in source.classes if c not in like.classes]
    if unknown:
        raise InputError(f"{where}: class {unknown[0]!r} is not one of the federation's ({', '.join(like.classes)})")
    return np.array([like.classes.index(c) for c in source.classes], np.int64)[source.targets]
