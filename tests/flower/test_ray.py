"""The same apps on Flower's simulation engine (Ray)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flower.test_parity import assert_same, simulated
from flower.wire import SITES, make_world


def test_the_simulation_engine_gives_what_the_simulator_gives(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 120.0, "hello_s": 120.0, "poll_s": 0.2}, train__rounds=2)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PERADA_FLOWER_SERVER": str(tmp_path / "server.toml"),
        "PERADA_FLOWER_SITES": os.pathsep.join(str(tmp_path / s / "site.toml") for s in SITES),
    }
    script = Path(__file__).with_name("ray_run.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(world, tmp_path / "state" / "runs" / "run", simulated(world))
