"""The Flower app: its pyproject.toml names `server_app` and `client_app`.

The ServerApp reads server.toml from $PERADA_FLOWER_SERVER. The ClientApp reads the node-config key `site`,
or else $PERADA_FLOWER_SITE (site.toml), or else (in Flower's simulation engine) entry `partition-id` of
$PERADA_FLOWER_SITES, paths joined as in $PATH. In the run-config, `run` names the run, `resume` continues it, and
`continue-from` names a run to begin from.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..errors import InputError, RunError
from ..runs.folder import locked
from .client import Site, handle
from .cohort import Step
from .link import Link, Owners, limit_tries
from .records import Diary, ending, open_run
from .server import Coordinator
from .settings import ServerSettings, SiteSettings

client_app = ClientApp()
server_app = ServerApp()


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


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains a run to its last round. An error ends it with one line."""
    config = context.run_config
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
        )
    except (InputError, RunError) as error:
        raise RuntimeError(f"error: {error}") from None


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


def serve(
    grid: Grid,
    settings: ServerSettings,
    name: str,
    resume: bool = False,
    start: str = "",
    step: Step = lambda what, round: None,
) -> Path:
    """Run a federation to its last round; returns the run's folder. `step` is told of every boundary in a round."""
    try:
        folder, diary = open_run(settings, name, resume, start)
    except OSError as error:
        raise RunError(f"cannot write to {settings.runs()}: {error.strerror or error}") from error
    with locked(folder.path):
        try:
            work = Coordinator(settings, diary, step)
            saved, warnings = folder.load()
            for line in warnings:
                diary.say(line)
            if saved is not None:
                work.restore(saved)
                folder.cut_metrics(saved.round)
            elif diary.start:
                begin = ending(settings, diary.start)
                work.begin_from(begin)
                diary.start_round = begin.round
            limit_tries(grid, settings.rounds.deadline_s)
            link = Link(grid, settings.federation.sites, settings.rounds, diary.tell, _owners())
            work.run(link, folder)
        except (InputError, RunError) as error:
            _failed(diary, str(error))
            raise
        except OSError as error:  # a full disk, say
            what = f"cannot write to {folder.path}: {error.strerror}" if error.strerror else str(error)
            _failed(diary, line := f"{what}; what was saved is whole: make room, then run it again with resume=true")
            raise RunError(line) from error
    return folder.path


def _failed(diary: Diary, line: str) -> None:
    with suppress(OSError):  # the disk may be what failed
        diary.status("failed", diary.round, line)
