"""What long work shows while it runs, on standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..errors import Interrupted
from ..experiment import Progress as RoundProgress
from .console import SAID, err


class Watch:
    """The progress of one run, or of several."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
        )
        self.all: TaskID | None = None
        self.rounds = self.bar.add_task("training", total=None, unit="rounds", visible=False)

    def run(self, at: int, total: int, name: str) -> None:
        """Another run begins: `at` of `total` are done."""
        if self.all is None:
            self.all = self.bar.add_task("", total=total, unit="runs")
            self.bar.start()
        self.bar.update(self.all, description=name, completed=at)
        self.bar.reset(self.rounds, description="training", visible=False)

    def copies(self, at: int, total: int) -> None:
        """Corrupted copies of the test images, one after another."""
        self.bar.start()
        self.bar.update(self.rounds, description="corrupted", total=total, completed=at, visible=True, unit="copies")

    def round(self, p: RoundProgress) -> None:
        self.bar.start()  # not before everything that can be refused has been
        for name in p.failed:
            self.bar.console.print(
                f"warning: {name}: training stopped being finite in round {p.round}; kept its last state"
            )
        shown = caption(p.row.as_dict()) if p.row else p.stage if p.round == 0 else None
        self.bar.update(self.rounds, description=shown, total=p.rounds, completed=p.round, visible=True)


@contextmanager
def watched(command: str = "") -> Iterator[Watch]:
    """A progress bar around long work; an interruption ends with the line that resumes it (default: the same again)."""
    watch = Watch()
    try:
        yield watch
    except Interrupted as stop:  # typer would swallow its words
        watch.bar.stop()
        again = f"Continue with: perada {command} --out {shlex.quote(str(stop.path))} --resume"
        print(f"{stop}. {again if command else 'The same command goes on from there.'}", file=sys.stderr)
        raise typer.Exit(SAID) from stop
    finally:
        if watch.bar.live.is_started:
            watch.bar.stop()


def caption(row: dict[str, Any]) -> str:
    shown = {"local": "local_test", "global": "global_test"} if "local_test" in row else {"val": "local_val"}
    found = {name: row[key]["mean"] for name, key in shown.items()}
    return " ".join(f"{name} {'n/a' if v is None else f'{v:.1f}'}" for name, v in found.items())
