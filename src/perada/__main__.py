"""The `perada` command."""

import os
import sys

from . import __version__
from .cli.streams import exit_code


def share_cores() -> None:
    """Lets OpenMP's threads sleep while they wait, unless the user has set `OMP_WAIT_POLICY`.

    By default they wait in busy loops. On a machine with other work these loops take the cores from the threads that
    are waited for, and a training almost stops. OpenMP reads the variable when torch is imported; child processes
    inherit it. It affects the whole process, so only the command sets it: the library does not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def script() -> None:
    """Runs the command and exits with its code."""
    if code := exit_code(_command):
        sys.exit(code)


def _command() -> int:
    if sys.argv[1:] == ["--version"]:  # without the import below
        print(f"perada {__version__}")
        return 0
    share_cores()
    try:  # the import takes two seconds, in which people press Ctrl-C
        from .cli.main import run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":  # the worker processes of `perada compare` import this module under another name
    script()
