"""A site's own model, read from its state folder. Needs no server, no network and no data."""

from pathlib import Path

import torch

from ..errors import InputError, unknown
from ..predict.personal import PersonalModel
from ..server.checks import Refused
from .settings import SiteSettings
from .site_data import empty_federation


def known_site(folder: Path, name: str | None) -> SiteSettings:
    """Returns the settings with which `perada flower site` has run."""
    settings = SiteSettings.read(folder.expanduser() / "site.toml", name=name)
    file = settings.flower / "site.toml"
    if not file.is_file():
        raise InputError(f"{settings.name} has not taken part from {folder} yet: see `perada flower site`")
    return SiteSettings.read(file)


def personal_model(settings: SiteSettings, run: str = "") -> PersonalModel:
    """Returns the site's model of a run (by name or id; default the newest), with the last broadcast it received."""
    from .client import NeedsWeights, Site  # these load Flower, which the other commands do without

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
        data = empty_federation(work.plan, torch.device("cpu"))
        experiment = work.experiment_on(data)
        kept = site.state.newest(matching[-1])
        if kept is None and start:  # a run that continues another, in which the site was not sampled yet
            kept = site.state.before(start, start_round)
    except NeedsWeights as error:
        raise InputError(f"{site.state.path}: the server's weights are missing: take part in a run first") from error
    except Refused as error:
        raise InputError(f"{site.state.path}: {error}") from error
    kept = experiment.method.init(experiment.model)[2] if kept is None else experiment.here(kept)
    state = experiment.method.personal(experiment.here(broadcast), kept)
    return PersonalModel(settings.name, work.config, data, experiment.model, state)
