"""A site's own model, read from its state folder. Needs no server and no network, and no data but to notice drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..client.scores import personal_thresholds
from ..config.settings import Settings
from ..errors import Damaged, InputError, unknown
from ..experiment import Experiment
from ..lanes import State
from ..predict.drift import Calibration, Drift
from ..predict.personal import MIDDLE, PersonalModel
from ..predict.pictures import Say, silent
from ..predict.predictor import Predictor
from ..report.site import SitePage
from ..runs.calibration import ADVICE, MADE_WITH, calibrated, check_labels
from ..runs.files import is_whole, read_object, sealed, write_output
from ..server.checks import Refused
from .settings import SiteSettings
from .site_data import empty_federation, site_federation

if TYPE_CHECKING:  # they load Flower, which most commands do without
    from .client import Site, Work

Labels = dict[str, float | None]  # a threshold per label; None where none is better than chance


@dataclass(frozen=True)
class SiteRun:
    """What a site has of a run."""

    id: str
    site: Site
    work: Work
    experiment: Experiment  # without data; its moment has the last broadcast, and what the site keeps now

    @property
    def folder(self) -> Path:
        """The run's folder at the site."""
        return self.site.state.path / self.id

    def model(self) -> PersonalModel:
        """Returns what the site predicts with."""
        of = self.experiment
        return PersonalModel(self.site.settings.name, self.work.config, of.federation, of.model, of.personal())


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
    experiment.now = replace(experiment.now, broadcast=experiment.here(broadcast), kept=kept)
    return SiteRun(matching[-1], site, work, experiment)


def personal_model(settings: SiteSettings, run: str = "", say: Say = silent) -> PersonalModel:
    """Returns the site's model of a run (by name or id; default the newest), with the last broadcast it received."""
    of = site_run(settings, run)
    return replace(of.model(), say=say, thresholds=_thresholds(of, say))


def _thresholds(of: SiteRun, say: Say = silent) -> Labels | None:
    """Returns the labels' thresholds, chosen on the site's validation data; None without several labels per image.

    They are read from their file, or chosen from the site's data and kept. Without the data they are one half.
    """
    personal = of.experiment.personal()
    if not of.experiment.federation.multilabel:
        return None

    def choose() -> dict[str, Labels]:
        data = site_federation(of.site.settings, of.work.plan, torch.device("cpu"))
        return personal_thresholds(of.experiment.model, personal, data)

    try:
        kept = _kept(of.folder / "thresholds.json", {"model": digest_of_state(personal)}, "thresholds", choose)
    except Damaged:
        raise
    except InputError as error:
        say(f"{of.site.settings.name}: all thresholds are {MIDDLE}, because its data cannot be read: {error}")
        return None
    return dict(kept[of.site.settings.name])


def digest_of_state(state: State) -> str:
    """Returns what tells two states apart."""
    from .messages import digest  # loads Flower

    return digest(state)


def _kept(path: Path, belongs: Mapping[str, Any], key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns what a file holds under a key if it belongs to these models, else makes it and writes the file."""
    if path.is_file():
        content = read_object(path, {key: dict}, ADVICE)
        if not is_whole(content):
            raise Damaged(f"{path} is damaged: {ADVICE}")
        if all(content.get(name) == value for name, value in belongs.items()):
            found: dict[str, Any] = content[key]
            return found
    made = make()
    write_output(path, sealed({**belongs, key: made}))
    return made


def personal_predictor(settings: SiteSettings, run: str = "", set: Settings | None = None) -> Predictor:
    """Returns what predicts with the site's model of a run and the last broadcast, and notices drift.

    It is calibrated on the site's own data, here, and the numbers are kept beside the model. set: settings of [drift].
    """
    of = site_run(settings, run)
    experiment, config = of.experiment, of.work.config
    options = replace(config.drift, **{key.removeprefix("drift."): v for key, v in (set or {}).items()})
    if options.prior != "uniform":
        raise InputError(f"Drift.prior={options.prior} works in simulations only: a site knows its own data alone")
    check_labels(experiment.federation, options)
    experiment.drift = options
    personal, shared = experiment.both_models()
    rest = experiment.federation, _calibration(of, options), options, config.data.fit
    return Predictor.of(settings.name, experiment.model, personal, shared, *rest)


def _calibration(of: SiteRun, options: Drift) -> Calibration:
    """Returns the site's calibration: from its file if that is of these models, else made from its data and kept."""
    made_with = {key: getattr(options, key) for key in MADE_WITH}
    models = [digest_of_state(state) for state in of.experiment.both_models()]

    def make() -> Mapping[str, Any]:
        data = site_federation(of.site.settings, of.work.plan, torch.device("cpu"))
        (by,) = calibrated(of.experiment, data, None).values()
        return by.as_dict()

    belongs = {"models": models, "options": made_with}
    return Calibration.read(_kept(of.folder / "drift.json", belongs, "calibration", make))


def site_page(settings: SiteSettings, run: str = "") -> SitePage:
    """Returns the page about the site's model of a run. Reads the site's data and what it noted, and asks nobody."""
    of = site_run(settings, run)
    plan, notes, experiment = of.work.plan, of.site.state.notes(of.id), of.experiment
    data = site_federation(settings, plan, experiment.device)
    shared, model = experiment.global_model, experiment.model
    own, least = experiment.personal(), _thresholds(of)
    return SitePage(settings.name, plan.federation, of.work.config, data, model, own, shared, notes, least)
