"""The two ways work can fail. The command line turns them into one line and an exit code."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class InputError(Exception):
    """The user asked for something impossible; the message says what to do. Exit code 2."""


class Damaged(InputError):
    """A file is not what was written."""


class RunError(Exception):
    """Work started and could not finish; the message says what went wrong (`what`), and then what was saved and how to
    go on. Exit code 1."""

    def __init__(self, what: str, then: str = "") -> None:
        super().__init__(f"{what}; {then}" if then else what)
        self.what = what


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run, after its last finished round was saved. Exit code 130."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"interrupted; what is finished is saved in {path}")
        self.path = path


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """`unknown method 'perda': did you mean 'perada'?`, or the list of what there is."""
    names = sorted(known)
    near = [n for n in names if name and n.startswith(name)] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} {name!r}: {hint}")
