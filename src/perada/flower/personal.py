"""A site's own model, read from its state folder. Needs no server and no network, and no data but to notice drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config.settings import Settings
from ..data import Federation
from ..errors import Damaged, InputError, unknown
from ..experiment import Experiment
from ..predict.drift import Calibration, Drift
from ..predict.personal import PersonalModel
from ..predict.predictor import Predictor
from ..runs.calibration import ADVICE, MADE_WITH, calibrated
from ..runs.files import is_whole, read_object, sealed, write_output
from ..server.checks import Refused
from .settings import Plan, SiteSettings
from .site_data import empty_federation, site_federation

if TYPE_CHECKING:
    from .client import Work


def known_site(folder: Path, name: str | None) -> SiteSettings:
    """Returns the settings with which `perada flower site` has run."""
    settings = SiteSettings.read(folder.expanduser() / "site.toml", name=name)
    file = settings.flower / "site.toml"
    if not file.is_file():
        raise InputError(f"{settings.name} has not taken part from {folder} yet: see `perada flower site`")
    return SiteSettings.read(file)


def personal_model(settings: SiteSettings, run: str = "") -> PersonalModel:
    """Returns the site's model of a run (by name or id; default the newest), with the last broadcast it received."""
    experiment, work, _ = _trained(settings, run)
    return PersonalModel(settings.name, work.config, experiment.federation, experiment.model, experiment.personal())


def personal_predictor(settings: SiteSettings, run: str = "", set: Settings | None = None) -> Predictor:
    """Returns what predicts with the site's model of a run and the last broadcast, and notices drift.

    It is calibrated on the site's own data, here, and the numbers are kept beside the model. set: settings of [drift].
    """
    experiment, work, folder = _trained(settings, run)
    options = replace(work.config.drift, **{key.removeprefix("drift."): v for key, v in (set or {}).items()})
    experiment.drift = options
    personal, shared = experiment.both_models()
    by = _calibration(folder / "drift.json", experiment, options, lambda: _own_data(settings, work.plan))
    rest = experiment.federation, by, options, work.config.data.fit
    return Predictor.of(settings.name, experiment.model, personal, shared, *rest)


def _own_data(settings: SiteSettings, plan: Plan) -> Federation:
    return site_federation(settings, plan, torch.device("cpu"))


def _calibration(path: Path, experiment: Experiment, options: Drift, data: Callable[[], Federation]) -> Calibration:
    """Returns the site's calibration: from its file if that is of these models, else made from its data and kept."""
    from .messages import digest

    made = {key: getattr(options, key) for key in MADE_WITH}
    belongs = {"models": [digest(state) for state in experiment.both_models()], "options": made}
    if path.is_file():
        content = read_object(path, {"options": dict, "calibration": dict}, ADVICE)
        if not is_whole(content):
            raise Damaged(f"{path} is damaged: {ADVICE}")
        if all(content.get(key) == value for key, value in belongs.items()):
            return Calibration.read(content["calibration"])
    (by,) = calibrated(experiment, data(), None).values()
    write_output(path, sealed({**belongs, "calibration": by.as_dict()}))
    return by


def _trained(settings: SiteSettings, run: str) -> tuple[Experiment, Work, Path]:
    """Returns an experiment with what the site holds of a run, its plan at work, and the run's folder."""
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
    experiment.now = replace(experiment.now, broadcast=experiment.here(broadcast), kept=kept)
    return experiment, work, site.state.path / matching[-1]
