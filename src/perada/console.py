"""What all commands speak with: results on standard output, the rest on standard error."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

out = Console(markup=False)
err = Console(stderr=True, markup=False)
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def tell(text: str) -> None:
    """A line of the result, whole: a path is not broken at a screen's edge."""
    out.print(text, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A line beside it."""
    err.print(text, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))
