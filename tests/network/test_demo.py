"""examples/flower_demo.py (`make flower-demo`), with two rounds instead of ten."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "flower_demo.py"


def test_the_demo_trains_contacts_loopback_only_and_leaves_nothing(tmp_path: Path) -> None:
    words = [sys.executable, str(DEMO), str(tmp_path / "demo"), "train.rounds=2", "distill.steps=5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "torch")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "addresses contacted: 127.0.0.1; processes left: 0" in done.stdout
    assert "Local-test" in done.stdout  # the table
    assert {p.name for p in tmp_path.iterdir()} <= {"demo", "torch"}


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
