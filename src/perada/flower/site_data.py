"""A site's images as a federation of one client, numbered and shaped by the server's plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch

from ..data import Client, Federation, Source, build_federation
from ..data import own as read_source
from ..data.federation import targets_of
from ..errors import InputError
from .settings import Plan, SiteSettings


def site_federation(settings: SiteSettings, plan: Plan, device: torch.device) -> Federation:
    """Returns this site's data, split as the plan says.

    The split depends on the site's name, so a site holds out the samples that it would in a simulation of all sites.
    """
    options = replace(
        plan.config.data,
        name="folder",
        root=settings.data,
        partition="site",
        server_val=0.0,
        skip_bad=settings.skip_bad,
        site=settings.site_column,
    )
    source = _own_samples(read_source(options), settings)
    return build_federation(options, device, _conform(source, plan, settings.data))


def public_test(path: str, plan: Plan, device: torch.device) -> Federation:
    """Returns a public test set as one client that has test images only."""
    source = _conform(read_source(replace(plan.config.data, name="folder", root=path)), plan, path)
    none = np.zeros(0, np.int64)
    return replace(
        empty_federation(plan, device),
        images=torch.from_numpy(np.array(source.images)).to(device),
        targets=targets_of(source).to(device),
        clients=(Client("test", none, none, np.arange(len(source.images))),),
    )


def empty_federation(plan: Plan, device: torch.device) -> Federation:
    """Returns what a server without data knows about them: classes, shape, normalisation."""
    size, shape = plan.config.data.size, (0, len(plan.classes)) if plan.multilabel else (0,)
    mean, std = plan.normalisation
    return Federation(
        name=plan.federation,
        images=torch.zeros(0, plan.channels, size, size, dtype=torch.uint8, device=device),
        targets=torch.zeros(shape, dtype=torch.float32 if plan.multilabel else torch.int64, device=device),
        classes=plan.classes,
        clients=(),
        mean=mean,
        std=std,
        seed=plan.config.data.seed,
    )


def _own_samples(source: Source, settings: SiteSettings) -> Source:
    """Returns the samples of this site; if the data name no sites, all samples are this site's."""
    if source.site is None:
        return replace(source, site=np.full(len(source.images), settings.name))
    own = source.site == settings.name
    if not own.any():
        sites = ", ".join(sorted(set(source.site.tolist()))[:5])
        raise InputError(f"{settings.data}: no sample of site {settings.name!r}: it has {sites}")
    arrays = ("images", "targets", "site", "test", "val")
    parts = {name: values[own] for name in arrays if (values := getattr(source, name)) is not None}
    return replace(source, names=None if source.names is None else tuple(compress(source.names, own)), **parts)


def _conform(source: Source, plan: Plan, where: str) -> Source:
    """Returns the samples with labels numbered as in the plan; refuses other shapes and classes."""
    shape = (plan.channels, plan.config.data.size, plan.config.data.size)
    if source.images.shape[1:] != shape:
        raise InputError(f"{where}: images are {source.images.shape[1:]}, the federation's {shape} (channels, size)")
    if source.multilabel != plan.multilabel:
        kind = {True: "several labels per image", False: "one label per image"}
        raise InputError(f"{where}: has {kind[source.multilabel]}, the federation {kind[plan.multilabel]}")
    mean, std = plan.normalisation
    targets = _columns(source, plan, where) if plan.multilabel else _numbers(source, plan, where)
    return replace(source, name=plan.federation, mean=mean, std=std, targets=targets, classes=plan.classes)


def _columns(source: Source, plan: Plan, where: str) -> np.ndarray[Any, Any]:
    """Returns the label columns in the plan's order; labels that the federation does not have are left out."""
    missing = [c for c in plan.classes if c not in source.classes]
    if missing:
        raise InputError(f"{where}: no label {missing[0]!r}, which the federation has")
    return source.targets[:, [source.classes.index(c) for c in plan.classes]].astype(np.uint8)


def _numbers(source: Source, plan: Plan, where: str) -> np.ndarray[Any, Any]:
    """Returns each sample's class number in the plan."""
    unknown = [c for c in source.classes if c not in plan.classes]
    if unknown:
        raise InputError(f"{where}: class {unknown[0]!r} is not one of the federation's ({', '.join(plan.classes)})")
    return np.array([plan.classes.index(c) for c in source.classes], np.int64)[source.targets]
