"""How all commands print: results on standard output, the rest on standard error."""

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import in_keys
from ..inputs import printable

WIDE = 160  # columns of a file or a pipe, so that a table there is not cut


class PlainConsole(Console):
    """A console that prints text as it is: no markup, no emoji codes, and control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns a text to print, or a cell, title or caption of a table."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


out = PlainConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
err = PlainConsole(stderr=True)
INTERRUPTED = 130
SAID = 256 + INTERRUPTED  # an interrupt after which the command that resumes was printed; only used inside
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def tell(text: str) -> None:
    """Prints a line of the result, whole: a path is not broken at the edge of a screen."""
    out.print(text, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Prints a line on standard error."""
    err.print(printable(in_keys(text)), highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def show(as_json: bool, document: object, *parts: Table | str) -> None:
    """Prints a command's result: one JSON document, or tables and lines for a person."""
    if as_json:
        print_json(document)
        return
    for part in parts:
        if isinstance(part, str):
            tell(part)
        else:
            out.print(part)
