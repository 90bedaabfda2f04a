"""examples/flower_demo.py (`make flower-demo`), with two rounds instead of ten."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from network.federation import DEMO, DemoProcess


def test_the_demo_trains_contacts_loopback_only_and_leaves_nothing(demo_process: DemoProcess) -> None:
    """It has run beside the other tests: most of its time and of theirs is waiting."""
    assert demo_process.wait() == 0, demo_process.said[-3000:]
    assert "addresses contacted: 127.0.0.1; processes left: 0" in demo_process.said
    assert "Local-test" in demo_process.said  # the table
    assert {p.name for p in demo_process.home.iterdir()} <= {"demo", "torch", "out"}


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flower_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        ({"127.0.0.1"}, False),
        ({"127.0.0.1", "::1"}, False),
        (set(), True),
        ({"::1"}, True),
        ({"127.0.0.1", "10.0.0.1"}, True),
    ],
)
def test_a_demo_that_saw_nothing_has_shown_nothing(demo: ModuleType, seen: set[str], wrong: bool) -> None:
    assert demo.wrong(seen) is wrong
