"""One self-contained page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..runs import write_atomic
from .facts import gather_facts
from .page import page

if TYPE_CHECKING:
    from ..api import Run

__all__ = ["write_report"]


def write_report(runs: Sequence[Run], out: Path) -> None:
    """The same runs write the same bytes."""
    if not runs:
        raise InputError("nothing to report on: name at least one run folder")
    data = page(gather_facts(runs)).encode("utf-8", "replace")  # a file's name may hold what is no text
    try:
        write_atomic(out, data)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
