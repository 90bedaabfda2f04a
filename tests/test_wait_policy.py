"""The command sets how OpenMP's threads wait before torch is imported; the library leaves the process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perada.__main__ import share_cores

POLICY = "OMP_WAIT_POLICY"
STOPPED = 7
TORCH = f"""
import os, sys
sys.stdout.write(str(os.environ.get("{POLICY}")))
sys.stdout.flush()
os._exit({STOPPED})
"""


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder whose `torch` says what the environment is when it is imported, and ends the process."""
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path


def python(words: list[str], first: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with `first` at the front of its path."""
    path = os.pathsep.join([str(first), *sys.path])
    env = {k: v for k, v in os.environ.items() if k != POLICY}
    return subprocess.run(
        [sys.executable, *words], env={**env, "PYTHONPATH": path, **variables}, capture_output=True, text=True
    )


@pytest.mark.parametrize("words", [["train", "digits"], ["compare"]])
def test_the_command_sets_the_policy_before_torch_is_imported(words: list[str], no_torch: Path) -> None:
    done = python(["-m", "perada", *words], no_torch)
    assert (done.returncode, done.stdout) == (STOPPED, "passive"), done.stderr


@pytest.mark.parametrize("words", [["train", "digits"], ["compare"]])
def test_a_policy_of_the_user_stays(words: list[str], no_torch: Path) -> None:
    done = python(["-m", "perada", *words], no_torch, **{POLICY: "active"})
    assert (done.returncode, done.stdout) == (STOPPED, "active"), done.stderr


def test_importing_the_library_sets_nothing(no_torch: Path) -> None:
    done = python(["-c", "import perada; perada.train"], no_torch)
    assert (done.returncode, done.stdout) == (STOPPED, "None"), done.stderr


def test_processes_of_flower_inherit_the_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = pytest.importorskip("perada.flower.processes")
    monkeypatch.delenv(POLICY, raising=False)
    share_cores()
    assert processes.environment(tmp_path)[POLICY] == "passive"
    monkeypatch.setenv(POLICY, "active")
    share_cores()
    assert processes.environment(tmp_path)[POLICY] == "active"
