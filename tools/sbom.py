"""Writes sbom.cdx.json (CycloneDX 1.6): the packages that `pip install 'perada[flower]'` brings.

Everything in it comes from the installed packages' own metadata.

    python tools/sbom.py            # `make sbom`
"""

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

FILE = Path(__file__).parents[1] / "sbom.cdx.json"
EXTRA = "flower"


def key(name: str) -> str:
    """Returns a package's name as the registry writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(package: Distribution, extras: set[str]) -> list[Requirement]:
    """Returns what a package requires here, with these extras."""
    wanted = [Requirement(text) for text in package.requires or []]
    return [r for r in wanted if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras | {""})]


def closure() -> dict[str, tuple[Distribution, list[str]]]:
    """Returns every package that is needed, by name, with the names of what it requires."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    todo = [("perada", {EXTRA})]
    while todo:
        name, extras = todo.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError as error:
            raise SystemExit(f"error: {name} is not installed: run this where perada[{EXTRA}] is") from error
        known = found.get(name, (package, []))[1]
        new = [r for r in needs(package, extras) if key(r.name) not in known]
        found[name] = (package, sorted({*known, *(key(r.name) for r in new)}))
        todo += [(key(r.name), set(r.extras)) for r in new]
    return found


def component(name: str, package: Distribution) -> dict[str, Any]:
    """Returns one entry of the list. A wheel's local version (`+cpu`) says where it was built, not what it is."""
    version = package.version.partition("+")[0]
    ref = f"pkg:pypi/{name}@{version}"
    entry = {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": ref}
    if license := package.metadata.get("License-Expression"):
        entry |= {"licenses": [{"expression": license}]}
    return entry


def bom() -> dict[str, Any]:
    """Returns the whole document. It has no time and no serial number, so that only a change changes it."""
    found = closure()
    refs = {name: component(name, package)["bom-ref"] for name, (package, _) in found.items()}
    entries = {name: component(name, package) for name, (package, _) in sorted(found.items())}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**entries.pop("perada"), "type": "application"}},
        "components": list(entries.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": [refs[n] for n in below]} for name, (_, below) in sorted(found.items())
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(bom(), indent=1) + "\n")
