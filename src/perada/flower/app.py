"""The Flower app: its pyproject.toml names `server_app` and `client_app`.

The ServerApp reads server.toml from $PERADA_FLOWER_SERVER. The ClientApp reads the node-config key `site`,
or else $PERADA_FLOWER_SITE (site.toml), or else (in Flower's simulation engine) entry `partition-id` of
$PERADA_FLOWER_SITES, paths joined as in $PATH. In the run-config, `run` names the run, `resume` continues it, and
`continue-from` names a run to begin from. `from-round` takes a run back to the state after so many rounds.

The server saves a round before it sends anything of the next one. So a server that is killed anywhere goes on with the
round after its last checkpoint, and sites that have trained that round answer from their disks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..callbacks import Callback
from ..config import build
from ..errors import InputError, RunError
from ..experiment import Experiment
from ..lanes.machine import device_of
from ..privacy.ledger import Ledger
from ..privacy.spending import SPENT, ledger_in
from ..runs.files import locked
from ..runs.folder import RunFolder
from ..runs.moment import Checkpoint, Progress
from ..runs.run import Run
from ..runs.train import conclude, train_in
from .client import Site, backbone_state, handle, planned_network, shapes_of, weights_digest
from .cohort import FlowerCohort
from .link import Link, Owners
from .records import Diary, ending, go_back, open_run
from .settings import Plan, ServerSettings, SiteSettings
from .site_data import empty_federation, public_test

Step = Callable[[str, int], None]
client_app = ClientApp()
server_app = ServerApp()


# A site


@client_app.query()
@client_app.train()
@client_app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answers every message by `client.handle`."""
    return Message(handle(_site(_site_file(context)), message.content), reply_to=message)


def _site_file(context: Context) -> str:
    given = context.node_config.get("site") or os.environ.get("PERADA_FLOWER_SITE")
    several = os.environ.get("PERADA_FLOWER_SITES", "").split(os.pathsep)
    part = context.node_config.get("partition-id")
    if not given and several[0] and isinstance(part, int) and part < len(several):
        given = several[part]
    if not given:
        raise InputError("no site.toml: set PERADA_FLOWER_SITE, or --node-config \"site='/path/site.toml'\"")
    return str(given)


@lru_cache
def _site(file: str) -> Site:
    return Site(SiteSettings.read(file))


# The server


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains a run to its last round. An error ends it with one line."""
    config = context.run_config
    back: Any = config.get("from-round")
    try:
        file = os.environ.get("PERADA_FLOWER_SERVER")
        if not file:
            raise InputError("no server.toml: set PERADA_FLOWER_SERVER")
        serve(
            grid,
            ServerSettings.read(file),
            str(config.get("run") or "run"),
            bool(config.get("resume", False)),
            str(config.get("continue-from") or ""),
            back=None if back is None or int(back) < 0 else int(back),
        )
    except (InputError, RunError) as error:
        raise RuntimeError(f"error: {error}") from None


def serve(
    grid: Grid,
    settings: ServerSettings,
    name: str,
    resume: bool = False,
    start: str = "",
    step: Step = lambda what, round: None,
    back: int | None = None,
) -> Path:
    """Trains a run to its last round; returns its folder.

    step: hears of every boundary at which a server may die. back: the run first goes back to its state after so many
    rounds.
    """
    with _one_line(settings.runs()):
        folder, diary = open_run(settings, name, resume or back is not None, start, back)
    with locked(folder.path):
        if back:
            folder.load(back)  # a round that cannot be loaded leaves everything as it is
        try:
            with _one_line(folder.path):
                diary.begin()
                if back is not None:
                    go_back(folder, diary, back)
                experiment = _experiment(grid, diary)
                experiment.mark = step
                _restore(experiment, folder, diary)
                row = train_in(experiment, folder, [Log(diary)])
                conclude(Run(folder, experiment.config), experiment, row)
                diary.status("finished", experiment.now.round)
        except (InputError, RunError) as error:
            with suppress(OSError):  # the disk may be what failed
                diary.status("failed", diary.round, str(error))
            raise
    return folder.path


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns a write that fails, such as on a full disk, into one line."""
    try:
        yield
    except OSError as error:
        what = f"cannot write to {path}: {error.strerror}" if error.strerror else str(error)
        raise RunError(what, "what was saved is whole: make room, then run it again with resume=true") from error


