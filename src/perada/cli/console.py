"""What all commands speak with: results on standard output, the rest on standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

WIDE = 160  # columns where nobody's screen ends: a table in a file or a pipe is not cut

out = Console(markup=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
err = Console(stderr=True, markup=False)
INTERRUPTED = 130
SAID = 256 + INTERRUPTED  # inside, where it was said how to go on; typer gives the other code to any interrupt
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def tell(text: str) -> None:
    """A line of the result, whole: a path is not broken at a screen's edge."""
    out.print(text, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A line beside it."""
    from ..config import in_keys

    err.print(in_keys(text), highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))
