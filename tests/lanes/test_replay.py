"""A loop whose steps could be recorded, run on the CPU: all its tensors stay where they are, and nothing changes."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_tensors
from small import everything, small

from perada.lanes import replay
from perada.lanes.state import State, flattened
from perada.simulate import Simulation, prepare

CASES = {
    "perada-no-kd": {"model__dropout": 0.3, "data__augment": "crop"},
    "ditto": {},
    "fedrep": {},
    "fedalt-adapter": {"train__weight_decay": 0.1, "train__clip": 0.5},
    "fedprox": {"train__momentum": 0.9},
    "feddyn": {},
}


def trained(method: str, rounds: int = 3) -> Simulation:
    sim = prepare(small(method__name=method, run__precision="fp64", train__cohort=3, **CASES[method]))
    for _ in range(rounds):
        sim.step()
    return sim


@pytest.mark.parametrize("method", CASES)
def test_a_loop_in_standing_tensors_gives_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of other clients and other numbers of steps; the widths are rounded up to those that are recorded."""
    wanted = trained(method)
    monkeypatch.setattr(replay, "DEVICES", ("cuda", "cpu"))
    found = trained(method)
    loops = list(found.model.__dict__["replays"].values())
    assert 1 <= len(loops) <= 4, "the rounds share them"
    assert len(wanted.model.__dict__.get("replays", {})) == 0
    assert_same_tensors(everything(found), everything(wanted))
    assert found.now.last == wanted.now.last


def test_the_next_round_does_not_change_what_the_last_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    sim = trained("perada-no-kd", 1)
    before = {n: t.clone() for n, t in everything(sim).items()}
    held = sim.now
    sim.step()
    after = {"server": held.server, "broadcast": held.broadcast, "kept": held.kept}
    now = {f"{who}/{n}": t for who, s in after.items() for n, t in {**s.params, **s.buffers}.items()}
    assert_same_tensors(now, before)


def test_flattened_states_are_views_of_two_tensors() -> None:
    state = State({"a": torch.randn(3, 2, 2), "b": torch.randn(3, 5)}, {"m": torch.randn(3, 4)})
    flat = flattened(state)
    assert flat.flat is not None
    assert [t.shape for t in flat.flat] == [(3, 64), (3, 64)], "lanes begin at multiples of 64"
    assert_same_tensors(flat.params, state.params)
    flat.flat[0][1] = 7.0
    assert bool((flat.params["a"][1] == 7).all() and (flat.params["b"][1] == 7).all())
    assert flat.first(2).params["b"].data_ptr() == flat.params["b"].data_ptr()
    assert not bool((state.params["a"] == 7).any())


def test_streamed_batches_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    sim = prepare(small(method__name="fedavg", data__resident="no"))
    sim.step()
    assert not sim.model.__dict__.get("replays")
