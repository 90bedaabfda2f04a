"""`perada data ...`: parse, call, print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..data import data_home, download
from . import tables
from .console import AsJson, err, show, tell

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
        tell(f"{name}   {_download(name, home)}")
        for file in download.unchecked(name, home):
            tell(f"no published checksum for {file.name}; its sha256 is {download.digest(file)}")


def _download(name: str, home: Path) -> Path:
    """Downloads a data set with a progress bar per file; returns where it is."""
    tasks: dict[str, TaskID] = {}
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err) as bar:

        def update(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done, total=total)

        return download.get(name, home, update)


@app.command("list")
def list_command(root: Annotated[Path | None, typer.Option()] = None, as_json: AsJson = False) -> None:
    """List the data sets that can be fetched, and those to fetch by hand."""
    home = root or Path(data_home())
    entries = list(download.CATALOGUE.values())
    document = [
        {"name": e.name, "title": e.title, "home": e.home, "megabytes": e.megabytes, "checksum": e.checksum}
        | {"by_hand": e.by_hand, "here": (home / e.folder).exists()}
        for e in entries
    ]
    show(as_json, document, tables.catalogue(entries, home))
