"""The two ways work can fail. The command line turns them into one line and an exit code."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class InputError(Exception):
    """The input is wrong, and the message says what to do. Exit code 2."""


class Damaged(InputError):
    """A file does not have the content that was written to it."""


class RunError(Exception):
    """Work started and could not finish. Exit code 1.

    The message says what went wrong (`what`), and then what was saved and how to continue.
    """

    def __init__(self, what: str, then: str = "") -> None:
        super().__init__(f"{what}; {then}" if then else what)
        self.what = what


class Diverged(RunError):
    """A training in which nothing is learned any more: round after round, no client's training stays finite."""


class Interrupted(KeyboardInterrupt):
    """A run was interrupted by Ctrl-C, and its last finished round is saved. Exit code 130."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"interrupted; what is finished is saved in {path}")
        self.path = path


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Returns an error that suggests the nearest known name, or lists all of them."""
    names = sorted(known)
    near = [n for n in names if name and n.startswith(name)] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} {name!r}: {hint}")