def _experiment(grid: Grid, diary: Diary) -> Experiment:
    """Returns the experiment whose cohort is behind the network."""
    settings, config = diary.settings, diary.settings.config
    network = planned_network(config, len(settings.federation.classes))
    report = network.load(config.model.weights)
    for line in report.lines() if report else ():
        diary.say(line)
    plan, device = Plan.of(settings, weights_digest(network.net)), device_of(config.run.device)
    link = Link(grid, settings.federation.sites, settings.rounds, diary.tell, _owners())

    def cohort(experiment: Experiment) -> FlowerCohort:
        return FlowerCohort(experiment, plan, backbone_state(network.net), diary, link)

    experiment = build(config, federation=empty_federation(plan, device), net=network, cohort=cohort)
    if settings.federation.test:
        experiment.test_data = public_test(settings.federation.test, plan, device)
    return experiment


def _owners() -> Owners | None:
    """Returns a reader of $PERADA_FLOWER_NODES, {node: site}, which `perada flower server` writes if sites have keys.

    The file may change while the server runs. If it cannot be read, no node is any site's.
    """
    file = os.environ.get("PERADA_FLOWER_NODES")

    def read() -> dict[int, str]:
        try:
            return {int(node): str(site) for node, site in json.loads(Path(str(file)).read_text("utf8")).items()}
        except (OSError, ValueError, AttributeError):
            return {}

    return read if file else None


def _restore(experiment: Experiment, folder: RunFolder, diary: Diary) -> None:
    """Goes on after the newest checkpoint, or begins from the end of another run."""
    saved = folder.resume(experiment.train.rounds, diary.say)
    if saved is not None:
        experiment.restore(saved)
    elif diary.start:
        end = ending(diary.settings, diary.start)
        _begin_from(experiment, end)
        diary.start_round = end.round
    if experiment.privacy.of_clients:
        _remember(experiment, diary.spent)


def _begin_from(experiment: Experiment, end: Checkpoint) -> None:
    now, server, broadcast = experiment.now, experiment.here(end.server), experiment.here(end.broadcast)
    if (shapes_of(server), shapes_of(broadcast)) != (shapes_of(now.server), shapes_of(now.broadcast)):
        raise InputError("continue-from: that run's state is another method's or model's: start without it")
    experiment.now = replace(now, server=server, broadcast=broadcast)
    if experiment.privacy.of_clients:
        _remember(experiment, ledger_in(end.note["memory"]))


def _remember(experiment: Experiment, spent: Ledger) -> None:
    """Goes on with what was spent before: noisy models of undone rounds, and of the run that this one continues."""
    now = experiment.now
    if (ledger := ledger_in(now.memory).joined(spent)).spent:
        experiment.now = replace(now, memory=now.memory | {SPENT: ledger.as_note()})


class Log(Callback):
    """Writes down how far a run is, and a line per round."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def start(self, experiment: Experiment) -> None:
        self.experiment, self.first = experiment, experiment.now.round

    def round(self, progress: Progress) -> None:
        self.diary.spent = ledger_in(self.experiment.now.memory)
        if progress.round < progress.rounds:
            self.diary.status("running", progress.round)
        if progress.round > self.first:
            last, sampled = self.experiment.now.last, len(self.experiment.sampled(progress.round - 1))
            loss = "n/a" if last["train_loss"] is None else f"{last['train_loss']:.4f}"
            absent = last.get("absent", ())
            who = f"{sampled - len(absent)} of {sampled} sites"
            who += f" (without {', '.join(absent)})" if absent else ""
            self.diary.say(f"round {progress.round} of {progress.rounds}: {who}, training loss {loss}")
