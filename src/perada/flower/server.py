"""The server's side of a federation: an experiment whose cohort is behind a network, and its run folder.

A round is saved before anything of the next one is sent. So a server that is killed anywhere goes on with the round
after its last checkpoint, and sites that trained that round already answer from their disks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..callbacks import Callback
from ..config import build
from ..errors import InputError
from ..experiment import Experiment
from ..lanes.machine import device_of
from ..runs.folder import RunFolder
from ..runs.moment import Checkpoint, Progress
from ..runs.run import Run
from ..runs.train import conclude, train_in
from .client import backbone_state, planned_network, shapes_of, weights_digest
from .cohort import FlowerCohort, Step
from .link import Link
from .records import Diary
from .settings import Plan, ServerSettings
from .site_data import empty_federation, public_test


class Log(Callback):
    """Writes down how far a run is, and a line per round."""

    def __init__(self, diary: Diary, cohort: FlowerCohort) -> None:
        self.diary, self.cohort = diary, cohort

    def round(self, progress: Progress) -> None:
        if progress.round < progress.rounds:
            self.diary.status("running", progress.round)

    def trained(self, experiment: Experiment) -> None:
        """Says a line about the round that was just saved."""
        now = experiment.now
        loss = now.last["train_loss"]
        shown = "n/a" if loss is None else f"{loss:.4f}"
        who = f"{len(self.cohort.found.uploads)} of {len(experiment.sampled(now.round - 1))} sites"
        self.diary.say(f"round {now.round} of {experiment.train.rounds}: {who}, training loss {shown}")


class Coordinator:
    """One run. `step` is called at every boundary at which a server may die (tests do)."""

    def __init__(self, settings: ServerSettings, diary: Diary, step: Step) -> None:
        config, self.diary = settings.config, diary
        network = planned_network(config, len(settings.federation.classes))
        report, net = network.load(config.model.weights), network.net
        for line in report.lines() if report else ():
            diary.say(line)
        plan, device = Plan.of(settings, weights_digest(net)), device_of(config.run.device)
        made: list[FlowerCohort] = []

        def cohort(experiment: Experiment) -> FlowerCohort:
            made.append(FlowerCohort(experiment, settings, plan, backbone_state(net), diary))
            return made[0]

        self.experiment = build(config, federation=empty_federation(plan, device), net=network, cohort=cohort)
        self.cohort = made[0]
        if settings.federation.test:
            self.experiment.test_data = public_test(settings.federation.test, plan, device)
        log = self.log = Log(diary, self.cohort)

        def mark(what: str, round: int) -> None:
            step(what, round)
            if what == "saved":
                log.trained(self.experiment)

        self.experiment.mark = mark

    def restore(self, saved: Checkpoint) -> None:
        """Goes on after a checkpoint of this run."""
        self.experiment.restore(saved)

    def begin_from(self, saved: Checkpoint) -> None:
        """Starts a new run where another ended."""
        found, now = self.experiment, self.experiment.now
        server, broadcast = found.here(saved.server), found.here(saved.broadcast)
        if shapes_of(server) != shapes_of(now.server) or shapes_of(broadcast) != shapes_of(now.broadcast):
            raise InputError("continue-from: that run's state is another method's or model's: start without it")
        found.now = replace(now, server=server, broadcast=broadcast)

    def run(self, link: Link, folder: RunFolder) -> dict[str, Any]:
        """Trains from the round after the newest checkpoint to the last; returns the last evaluation."""
        self.cohort.link = link
        self.cohort.find_all(self.experiment.now)
        row = train_in(self.experiment, folder, [self.log])
        conclude(Run(folder, self.experiment.config), self.experiment, row)
        self.diary.status("finished", self.experiment.now.round)
        return row.as_dict()
