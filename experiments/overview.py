"""How many runs of an experiment are done, and how many minutes are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perada.config import Config, resolve
from perada.runs.folder import RunFolder
from perada.server.distill import STATISTICS

from .plans import experiments
from .running import State, state_of
from .trials import Experiment

SHIFTED = 30.0  # estimated seconds of the 95 corrupted test sets at the end of a run
Kind = tuple[str, str]  # (preset, method)


def overview(experiment: Experiment, root: Path, out: Path | None, known: Mapping[Kind, float]) -> dict[str, Any]:
    """Returns one line of `python -m experiments list`.

    Minutes are machine time: runs that trained together share them. The minutes left are an estimate, corrected by
    `known` (see `corrections`); `measured` says whether all of it could be corrected. `out` has the run folders.
    """
    state = state_of(experiment, root)
    begun, seconds, measured = dict[str, list[int]](), 0.0, True
    for name in state.left:
        config = state.configs.get(name) or _likely(experiment, name)
        rounds, done = config.train.rounds, 0
        if out is not None:
            done = RunFolder(out / experiment.name / name).newest_round() or 0
        if done:
            begun[name] = [done, rounds]
        factor = known.get((experiment.preset, config.method_name))
        measured = measured and factor is not None
        seconds += expected(experiment, config) * (factor or 1.0) * (1 - done / rounds)
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "runs": len(experiment.trials),
        "done": len(state.found),
        "left": len(state.left),
        "begun": begun,
        "other_settings": sorted(state.stale),
        "minutes_done": sum(map(taken, state.found.values())) / 60,
        "at_most": any(r.get("shared_gpu") for r in state.found.values()),  # processes that shared a GPU count twice
        "minutes_left": seconds / 60,
        "measured": measured,
    }


def words(found: dict[str, Any]) -> str:
    """Returns an overview as one line of text."""
    most = "at most " if found["at_most"] else ""
    line = f"{found['experiment']}: {found['done']} of {found['runs']} runs done"
    line += f" in {most}{found['minutes_done']:.1f} minutes"
    if not found["left"]:
        return line
    how = "as such runs took" if found["measured"] else "estimated"
    left = found["minutes_left"]
    line += f"; about {left:.{0 if left >= 10 else 1}f} minutes left ({how}), the same command goes on"
    several = [f"{name} at round {at} of {rounds}" for name, (at, rounds) in found["begun"].items()]
    return line + (f". Begun: {', '.join(several)}" if several else "")


def taken(result: dict[str, Any]) -> float:
    """Returns the machine seconds of a run."""
    return float(result["seconds"]) / int(result["together"])


def corrections(root: Path) -> dict[Kind, float]:
    """Returns per preset and method the measured time divided by the expected time."""
    spent, wanted = dict[Kind, float](), dict[Kind, float]()
    for one in experiments().values():
        state = state_of(one, root) if (root / one.name).is_dir() else State(one)
        for name, result in state.found.items():
            if result.get("shared_gpu"):
                continue
            key = one.preset, result["method"]
            spent[key] = spent.get(key, 0.0) + taken(result)
            wanted[key] = wanted.get(key, 0.0) + expected(one, state.configs[name])
    return {key: spent[key] / wanted[key] for key in spent}


def expected(experiment: Experiment, config: Config) -> float:
    """Returns the expected seconds of a run alone on one H200; runs that train together take less each."""
    rounds, by_method = config.train.rounds, experiment.seconds
    found = rounds * by_method.get(config.method_name, by_method[""])
    if config.make_method().parts.distils and config.distill.steps:
        first, step = experiment.distilling
        still = STATISTICS if config.distill.guard != "none" and config.distill.judged().count(0) > 1 else 0
        found += min(config.distill.rounds or rounds, rounds) * (first + step * (config.distill.steps + still))
    if config.model.weights == "fedavg":
        found += config.model.pretrain_rounds * by_method[""]
    return found + (SHIFTED if config.run.shifts else 0.0)


def _likely(experiment: Experiment, name: str) -> Config:
    """Returns the likely settings of a run that depends on an open choice."""
    return resolve(experiment.preset, {**experiment.settings, **experiment.trial(name).settings})
