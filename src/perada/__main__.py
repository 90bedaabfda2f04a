"""The `perada` command."""

import sys

from .machine import share_cores


def script() -> None:
    """Run the `perada` command and exit with its code."""
    share_cores()  # before the command line imports torch
    try:  # the import takes two seconds, in which people press Ctrl-C
        from .cli.main import script as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":  # the worker processes of `perada compare` import this module under another name
    script()
