"""The `perada` command."""

import sys


def script() -> None:
    try:  # this takes two seconds, and people press Ctrl-C in them
        from .cli.main import script as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":  # processes of `perada compare` import this module under another name
    script()
