"""Over Flower's messages every method gives, byte for byte, what the simulator gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_tensors

from flower.wire import SITES, World, make_world, run
from perada.config import build
from perada.errors import InputError
from perada.experiment import Experiment
from perada.flower import client
from perada.flower.messages import flat
from perada.lanes import State
from perada.methods import REGISTRY
from perada.models import Backbone, network_of
from perada.runs.folder import RunFolder


def simulated(world: World) -> Experiment:
    sim = build(world.simulated)
    for _ in range(world.settings.config.train.rounds):
        sim.round()
    sim.finish()
    return sim


def assert_same(world: World, path: Path, sim: Experiment) -> None:
    """What the server holds and what every site keeps."""
    saved, _ = RunFolder(path).load()
    assert saved is not None
    assert saved.round == sim.now.round
    assert_same_tensors(flat(saved.server), flat(sim.now.server))
    assert_same_tensors(flat(saved.broadcast), flat(sim.now.broadcast))
    run_id = json.loads((path / "flower.json").read_text())["run"]
    for m, name in enumerate(SITES):
        kept = world.site(name).state.newest(run_id)
        mine = sim.now.kept.map(lambda t, m=m: t[m : m + 1])
        if kept is None:  # it was never sampled
            kept = sim.method.init(sim.model)[2]
        assert_same_tensors(flat(kept), flat(mine if sim.now.kept.lanes else State()))


@pytest.mark.parametrize("method", list(REGISTRY))
def test_every_method_equals_the_simulator(method: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, method__name=method)
    sim = simulated(world)
    path, _ = run(world)
    assert_same(world, path, sim)
    row = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][-1]
    row_of = sim.evaluate(("local", "val"))
    assert row_of is not None
    wanted = row_of.as_dict()
    assert row["local_test"]["per_client"] == pytest.approx(wanted["local_test"]["per_client"])
    assert row["local_val"]["per_client"] == pytest.approx(wanted["local_val"]["per_client"])
    for key in ("round", "bytes_up", "bytes_down", "distilled", "accepted", "distill"):
        assert row[key] == wanted[key], key
    if method != "standalone":  # and there was something to compare
        start = flat(sim.method.init(sim.model)[1])
        assert any(not t.equal(start[n]) for n, t in flat(sim.now.broadcast).items())


def test_everybody_taking_part_weighted_by_samples(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__cohort=0, train__weighting="samples", train__rounds=2)
    sim = simulated(world)
    path, grid = run(world)
    assert_same(world, path, sim)
    said = [c["numbers"]["samples"] for d, _, kind, _, c in grid.log if d == "up" and kind == "train"]
    assert sorted(set(said)) == sorted(float(len(c.train)) for c in sim.federation.clients)


def test_sites_judge_a_student_of_no_steps_too(tmp_path: Path) -> None:
    """With statistics of public images there is one candidate more than snapshots and the plain average."""
    world = make_world(tmp_path, method__name="perada", distill__keep_stats="student", train__rounds=2)
    sim = simulated(world)
    path, _ = run(world)
    assert_same(world, path, sim)
    row = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][-1]
    assert row["distill"] == sim.now.last["distill"]
    assert row["distill"]["guard_steps"][:2] == [0, 0]
    assert all(x is not None for x in row["distill"]["guard_losses"])


def test_a_site_alone_holds_out_what_it_would_in_a_simulation(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    run(world)
    everybody = build(world.simulated).federation
    for m, name in enumerate(SITES):
        (work,) = world.site(name)._work.values()
        for part in ("train", "val", "test"):
            alone, there = getattr(work.federation.clients[0], part), getattr(everybody.clients[m], part)
            assert len(alone)
            assert work.federation.take(alone).equal(everybody.take(there))
            assert work.federation.labels(alone).equal(everybody.labels(there))


LITE = {"model__backbone": "efficientnet_lite0", "model__weights": "package", "model__adapt_from": "stage7"}
LITE |= {"data__normalise": "backbone", "method__name": "perada-no-kd", "train__rounds": 1}


class Bare(Backbone):
    """A backbone at a site that has not installed its weights."""

    def load(self, weights: str) -> Any:
        if weights == "package":
            raise InputError("the ImageNet weights are not installed")
        return super().load(weights)


@pytest.mark.parametrize("installed", [True, False])
def test_an_imagenet_backbone_is_installed_at_the_sites_or_sent_to_them(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, **LITE)
    sim = simulated(world)
    assert sim.federation.mean == network_of("efficientnet_lite0", 10).mean
    if not installed:
        real = client.planned_network
        monkeypatch.setattr(client, "planned_network", lambda *which: Bare(**vars(real(*which))))
    path, grid = run(world)
    assert_same(world, path, sim)
    sent = {(kind, site) for direction, site, kind, *_ in grid.log if direction == "down" and kind == "weights"}
    assert sent == (set() if installed else {("weights", site) for site in SITES})
