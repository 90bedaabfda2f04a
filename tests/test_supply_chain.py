"""The recorded list of packages, the lowest versions, and how an audit is read."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

HOME = Path(__file__).parents[1]
PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text("utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
BROUGHT = [*map(Requirement, PROJECT["dependencies"]), *map(Requirement, EXTRAS["flower"])]  # by perada[flower]
verdict = runpy.run_path(str(HOME / "tools" / "audit.py"))["verdict"]


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    return json.loads((HOME / "sbom.cdx.json").read_text("utf8"))


@pytest.mark.parametrize("wanted", BROUGHT, ids=lambda r: r.name)
def test_the_recorded_list_has_each_direct_dependency_in_its_bounds(wanted: Requirement, sbom: dict[str, Any]) -> None:
    """Fails when a dependency is added or its bounds are moved past the record: `make sbom` writes it again."""
    versions = [c["version"] for c in sbom["components"] if c["name"] == wanted.name.lower()]
    assert len(versions) == 1
    assert wanted.specifier.contains(versions[0]), versions


def test_the_recorded_list_is_whole_and_names_no_machine(sbom: dict[str, Any]) -> None:
    assert (sbom["bomFormat"], sbom["specVersion"], sbom["version"]) == ("CycloneDX", "1.6", 1)
    everything = [sbom["metadata"]["component"], *sbom["components"]]
    refs = [c["bom-ref"] for c in everything]
    assert len(set(refs)) == len(refs)
    assert all(c["purl"] == f"pkg:pypi/{c['name']}@{c['version']}" for c in everything)
    below = {d["ref"]: d["dependsOn"] for d in sbom["dependencies"]}
    assert set(below) == set(refs)
    assert {ref for each in below.values() for ref in each} == set(refs) - {refs[0]}
    assert not re.search(r"file:|https?:|/\w+/\w+/", (HOME / "sbom.cdx.json").read_text("utf8"))


def test_the_lowest_versions_are_those_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(HOME / "tools" / "lowest.py"), run_name="__main__")
    found = dict(line.split("==") for line in capsys.readouterr().out.splitlines())
    direct = [Requirement(text) for group in [PROJECT["dependencies"], *EXTRAS.values()] for text in group]
    assert set(found) == {r.name for r in direct} - {"torch", "torchvision", "triton", "perada"}
    for name, version in found.items():
        assert all(r.specifier.contains(version) for r in direct if r.name == name)
        assert any(f">={version}" in str(r.specifier).split(",") for r in direct if r.name == name)


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(packages)})


GOOD = {"name": "rich", "version": "14.0", "vulns": []}
BAD = {"name": "pillow", "version": "9.0", "vulns": [{"id": "PYSEC-1"}]}
UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("output", "errors", "code", "said"),
    [
        (answer(GOOD, UNKNOWN), "", 0, "audited 1 of 2 packages, not found: numpy; known vulnerabilities: 0"),
        (answer(GOOD, BAD), "", 1, "pillow 9.0: PYSEC-1\naudited 2 of 2 packages; known vulnerabilities: 1"),
        (answer(UNKNOWN), "No known vulnerabilities found", 0, "not audited: the registry here has no"),
        ("", "requests.exceptions.ConnectionError: Failed to resolve", 0, "not audited: the vulnerability database"),
        ("", "Traceback\nTypeError: x", 1, "error: pip-audit failed: TypeError: x"),
        ("", "", 1, "error: pip-audit failed: it printed nothing"),
    ],
)
def test_an_audit_that_saw_nothing_does_not_pass_for_a_good_one(output: str, errors: str, code: int, said: str) -> None:
    found, text = verdict(output, errors)
    assert found == code
    assert text.startswith(said)
