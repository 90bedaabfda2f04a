"""Running statistics are state: they go where their module's group goes, in every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm
from torch import Tensor

from perada.client.trainer import Trainer
from perada.data.batches import sample_stream
from perada.experiment import Experiment
from perada.lanes import State, gather
from perada.methods import REGISTRY

from .tiny import SIZES, prepared, simulation

ENTRY = {"bn1", "layer1.0.bn1", "layer2.0.bn1"}
LATER = {"layer1.0.bn2", "layer2.0.bn2", "layer2.0.downsample.1"}
ADDED = {f"layer{i}.0.conv{j}.adapter.norm" for i in (1, 2) for j in (1, 2)}
FULL, NONE = ENTRY | LATER, set[str]()

# The norms whose statistics cross the network, and those whose statistics a client keeps.
SHARED_AND_KEPT: dict[str, tuple[set[str], set[str]]] = {
    "standalone": (NONE, FULL),
    "mtl": (FULL, FULL),
    "fedavg-ft": (FULL, NONE),
    "pfedme": (FULL, FULL),
    "apfl": (FULL, {f"{copy}/{n}" for copy in "vw" for n in FULL}),
    "ditto": (FULL, FULL),
    "fedbn": (NONE, FULL),
    "fedalt-input": (LATER, ENTRY),
    "fedsim-input": (LATER, ENTRY),
    "lg-fedavg": (NONE, FULL),
    "fedrep": (FULL, NONE),
    "fedalt-output": (FULL, NONE),
    "fedsim-output": (FULL, NONE),
    "fedalt-adapter": (FULL, ADDED),
    "fedsim-adapter": (FULL, ADDED),
    "perada-no-kd": (FULL | ADDED, FULL | ADDED),
    "perada": (FULL | ADDED, FULL | ADDED),
    "fedavg": (FULL, NONE),
    "fedprox": (FULL, NONE),
    "feddyn": (FULL, NONE),
    "feddf": (FULL, NONE),
    "scaffold": (FULL, NONE),
}


def statistics(norms: set[str]) -> set[str]:
    return {f"{n}.{kind}" for n in norms for kind in ("running_mean", "running_var")}


def upload(sim: Experiment) -> tuple[State, State]:
    """What the next cohort would send and keep, without taking the step."""
    cohort = sim.sampled(sim.now.round)
    return sim.method.client_update(sim.trainer(cohort), sim.now.broadcast, gather(sim.now.kept, cohort))


def different(tensor: Tensor, other: Tensor) -> bool:
    return float((tensor - other).norm()) > 1e-4 * float(other.norm())


def test_every_method_is_listed() -> None:
    assert SHARED_AND_KEPT.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", REGISTRY)
def test_statistics_stand_where_their_group_does(name: str) -> None:
    """By name: in every broadcast, in every upload, at every client, and all of them in what predicts."""
    shared, kept = SHARED_AND_KEPT[name]
    sim = simulation(name, train__epochs=1)
    for _ in range(2):
        assert sim.now.broadcast.buffers.keys() == statistics(shared)
        assert sim.now.kept.buffers.keys() == statistics(kept)
        assert upload(sim)[0].buffers.keys() == statistics(shared)
        assert sim.personal().buffers.keys() == statistics(FULL | (ADDED if sim.method.parts.adapters else NONE))
        sim.round()


@pytest.mark.parametrize("name", [n for n, (shared, _) in SHARED_AND_KEPT.items() if shared])
def test_shared_statistics_are_the_mean_of_what_the_clients_saw(name: str) -> None:
    sim = simulation(name, train__epochs=1)
    sim.round()
    before, (sent, _) = sim.now.broadcast, upload(sim)
    sim.round()
    for n in statistics(SHARED_AND_KEPT[name][0]):
        first, second = sent.buffers[n]
        assert different(first, second), n
        assert_close_norm(sim.now.broadcast.buffers[n][0], (first + second) / 2, 1e-12, n)
        assert different(sim.now.broadcast.buffers[n], before.buffers[n]), n


@pytest.mark.parametrize("name", [n for n, (_, kept) in SHARED_AND_KEPT.items() if kept])
def test_kept_statistics_are_a_clients_own(name: str) -> None:
    """Those who took part differ from each other and from before; for the others nothing has changed, bit for bit."""
    sim = simulation(name, train__epochs=1)
    before = sim.now.kept
    sim.round()
    a, b = sim.sampled(0)
    away = [m for m in range(len(SIZES)) if m not in (a, b)]
    assert len(away) == 2
    for n in statistics(SHARED_AND_KEPT[name][1]):
        now, then = sim.now.kept.buffers[n], before.buffers[n]
        assert different(now[a], now[b]), n
        assert different(now[a], then[a]), n
        assert torch.equal(now[away], then[away]), n


def test_fine_tuning_leaves_every_client_statistics_of_its_own() -> None:
    sim = simulation("fedavg-ft", train__epochs=1)
    sim.round()
    sim.finish()
    assert sim.now.kept.buffers.keys() == statistics(FULL)
    for n, found in sim.now.kept.buffers.items():
        assert all(different(found[m], sim.now.broadcast.buffers[n][0]) for m in range(len(SIZES))), n
        assert different(found[0], found[1]), n


def test_fedbn_keeps_every_statistic_and_shares_the_downsample_affines() -> None:
    sim = simulation("fedbn")
    sim.round()
    shared, kept = sim.now.broadcast, sim.now.kept
    assert {"layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias"} <= shared.params.keys()
    own = {f"{n}.{kind}" for n in FULL - {"layer2.0.downsample.1"} for kind in ("weight", "bias")}
    assert kept.params.keys() == own
    assert shared.buffers == {}
    start = sim.model.initial()
    assert different(shared.params["layer2.0.downsample.1.weight"], start.params["layer2.0.downsample.1.weight"])
    for n, tensor in sim.personal().buffers.items():
        assert torch.equal(tensor, kept.buffers[n]), n


@pytest.mark.parametrize("name", ["mtl", "pfedme", "apfl"])
def test_these_upload_statistics_they_keep_as_well(name: str) -> None:
    """MTL its own model's; pFedMe's w_m has those of its θ; APFL keeps the w_m it sent, and v_m has its own."""
    sent, kept = upload(simulation(name))
    for n, tensor in sent.buffers.items():
        assert torch.equal(tensor, kept.buffers[f"w/{n}" if name == "apfl" else n]), n
        if name == "apfl":
            assert different(tensor, kept.buffers[f"v/{n}"]), n


@pytest.mark.parametrize("name", ["ditto", "perada-no-kd", "perada"])
def test_these_upload_no_statistic_of_the_personal_model(name: str) -> None:
    sim = simulation(name)
    sim.round()
    sent, kept = upload(sim)
    for n, tensor in sent.buffers.items():
        assert different(tensor[0], kept.buffers[n][0]), n
        assert different(tensor[1], kept.buffers[n][1]), n


def test_distillation_keeps_the_mean_of_the_teachers_statistics() -> None:
    """The student sees public images, whose statistics are nobody's; its parameters do move."""
    for name in ("perada", "feddf"):
        sim = simulation(name)
        sent, _ = upload(sim)
        sim.round()
        for n, tensor in sim.now.broadcast.buffers.items():
            assert_close_norm(tensor[0], sent.buffers[n].mean(0), 1e-12, n)
        moved = sim.now.broadcast.params["fc.weight"][0] - sent.params["fc.weight"].mean(0)
        assert float(moved.norm()) > 1e-4


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("fedalt-input", ENTRY),
        ("fedalt-output", NONE),
        ("fedalt-adapter", ADDED),
        ("fedrep", NONE),
    ],
)
def test_statistics_of_a_part_move_only_while_it_is_trained(
    name: str, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of a round's trainings, each listened to: the other part's statistics stay, bit for bit."""
    heard: list[tuple[State, State]] = []
    sgd = Trainer.sgd

    def listen(self: Trainer, lanes: State, **how: Any) -> State:
        heard.append((lanes.map(Tensor.clone), sgd(self, lanes, **how)))
        return heard[-1][1]

    monkeypatch.setattr(Trainer, "sgd", listen)
    sim = simulation(name)
    sim.round()
    every = FULL | (ADDED if name == "fedalt-adapter" else NONE)
    assert len(heard) == 2
    for (before, after), trained in zip(heard, (own, every - own), strict=True):
        assert after.buffers.keys() == statistics(every)
        for n, tensor in after.buffers.items():
            if n in statistics(trained):
                assert all(different(x, y) for x, y in zip(tensor, before.buffers[n], strict=True)), n
            else:
                assert torch.equal(tensor, before.buffers[n]), n


@pytest.mark.parametrize("name", ["fedsim-input", "fedsim-adapter", "fedbn", "lg-fedavg", "fedavg"])
def test_the_first_norms_statistics_by_hand(name: str) -> None:
    """One step of one client, all at once: 0.9 of the old and 0.1 of the batch's, the variance unbiased."""
    sim = simulation(name, train__epochs=1)
    client = 0
    assert SIZES[client] < sim.train.batch
    trainer = sim.trainer([client])
    sent, kept = sim.method.client_update(trainer, sim.now.broadcast, gather(sim.now.kept, [client]))
    found = {**sent.buffers, **kept.buffers}
    start = sim.model.initial()
    held = sim.federation.clients[client]
    batch = sample_stream(held.train, sim.train.batch, sim.options.seed, 0, held.name)
    images = prepared(sim.federation.images[batch])
    y = F.conv2d(images, start.params["conv1.weight"][0], padding=1).transpose(0, 1).flatten(1)
    for kind, value in (("running_mean", y.mean(1)), ("running_var", y.var(1))):
        wanted = 0.9 * start.buffers[f"bn1.{kind}"][0] + 0.1 * value
        assert_close_norm(found[f"bn1.{kind}"][0], wanted, 1e-12, kind)
