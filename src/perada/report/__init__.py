"""Tables, figures and one self-contained HTML page about finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..runs.folder import write_atomic
from .facts import Holdings, gather_facts
from .page import page, partition_page

if TYPE_CHECKING:
    from ..data import Federation
    from ..runs.run import Run

__all__ = ["write_partition", "write_report"]


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Writes a page about these runs to `out`; the same runs give the same bytes."""
    if not runs:
        raise InputError("nothing to report on: name at least one run folder")
    _write(page(gather_facts(runs)), out)


def write_partition(federation: Federation, out: Path) -> None:
    """Writes a page that shows how many samples of which class each client has."""
    _write(partition_page(federation.name, Holdings.of(federation)), out)


def _write(text: str, out: Path) -> None:
    data = text.encode("utf-8", "replace")  # a file name may have bytes that are not text
    try:
        write_atomic(out, data)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
