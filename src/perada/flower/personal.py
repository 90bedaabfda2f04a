"""A site's own model, read from its state folder. Needs no server, no network and no data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import InputError, unknown
from ..experiment import Experiment
from ..lanes import State
from ..predict.personal import PersonalModel
from ..report.site import SitePage
from ..server.checks import Refused
from .settings import SiteSettings
from .site_data import empty_federation, site_federation

if TYPE_CHECKING:  # they load Flower, which most commands do without
    from .client import Site, Work


@dataclass(frozen=True)
class SiteRun:
    """What a site has of a run."""

    id: str
    site: Site
    work: Work
    experiment: Experiment  # without data
    broadcast: State  # the last that it received
    kept: State  # what it keeps now

    @property
    def state(self) -> State:
        """What the site predicts with."""
        return self.experiment.method.personal(self.broadcast, self.kept)


def known_site(folder: Path, name: str | None) -> SiteSettings:
    """Returns the settings with which `perada flower site` has run."""
    settings = SiteSettings.read(folder.expanduser() / "site.toml", name=name)
    file = settings.flower / "site.toml"
    if not file.is_file():
        raise InputError(f"{settings.name} has not taken part from {folder} yet: see `perada flower site`")
    return SiteSettings.read(file)


def site_run(settings: SiteSettings, run: str = "") -> SiteRun:
    """Returns what the site has of a run, by name or id; default the newest."""
    from .client import NeedsWeights, Site

    site = Site(settings)
    runs = site.state.runs()
    if not runs:
        raise InputError(f"{site.state.path} holds no run of this site yet")
    matching = [r for r in runs if run in ("", r, r.rpartition("-")[0])]
    if not matching:
        raise unknown("run", run, runs)
    plan, start, start_round, broadcast = site.state.load_broadcast(matching[-1])
    try:
        work = site.work(plan)
        experiment = work.experiment_on(empty_federation(work.plan, torch.device("cpu")))
        kept = site.state.newest(matching[-1])
        if kept is None and start:  # a run that continues another, in which the site was not sampled yet
            kept = site.state.before(start, start_round)
    except NeedsWeights as error:
        raise InputError(f"{site.state.path}: the server's weights are missing: take part in a run first") from error
    except Refused as error:
        raise InputError(f"{site.state.path}: {error}") from error
    kept = experiment.method.init(experiment.model)[2] if kept is None else experiment.here(kept)
    return SiteRun(matching[-1], site, work, experiment, experiment.here(broadcast), kept)


def personal_model(settings: SiteSettings, run: str = "") -> PersonalModel:
    """Returns the site's model of a run (by name or id; default the newest), with the last broadcast it received."""
    of = site_run(settings, run)
    return PersonalModel(settings.name, of.work.config, of.experiment.federation, of.experiment.model, of.state)


def site_page(settings: SiteSettings, run: str = "") -> SitePage:
    """Returns the page about the site's model of a run. Reads the site's data and what it noted, and asks nobody."""
    of = site_run(settings, run)
    plan, notes = of.work.plan, of.site.state.notes(of.id)
    data = site_federation(settings, plan, of.experiment.device)
    of.experiment.now = replace(of.experiment.now, broadcast=of.broadcast)
    shared, model = of.experiment.global_model, of.experiment.model
    return SitePage(settings.name, plan.federation, of.work.config, data, model, of.state, shared, notes)
