"""`python -m experiments`: runs the paper's experiments."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from perada.cli.main import main as run_app
from perada.lanes.machine import keep_memory

from .commands import app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit codes of `perada`."""
    return run_app(arguments, app)


if __name__ == "__main__":
    keep_memory()
    sys.exit(main())
