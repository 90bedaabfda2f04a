"""Progress of long work, on standard error."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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

from ..callbacks import Callback
from ..errors import Interrupted
from ..inputs import printable
from ..runs.moment import Progress as RoundProgress
from .console import SAID, err


class Watch(Callback):
    """A progress bar for one run or several."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
        )
        self.all: TaskID | None = None
        self.exhausted: tuple[str, ...] = ()  # clients that were named
        self.rounds = self.bar.add_task("training", total=None, unit="rounds", visible=False)

    def run(self, at: int, total: int, name: str) -> None:
        """Shows that run `name` begins; `at` of `total` are done."""
        if self.all is None:
            self.all = self.bar.add_task("", total=total, unit="runs")
            self.bar.start()
        self.bar.update(self.all, description=printable(name), completed=at)
        self.bar.reset(self.rounds, description="training", visible=False)

    def copies(self, at: int, total: int) -> None:
        """Shows how many corrupted copies of the test images were made."""
        self.bar.start()
        self.bar.update(self.rounds, description="corrupted", total=total, completed=at, visible=True, unit="copies")

    def round(self, progress: RoundProgress) -> None:
        """Shows a round; warns of clients whose training stopped being finite."""
        self.bar.start()  # not before: a refused setting prints one line and no bar
        for name in map(printable, progress.failed):
            self.bar.console.print(
                f"warning: {name}: training stopped being finite in round {progress.round}, which goes on without it"
            )
        for name in map(printable, progress.exhausted):
            if name not in self.exhausted:
                self.bar.console.print(f"{name}: its privacy budget allows no round after {progress.round}")
        self.exhausted = progress.exhausted
        if progress.round < self.bar.tasks[self.rounds].completed:  # another training: its clock begins at zero
            self.bar.reset(self.rounds)
        shown = progress.row.brief() if progress.row else progress.stage if progress.round == 0 else None
        self.bar.update(self.rounds, description=shown, total=progress.rounds, completed=progress.round, visible=True)


@contextmanager
def watched(command: str = "") -> Iterator[Watch]:
    """Shows a progress bar; an interruption ends with the command that resumes it (default: the same command)."""
    watch = Watch()
    try:
        yield watch
    except Interrupted as stop:  # typer would drop its message
        watch.bar.stop()
        again = f"Continue with: perada {command} --out {shlex.quote(str(stop.path))} --resume"
        rest = again if command else "The same command continues from there."
        print(printable(f"{stop}. {rest}"), file=sys.stderr)
        raise typer.Exit(SAID) from stop
    finally:
        if watch.bar.live.is_started:
            watch.bar.stop()
