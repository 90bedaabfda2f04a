"""drift.json: what a run folder keeps of its clients' calibrations, so that predictions need no data."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..data import Federation
from ..errors import Damaged, InputError
from ..experiment import Experiment
from ..predict.calibrate import calibrations, everyones_prior
from ..predict.drift import Calibration, Drift
from ..predict.scores import DriftScorer
from .files import read_object
from .folder import RunFolder
from .manifest import DRIFT

MADE_WITH = ("prior", "mix", "strength")  # the options that a calibration depends on
ADVICE = "delete it, and it is made again from the clients' data"


def check_labels(federation: Federation, options: Drift) -> None:
    """Refuses multi-label data, unless they are asked for."""
    if federation.multilabel and not options.multilabel:
        raise InputError(
            "predictions that notice drift are off for multi-label data, where they gain next to nothing "
            "(docs/drift.md): set Drift.multilabel=true to use them all the same"
        )


def calibrated(experiment: Experiment, federation: Federation, public: Tensor | None) -> dict[str, Calibration]:
    """Returns every client's calibration now. federation: with the clients' data, in the order of the lanes."""
    check_labels(federation, experiment.drift)
    personal, shared = experiment.both_models()
    everyone = everyones_prior(experiment.drift, experiment.model, shared, federation, public)
    return calibrations(experiment.model, personal, shared, federation, experiment.drift, everyone)


def scorer(experiment: Experiment, federation: Federation, by: Mapping[str, Calibration]) -> DriftScorer:
    """Returns what scores all clients now. federation: with the clients' data, in the order of the lanes."""
    models = experiment.both_models()
    return DriftScorer(experiment.model, *models, federation, by, experiment.drift, experiment.options.seed)


def _belongs_to(folder: RunFolder, options: Drift, round: int) -> dict[str, object]:
    """Returns what a calibration depends on: the checkpoint, and some of the options."""
    made = {name: getattr(options, name) for name in MADE_WITH}
    return {"checkpoint": folder.checkpoint_digest(round), "round": round, "options": made}


def save(folder: RunFolder, experiment: Experiment, by: Mapping[str, Calibration]) -> None:
    """Writes the calibrations of the newest checkpoint."""
    belongs = _belongs_to(folder, experiment.drift, experiment.now.round)
    folder.write_json(DRIFT, {"format": 1, **belongs, "clients": {name: c.as_dict() for name, c in by.items()}})


def load(folder: RunFolder, options: Drift, round: int) -> dict[str, Calibration] | None:
    """Returns the calibrations of a checkpoint; None if the folder has none, or those of another one."""
    path = folder.path / DRIFT
    if folder.manifest.state(DRIFT) in ("changed", "stray"):
        raise Damaged(f"{path} is damaged: {ADVICE}")
    if not path.is_file():
        return None
    content = read_object(path, {"format": int, "round": int, "options": dict, "clients": dict}, ADVICE)
    belongs = _belongs_to(folder, options, round)
    if not belongs["checkpoint"] or any(content.get(key) != value for key, value in belongs.items()):
        return None
    try:
        return {name: Calibration.read(one) for name, one in content["clients"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {ADVICE}") from error
