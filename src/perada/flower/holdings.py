"""A site's own images as a federation of one client, by the server's plan; and the server's, of none."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import numpy as np
import torch

from ..data import Client, Federation, Source, build_federation
from ..data import own as read_source
from ..errors import InputError
from .settings import Plan, SiteSettings


def site_federation(settings: SiteSettings, plan: Plan, device: torch.device) -> Federation:
    """This site's data, split as the plan says; its random draws hang on its name, so it holds out what it would in
    a simulation of all sites."""
    options = replace(
        plan.config.data,
        name="folder",
        root=settings.data,
        partition="site",
        server_val=0.0,
        skip_bad=settings.skip_bad,
        site=settings.site_column,
    )
    source = _mine(read_source(options), settings)
    return build_federation(options, device, _conform(source, plan, settings.data))


def public_test(path: str, plan: Plan, device: torch.device) -> Federation:
    """A public test set: every image of it is a test image of one client."""
    source = _conform(read_source(replace(plan.config.data, name="folder", root=path)), plan, path)
    every, none = np.arange(len(source.images)), np.zeros(0, np.int64)
    targets = torch.from_numpy(source.targets)
    return replace(
        empty_federation(plan, device),
        images=torch.from_numpy(np.array(source.images)).to(device),
        targets=(targets.float() if source.multilabel else targets).to(device),
        clients=(Client("test", none, none, every),),
    )


def empty_federation(plan: Plan, device: torch.device) -> Federation:
    """What a server without data knows about them: classes, shape, normalisation."""
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


def _mine(source: Source, settings: SiteSettings) -> Source:
    """The samples of this site, where the data say whose they are; else all are."""
    if source.site is None:
        return replace(source, site=np.full(len(source.images), settings.name))
    mine = source.site == settings.name
    if not mine.any():
        there = ", ".join(sorted(set(source.site.tolist()))[:5])
        raise InputError(f"{settings.data}: nothing of site {settings.name!r} in it: it has {there}")
    return replace(
        source,
        images=source.images[mine],
        targets=source.targets[mine],
        site=source.site[mine],
        test=None if source.test is None else source.test[mine],
        val=None if source.val is None else source.val[mine],
        names=None if source.names is None else tuple(compress(source.names, mine)),
    )


def _conform(source: Source, plan: Plan, where: str) -> Source:
    """Labels numbered and images shaped as in the plan."""
    shape = (plan.channels, plan.config.data.size, plan.config.data.size)
    if source.images.shape[1:] != shape:
        raise InputError(f"{where}: images are {source.images.shape[1:]}, the federation's {shape} (channels, size)")
    if source.multilabel != plan.multilabel:
        kind = {True: "several labels an image", False: "one label an image"}
        raise InputError(f"{where}: has {kind[source.multilabel]}, the federation {kind[plan.multilabel]}")
    unknown = [c for c in source.classes if c not in plan.classes]
    mean, std = plan.normalisation
    source = replace(source, name=plan.federation, mean=mean, std=std)
    if plan.multilabel:
        missing = [c for c in plan.classes if c not in source.classes]
        if missing:
            raise InputError(f"{where}: no label {missing[0]!r}, which the federation has")
        at = [source.classes.index(c) for c in plan.classes]
        return replace(source, targets=source.targets[:, at].astype(np.uint8), classes=plan.classes)
    if unknown:
        raise InputError(f"{where}: class {unknown[0]!r} is none of the federation's ({', '.join(plan.classes)})")
    number = np.array([plan.classes.index(c) for c in source.classes], np.int64)
    return replace(source, targets=number[source.targets], classes=plan.classes)
