"""Differential privacy of whole clients, at the server."""

from __future__ import annotations

import pytest
import torch
from small import small

from perada.config import build
from perada.lanes import State
from perada.privacy import Privacy
from perada.privacy.randomness import Secret
from perada.server.private import ClientPrivacy, private_mean

pytestmark = pytest.mark.filterwarnings("ignore:Privacy.deterministic")
CPU = torch.device("cpu")


def mean(uploads: State, broadcast: State, noise: float, clip: float, cohort: int) -> State:
    return private_mean(uploads, broadcast, Privacy("client", noise, clip), cohort, Secret(CPU), {"inert"})


def states(many: int, numbers: int) -> tuple[State, State]:
    torch.manual_seed(0)
    one = State({"w": torch.randn(1, numbers), "inert": torch.ones(1, 2)}, {"running_mean": torch.zeros(1, 3)})
    params = {"w": one.params["w"] + 0.01 * torch.randn(many, numbers), "inert": torch.ones(many, 2)}
    return State(params, {"running_mean": torch.randn(many, 3)}), one


def test_without_noise_and_clipping_it_is_the_mean():
    uploads, broadcast = states(4, 10)
    found = mean(uploads, broadcast, 0.0, 1e6, 4)
    torch.testing.assert_close(found.params["w"], uploads.params["w"].mean(0, keepdim=True))
    assert found.buffers["running_mean"].equal(broadcast.buffers["running_mean"])
    assert found.params["inert"].equal(broadcast.params["inert"])


@pytest.mark.parametrize("by", [1.0, 1e6, torch.inf])
def test_one_client_moves_it_by_at_most_the_bound(by):
    uploads, broadcast = states(4, 10)
    others = mean(uploads.map(lambda t: t[:3]), broadcast, 0.0, 0.2, 4)
    uploads.params["w"][3] *= by
    found = mean(uploads, broadcast, 0.0, 0.2, 4)
    assert float((found.params["w"] - others.params["w"]).norm()) <= 0.2 / 4 * 1.001


def test_noise_has_the_variance_that_was_asked_for_even_of_nobody():
    uploads, broadcast = states(3, 100_000)
    none = State()
    for sent, base in ((uploads, mean(uploads, broadcast, 0.0, 0.5, 8)), (none, broadcast)):
        moved = mean(sent, broadcast, 2.0, 0.5, 8).params["w"] - base.params["w"]
        assert abs(float(moved.var()) / (2.0 * 0.5 / 8) ** 2 - 1) < 0.02


def test_clients_are_drawn_independently():
    private = ClientPrivacy(Privacy("client", 1.0), 4, 0)
    drawn = [private.sampled(10, r) for r in range(2000)]
    assert abs(sum(map(len, drawn)) / 2000 - 4) < 0.15
    assert {len(d) for d in drawn} >= set(range(1, 8))
    assert private.sampled(10, 1999) == drawn[-1]
    assert ClientPrivacy(Privacy("client", 1.0), 0, 0).sampled(3, 0) == [0, 1, 2]


@pytest.mark.parametrize("method", ["perada", "ditto", "fedavg"])
def test_trainings_go_through_rounds_without_clients(method):
    settings = {"privacy__noise": 0.1, "privacy__level": "client", "distill__guard": "none", "train__cohort": 1}
    exp = build(small(method__name=method, train__rounds=4, **settings))
    exp.client_privacy._drawn = {0: []}
    before = exp.now.broadcast
    exp.round()
    name = next(n for n in before.params if n not in exp.model.inert)
    assert not exp.now.broadcast.params[name].equal(before.params[name])
    assert exp.now.counters["bytes_up"] == 0
    rows = list(exp.rounds())
    assert rows[-1].round == 4
    for n, b in exp.now.broadcast.buffers.items():
        assert torch.allclose(b, before.buffers[n], rtol=1e-6) or method == "perada"


def test_a_deterministic_training_can_be_repeated():
    settings = {"privacy__noise": 0.1, "privacy__level": "client", "distill__guard": "none"}
    found = []
    for _ in range(2):
        exp = build(small(method__name="fedavg", privacy__deterministic=True, **settings))
        exp.round()
        found.append(exp.now.broadcast)
    assert all(a.equal(b) for a, b in zip(found[0].tensors(), found[1].tensors(), strict=True))
