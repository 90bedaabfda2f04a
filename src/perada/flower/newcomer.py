"""A new site joins a finished federation: with what the server's people collected, on its own machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import Client
from ..errors import InputError
from ..experiment import Say
from ..runs.files import read_object
from ..runs.join import join
from ..runs.run import Run, load
from .settings import Plan, SiteSettings
from .site_data import empty_federation

KINDS = {"federation": str, "run": str, "sites": list, "data": dict}


def collected(folder: Path, say: Say) -> tuple[Run, dict[str, Any]]:
    """Opens a run folder that `perada flower collect` made, without the sites' data; returns it and flower.json."""
    run = load(folder, say=say)
    file = run.path / "flower.json"
    if not file.is_file():
        raise InputError(f"{folder} is not of a federation over a network: use perada join")
    note = read_object(file, KINDS, "collect the run again")
    try:
        data = note["data"]
        classes, channels = tuple(data["classes"]), int(data["channels"])
        plan = Plan(note["federation"], classes, channels, bool(data["multilabel"]), "", run.config)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({error}): collect the run again") from error
    none = [np.zeros(0, np.int64)] * 3
    sites = tuple(Client(str(name), *none) for name in note["sites"])
    federation = replace(empty_federation(plan, torch.device("cpu")), clients=sites)
    return Run(run.folder, run.config, say, federation=federation), note


def joined(
    settings: SiteSettings, folder: Path, rounds: int | None, out: Path | None, overwrite: bool, say: Say
) -> Run:
    """Trains the site's own model from a collected run's global model; returns a run folder with this site alone."""
    old, note = collected(folder, say)
    if note["federation"] != settings.federation:
        raise InputError(f"{folder} is of federation {note['federation']!r}, and this site of {settings.federation!r}")
    if settings.methods and old.config.method_name not in settings.methods:
        raise InputError(f"site.toml does not allow the method {old.config.method_name!r} (methods)")
    out = out or Path(settings.state) / "joined" / f"{folder.resolve().name}-{settings.name}"
    return join(
        old,
        data=settings.data,
        name=settings.name,
        rounds=rounds,
        out=out,
        device=settings.device,
        overwrite=overwrite,
        say=say,
    )
