"""Prints the supported versions of Python that are on this machine, with the path of each: `3.12 /usr/bin/python3.12`.

They are looked for by name, and among those that pyenv has.
"""

import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")  # as in the classifiers of pyproject.toml


def pythons() -> dict[str, str]:
    """Returns a working interpreter for each version that is here."""
    found = {}
    for version in VERSIONS:
        own = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for path in [shutil.which(f"python{version}"), *map(str, reversed(own))]:
            if path and works(path, version):
                found[version] = path
                break
    return found


def works(path: str, version: str) -> bool:
    """Returns whether a program is this version of Python; a name may be there without a version behind it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


if __name__ == "__main__":
    for version, path in pythons().items():
        print(version, path)
