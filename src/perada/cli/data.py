"""`perada data ...`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..data import data_home, download
from . import tables
from .console import AsJson, err, out, print_json, tell

app = typer.Typer(no_args_is_help=True, help="Fetch the data sets of the paper.")


@app.command("get")
def get_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="see `perada data list`")],
    root: Annotated[Path | None, typer.Option(help="default $PERADA_DATA or ~/.cache/perada/data")] = None,
) -> None:
    """Download data sets and check them; a download that was cut is resumed."""
    home = root or Path(data_home())
    for name in names:
        download.check(name, home)  # before a bar is drawn
    for name in names:
        with Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=err
        ) as bar:
            tasks: dict[str, TaskID] = {}

            def show(file: str, done: int, total: int | None, bar: Progress = bar, tasks: Any = tasks) -> None:
                task = tasks.setdefault(file, bar.add_task(file, total=total) if file not in tasks else tasks[file])
                bar.update(task, completed=done, total=total)

            path = download.get(name, home, show)
        tell(f"{name}   {path}")
        for file in download.unchecked(name, home):
            tell(f"no published checksum for {file.name}; its sha256 is {download.digest(file)}")


@app.command("list")
def list_command(root: Annotated[Path | None, typer.Option()] = None, as_json: AsJson = False) -> None:
    """List the data sets that can be fetched, and those to fetch by hand."""
    home = root or Path(data_home())
    entries = list(download.CATALOGUE.values())
    if as_json:
        print_json(
            [
                {"name": e.name, "title": e.title, "home": e.home, "megabytes": e.megabytes, "checksum": e.checksum}
                | {"by_hand": e.by_hand, "here": (home / e.folder).exists()}
                for e in entries
            ]
        )
        return
    out.print(tables.catalogue(entries, home))
