"""A site's images as a federation of one client, numbered and shaped by the server's plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..data import Client, Federation
from ..data import own as read_source
from ..data.federation import targets_of
from ..data.one_site import conform, one_site
from .settings import Plan, SiteSettings

CPU = torch.device("cpu")


def site_federation(settings: SiteSettings, plan: Plan, device: torch.device) -> Federation:
    """Returns this site's data, split as the plan says."""
    options = replace(
        plan.config.data,
        name="folder",
        root=settings.data,
        partition="site",
        server_val=0.0,
        skip_bad=settings.skip_bad,
        site=settings.site_column,
    )
    return one_site(options, settings.name, empty_federation(plan, CPU), device)


def public_test(path: str, plan: Plan, device: torch.device) -> Federation:
    """Returns a public test set as one client that has test images only."""
    empty, none = empty_federation(plan, device), np.zeros(0, np.int64)
    source = conform(read_source(replace(plan.config.data, name="folder", root=path)), empty, path)
    return replace(
        empty,
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
