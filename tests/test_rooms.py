"""What keeps the rooms apart that import-linter cannot see."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import perada
from perada.config import SECTIONS

ROOT = Path(perada.__file__).parent
RIM = {"config", "cli"}  # where keys are read and shown
KEYS = {f"{name}.{field.name}" for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)} | {
    "method.name"
}


def texts(rooms: set[str]) -> Iterator[tuple[str, str]]:
    """Every text in the modules outside these rooms, with its place."""
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT)
        if where.parts[0] not in rooms and where != Path("__init__.py"):
            for node in ast.walk(ast.parse(path.read_text("utf8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{where}:{node.lineno}", node.value


def test_keys_are_read_in_one_room() -> None:
    """Elsewhere a setting is an attribute, and messages name it as one: `Train.rounds`."""
    assert "train.rounds" in KEYS
    found = [(at, word) for at, text in texts(RIM) for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", text) if word in KEYS]
    assert found == []


def test_kernels_are_behind_one_seam() -> None:
    named = [at for at, text in texts({"lanes"}) if "fast_kernels" in text]
    code = [p for p in ROOT.rglob("*.py") if "fast_kernels" in p.read_text("utf8")]
    assert (named, code) == ([], [])


def test_a_resnet_is_named_only_where_networks_are_made() -> None:
    """No signature outside models/ asks for one kind of network."""
    users = [p for p in ROOT.rglob("*.py") if re.search(r"import .*\bResNet\b|: ResNet\b", p.read_text("utf8"))]
    assert {p.relative_to(ROOT).parts[0] for p in users} <= {"models"}
