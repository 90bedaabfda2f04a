"""Prints pip constraints: the lowest version of each direct dependency that pyproject.toml allows.

    python tools/lowest.py > constraints.txt

torch is left out, and torchvision and triton, which follow it. The registry has its lowest version as a CPU wheel for
some platforms only, and pip would take gigabytes of CUDA instead. `make test-lowest` uses these constraints.
"""

import re
import tomllib
from pathlib import Path

FREE = {"torch", "torchvision", "triton", "perada"}
BOUND = re.compile(r"([A-Za-z0-9._-]+)(?:\[.*?\])?>=([0-9.]+)")


def lowest(project: dict) -> dict[str, str]:
    """Returns the lower bound per package."""
    extras = project["optional-dependencies"].values()
    bounds = {}
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        match = BOUND.match(requirement)
        if match is None and not requirement.startswith("perada["):
            raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound")
        if match is not None and match[1] not in FREE:
            bounds[match[1]] = match[2]
    return bounds


if __name__ == "__main__":
    file = Path(__file__).parents[1] / "pyproject.toml"
    for name, version in lowest(tomllib.loads(file.read_text("utf8"))["project"]).items():
        print(f"{name}=={version}")
