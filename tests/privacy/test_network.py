"""Over Flower's messages a site's private training is that of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from flower.test_parity import assert_same, simulated
from flower.wire import make_world, run

pytestmark = pytest.mark.filterwarnings("ignore:Privacy.deterministic")


@pytest.mark.parametrize("method", ["perada"])
def test_sites_train_as_in_a_simulation(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perada.flower.settings.UNSAFE_NOISE", True)  # a real site refuses noise from a seed
    private = {"privacy__noise": 1.0, "privacy__deterministic": True, "distill__guard": "none"}
    world = make_world(tmp_path, method__name=method, **private)
    sim = simulated(world)
    path, _ = run(world)
    assert_same(world, path, sim)
