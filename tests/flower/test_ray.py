"""The same apps on Flower's simulation engine (Ray)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import no_network
import pytest

from flower.test_parity import assert_same, simulated
from flower.wire import SITES, make_world

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_run.py"


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Ray's sockets want a short path; by itself it would leave its sessions in /tmp/ray."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def ours(word: str) -> set[int]:
    """The living processes with this word in their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and word.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def test_the_simulation_engine_gives_what_the_simulator_gives(tmp_path: Path, ray_folder: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 120.0, "hello_s": 120.0, "poll_s": 0.2}, train__rounds=2)
    word, shared = f"PERADA_TEST_{token_hex(8)}", Path("/tmp/ray")
    before = set(shared.glob("session_*"))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "RAY_"))},
        word: "1",
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(tmp_path / "flwr"),
        no_network.LOG: "",  # Ray asks which cloud it is in, at addresses that are blocked; nothing turns that off
        "RAY_TMPDIR": str(ray_folder),
        "PERADA_FLOWER_SERVER": str(tmp_path / "server.toml"),
        "PERADA_FLOWER_SITES": os.pathsep.join(str(tmp_path / s / "site.toml") for s in SITES),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(ray_folder.rglob("session_*")), "Ray was somewhere else"
    assert set(shared.glob("session_*")) == before
    end = time.monotonic() + 20
    while ours(word) and time.monotonic() < end:
        time.sleep(0.2)
    assert ours(word) == set()
    assert_same(world, tmp_path / "state" / "runs" / "run", simulated(world))


def test_nobody_is_told_of_it() -> None:
    """Telemetry, the look for updates and Ray's usage statistics are off before anything of theirs is loaded."""
    names = ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "RAY_USAGE_STATS_ENABLED")
    code = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
class Look:
    def find_spec(self, name, *rest):
        if name in ("flwr", "ray"):
            print([os.environ.get(n) for n in {names!r}], flush=True)
sys.meta_path.insert(0, Look())
import ray_run
"""
    env = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {"['0', '1', '0']"}
