"""Methods that must coincide at the edge of their settings, in float64; and FedDyn on quadratics, by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from small import Pixel, experiment, pixel_federation, small, weights_of
from torch import Tensor, nn

import perada
from perada.config import build
from perada.data.batches import ClientBatches, steps_of
from perada.experiment import Experiment
from perada.lanes import State, gather, part
from perada.methods import REGISTRY, Method
from perada.methods.apfl import APFL
from perada.methods.ditto import Ditto
from perada.methods.fedalt import FedAlt
from perada.methods.fedavg import FedAvg
from perada.methods.fedavg_ft import FedAvgFT
from perada.methods.fedbn import FedBN
from perada.methods.feddf import FedDF
from perada.methods.feddyn import FedDyn
from perada.methods.fedprox import FedProx
from perada.methods.fedrep import FedRep
from perada.methods.fedsim import FedSim
from perada.methods.lg_fedavg import LGFedAvg
from perada.methods.mtl import MTL
from perada.methods.pfedme import PFedMe
from perada.methods.scaffold import Scaffold
from perada.methods.standalone import Standalone
from perada.models.resnet import resnet

ROUNDS = 3
# Four clients of different sizes, two a round, two epochs: several steps, and clients that return or stay away.
SETTINGS: dict[str, Any] = {
    "run__precision": "fp64",
    "train__rounds": ROUNDS,
    "train__epochs": 2,
    "data__server_val": 0.955,
    "data__val": 0.02,
    "data__test": 0.02,
    "distill__steps": 0,
    "distill__guard": "none",
}


def assert_close_states(found: State, wanted: State, tol: float = 1e-9) -> None:
    """The same names, and every lane of every tensor within `tol` of its norm: parameters and buffers."""
    assert found.params.keys() == wanted.params.keys()
    assert found.buffers.keys() == wanted.buffers.keys()
    assert found.lanes == wanted.lanes > 0
    a, b = ({**s.params, **s.buffers} for s in (found, wanted))
    for name, k in itertools.product(b, range(wanted.lanes)):
        assert_close_norm(a[name][k], b[name][k], tol, f"{name}, lane {k}")


def gap(a: State, b: State) -> float:
    """The largest norm-relative difference between two states of the same names."""
    pairs = [(p, b.params[n]) for n, p in a.params.items()]
    return max(float((x - y).norm() / y.norm().clamp_min(1e-12)) for x, y in pairs)


@dataclasses.dataclass
class Log:
    """What every round of a run left behind."""

    sim: Experiment
    cohorts: list[list[int]]
    uploads: list[State]
    broadcasts: list[State]
    personal: list[State]


Told = Callable[[Method], Log]


@pytest.fixture(scope="module")
def ready() -> Experiment:
    """Data and network; every method gets an experiment of its own."""
    return build(small(method__name="fedavg", **SETTINGS))


@pytest.fixture(scope="module")
def told(ready: Experiment) -> Told:
    """Three rounds of a method, remembered: the oracles are asked for often."""
    return lru_cache(lambda method: recorded(of(ready, method)))


def of(ready: Experiment, method: Method, net: nn.Module | None = None) -> Experiment:
    """The same data, network and settings with another method, or another network too."""
    return experiment(net or ready.net, ready.federation, ready.config, method)


def recorded(sim: Experiment) -> Log:
    """Rounds as the simulator runs them; the uploads are picked up where it checks them."""
    log = Log(sim, [], [], [], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perada.client.cohort.check_upload", lambda method, model, upload: log.uploads.append(upload))
        for _ in range(ROUNDS):
            log.cohorts.append(sim.sampled(sim.now.round))
            sim.round()
            log.broadcasts.append(sim.now.broadcast)
            log.personal.append(sim.personal())
    return log


def test_the_runs_below_are_of_partial_participation(told: Told) -> None:
    """A client comes twice, one is missing in the last round, sizes differ, and training goes somewhere."""
    run = told(FedAvg())
    often = [c for cohort in run.cohorts for c in cohort]
    assert [len(c) for c in run.cohorts] == [2] * ROUNDS
    assert max(map(often.count, often)) > 1
    assert set(often) - set(run.cohorts[-1])
    sizes = [len(c.train) for c in run.sim.federation.clients]
    assert len({steps_of(n, 8, 2) for n in sizes}) > 1
    assert gap(run.sim.model.initial(), run.broadcasts[-1]) > 0.01
    assert len(run.broadcasts[-1].buffers) > 10


AS_FEDAVG: dict[str, Method] = {
    "fedprox, mu=0": FedProx(mu=0.0),
    "ditto": Ditto(lam=3.0),
    "ditto, lam=0": Ditto(lam=0.0),
    "apfl, alpha=0": APFL(alpha=0.0),
    "apfl": APFL(alpha=0.7),
    "apfl, adaptive": APFL(alpha=0.7, adaptive=True),
    "fedalt, nothing personal": FedAlt(own=None),
    "fedsim, nothing personal": FedSim(own=None),
    "feddf, distill.steps=0": FedDF(),
    "fedavg-ft before its end": FedAvgFT(personal_lr=0.5, personal_epochs=3),
    "pfedme, K=1, eta·lam=1": PFedMe(lam=4.0, inner_steps=1, eta=0.25, beta=1.0),
}


@pytest.mark.parametrize("name", AS_FEDAVG)
def test_these_send_and_average_what_fedavg_does(name: str, told: Told) -> None:
    """pFedMe: θ starts at w, so its first inner step feels no pull and is one of SGD; ηλ = 1 puts θ in w's place."""
    found, wanted = told(AS_FEDAVG[name]), told(FedAvg())
    for r in range(ROUNDS):
        assert_close_states(found.uploads[r], wanted.uploads[r])
        assert_close_states(found.broadcasts[r], wanted.broadcasts[r])


NOT_FEDAVG: dict[str, Method] = {
    "fedprox": FedProx(mu=0.1),
    "mtl": MTL(lam=0.1),
    "feddyn": FedDyn(),
    "scaffold": Scaffold(),
    "pfedme, eta·lam=0.5": PFedMe(lam=1.0, inner_steps=1, eta=0.5),
    "pfedme, K=2": PFedMe(lam=4.0, inner_steps=2, eta=0.25),
}


@pytest.mark.parametrize("name", NOT_FEDAVG)
def test_these_do_not(name: str, told: Told) -> None:
    assert gap(told(FedAvg()).broadcasts[-1], told(NOT_FEDAVG[name]).broadcasts[-1]) > 1e-5


@pytest.mark.parametrize("method", [Ditto(lam=0.0), APFL(alpha=1.0), MTL(lam=0.0)], ids=repr)
def test_without_a_tie_to_the_others_the_personal_model_is_standalones(method: Method, told: Told) -> None:
    found, wanted = told(method), told(Standalone())
    for r in range(ROUNDS):
        assert_close_states(found.personal[r], wanted.personal[r])


@pytest.mark.parametrize("method", [Ditto(lam=0.1), APFL(alpha=0.9), MTL(lam=0.1)], ids=repr)
def test_with_a_tie_it_is_not(method: Method, told: Told) -> None:
    assert gap(told(method).personal[-1], told(Standalone()).personal[-1]) > 1e-5


def test_mtl_uploads_the_personal_models_and_broadcasts_their_mean(told: Told) -> None:
    run = told(MTL(lam=0.1))
    assert_same_tensors(run.uploads[-1].params, gather(run.personal[-1], run.cohorts[-1]).params)
    middle = run.uploads[-1].map(lambda t: (t[:1] + t[1:]) / 2)
    assert_close_states(run.broadcasts[-1], middle)


def test_apfl_without_a_share_of_its_own_is_fedavgs_local_model(told: Told) -> None:
    """α = 0: a client predicts with what it uploaded in its last round, buffers too; before its first, with w."""
    found, wanted = told(APFL(alpha=0.0)), told(FedAvg())
    last = {c: (r, k) for r, cohort in enumerate(wanted.cohorts) for k, c in enumerate(cohort)}
    assert len({r for r, _ in last.values()}) > 1
    for c in range(4):
        local = gather(wanted.uploads[last[c][0]], [last[c][1]]) if c in last else wanted.sim.model.initial()
        assert_close_states(gather(found.personal[-1], [c]), local)


def test_pfedme_that_mixes_nothing_in_leaves_w_as_it_was(told: Told) -> None:
    run = told(PFedMe(beta=0.0))
    start = run.sim.model.initial()
    assert gap(gather(run.uploads[0], [1]), start) > 1e-4
    for w in run.broadcasts:
        assert_same_tensors(w.params, start.params)


def test_pfedmes_beta_is_the_share_of_the_mean(ready: Experiment) -> None:
    """After one round from the same w: w(β) − w = β (w(1) − w), beyond 1 too."""
    found = {}
    for beta in (1.0, 0.25, 1.5):
        sim = of(ready, PFedMe(inner_steps=1, beta=beta))
        start = sim.now.broadcast.params
        sim.round()
        found[beta] = sim.now.broadcast.params
        for name, p in start.items():
            assert_close_norm(found[beta][name], p + beta * (found[1.0][name] - p), 1e-9, name)
    assert float((found[1.0]["fc.weight"] - start["fc.weight"]).norm()) > 1e-3


# SCAFFOLD.


def model_of(state: State) -> State:
    """The model of what SCAFFOLD sends, without control variates."""
    return state.only([n for n in state.params if "/" not in n], state.buffers)


def test_scaffolds_first_round_is_fedavgs(told: Told) -> None:
    """All control variates are zero. Afterwards those of the clients that trained are not."""
    found, wanted = told(Scaffold()), told(FedAvg())
    assert_close_states(model_of(found.uploads[0]), wanted.uploads[0])
    assert_close_states(model_of(found.broadcasts[0]), wanted.broadcasts[0])
    assert gap(model_of(found.broadcasts[1]), wanted.broadcasts[1]) > 1e-5


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_scaffold_with_one_client_is_fedavg(weighting: str) -> None:
    """c and c_m are equal then, so nothing corrects a step."""
    settings = {**SETTINGS, "data__clients": 1, "train__cohort": 1, "train__weighting": weighting}
    found, wanted = (recorded(build(small(method__name=m, **settings))) for m in ("scaffold", "fedavg"))
    for r in range(ROUNDS):
        assert_close_states(model_of(found.broadcasts[r]), wanted.broadcasts[r])
    kept, c = found.sim.now.kept, part(found.broadcasts[-1], "c")
    assert_close_states(kept, c)
    assert float(c.params["fc.weight"].norm()) > 1e-3


def test_scaffolds_server_rate_is_the_share_of_the_mean(ready: Experiment) -> None:
    """After one round from the same x: x(η_g) − x = η_g (x(1) − x). Statistics are the mean's in any case."""
    found = {}
    for rate in (1.0, 0.25, 1.5, 0.0):
        sim = of(ready, Scaffold(server_lr=rate))
        start = model_of(sim.now.broadcast)
        sim.round()
        found[rate] = sim.now.broadcast
        for name, p in start.params.items():
            wanted = p + rate * (found[1.0].params[name] - p)
            assert_close_norm(found[rate].params[name], wanted, 1e-9, name)
        assert_same_tensors(found[rate].buffers, found[1.0].buffers)
        assert_same_tensors(part(found[rate], "c").params, part(found[1.0], "c").params)


def test_scaffolds_server_variate_is_the_mean_of_all_clients(told: Told) -> None:
    """Sampled or not, in every round: c = 1/M Σ c_m, as the paper's c ← c + S/M · mean (c_m⁺ − c_m) keeps it."""
    run = told(Scaffold())
    c, kept = part(run.broadcasts[-1], "c"), run.sim.now.kept
    assert_close_states(c, kept.map(lambda t: t.mean(0, keepdim=True)))
    away = set(range(4)) - {m for cohort in run.cohorts for m in cohort}
    assert all(float(kept.params["fc.weight"][m].norm()) == 0 for m in away)


def test_fedrep_with_as_many_epochs_for_both_is_fedalt_output(told: Told) -> None:
    found, wanted, few = told(FedRep(shared_epochs=2)), told(FedAlt(own="output")), told(FedRep())
    for r in range(ROUNDS):
        assert_close_states(found.broadcasts[r], wanted.broadcasts[r])
        assert_close_states(found.personal[r], wanted.personal[r])
    assert gap(few.personal[-1], wanted.personal[-1]) > 1e-5  # its own default is one epoch for the representation
    assert gap(told(FedSim(own="output")).personal[-1], wanted.personal[-1]) > 1e-5  # one after the other, not at once


def test_lg_fedavg_communicates_the_head_alone(told: Told) -> None:
    run = told(LGFedAvg())
    for state in (*run.uploads, *run.broadcasts):
        assert sorted(state.params) == ["fc.bias", "fc.weight"]
        assert state.buffers == {}
    assert len(run.sim.now.kept.buffers) > 10
    away = [c for c in range(4) if c not in run.cohorts[-1]]
    before, after = (gather(run.personal[r], away) for r in (-2, -1))
    assert gap(after.only(["fc.weight"], ()), before.only(["fc.weight"], ())) > 1e-4  # the head of all is theirs too
    del before.params["fc.weight"], before.params["fc.bias"], after.params["fc.weight"], after.params["fc.bias"]
    assert_same_tensors(after.params, before.params)
    assert_same_tensors(after.buffers, before.buffers)


def test_fedbn_without_batch_norms_is_fedavg(ready: Experiment) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))
    model = perada.adapt(plain, adapter=None, trained="full").to("cpu", torch.float64)
    assert model.group("batch_norm").params == model.group("batch_norm").buffers == frozenset()
    runs = [recorded(of(ready, m, plain)) for m in (FedBN(), FedAvg())]
    for r in range(ROUNDS):
        assert_close_states(runs[0].uploads[r], runs[1].uploads[r])
        assert_close_states(runs[0].personal[r], runs[1].personal[r])
    assert gap(runs[0].broadcasts[-1], model.initial()) > 1e-3


def test_fedbn_with_them_is_not(told: Told) -> None:
    found, wanted = told(FedBN()).personal[-1], told(FedAvg()).broadcasts[-1]
    assert gap(gather(found, [0]), wanted) > 1e-5
    assert not told(FedBN()).broadcasts[-1].buffers


def test_perada_that_does_not_distil_is_perada_without_kd() -> None:
    found, wanted = (recorded(build(small(method__name=m, **SETTINGS))) for m in ("perada", "perada-no-kd"))
    distilled = recorded(build(small(method__name="perada", **{**SETTINGS, "distill__steps": 1})))
    for r in range(ROUNDS):
        assert_close_states(found.uploads[r], wanted.uploads[r])
        assert_close_states(found.broadcasts[r], wanted.broadcasts[r])
        assert_close_states(found.personal[r], wanted.personal[r])
    assert gap(distilled.broadcasts[-1], wanted.broadcasts[-1]) > 1e-6


def test_fine_tuning_at_the_end_is_torchs_own_sgd_from_w(ready: Experiment, told: Told) -> None:
    """Every client, sampled or not, on a plain network with torch's batch norm and optimiser."""
    sim = of(ready, FedAvgFT(personal_epochs=3, personal_lr=0.05))
    for _ in range(ROUNDS):
        sim.round()
    w = sim.now.broadcast
    assert_close_states(sim.personal(), told(FedAvg()).broadcasts[-1])
    sim.finish()
    assert_same_tensors(sim.now.broadcast.params, w.params)
    assert sim.personal().lanes == 4
    for m, client in enumerate(sim.federation.clients):
        steps = steps_of(len(client.train), 8, 3)
        batches = ClientBatches(sim.federation, [m], [steps], 8, sim.options.seed, ROUNDS, torch.float64)
        net = resnet("resnet8", 10).double().train()
        held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        with torch.no_grad():
            for name, t in {**w.params, **w.buffers}.items():
                held[name].copy_(t[0])
        optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(steps):
            batch = batches(step, torch.tensor([0]))
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(batch.images), batch.targets[0]).backward()
            optimiser.step()
        wanted = State(*({n: held[n].detach()[None] for n in names} for names in (w.params, w.buffers)))
        assert_close_states(gather(sim.personal(), [m]), wanted)
        assert gap(w, wanted) > 0.01


# A cohort is its clients, one at a time.


@pytest.mark.parametrize("name", REGISTRY)
def test_a_folded_cohort_is_its_clients_one_at_a_time(name: str) -> None:
    """After a round of all, so that what clients keep differs: the same numbers whoever trains beside a client,
    and however many lanes are trained at once."""
    settings = {**SETTINGS, "train__epochs": 1, "train__cohort": 0}
    sim = build(small(method__name=name, **settings))
    sim.round()
    assert len({len(c.train) for c in sim.federation.clients[:3]}) > 1
    stages = [sim.method.client_update]
    if hasattr(sim.method, "finish"):
        stages.append(lambda *args: (State(), sim.method.finish(*args)))  # type: ignore[attr-defined]
    for stage in stages:
        together = stage(sim.trainer([0, 1, 2]), sim.now.broadcast, gather(sim.now.kept, [0, 1, 2]))
        slow = dataclasses.replace(sim.trainer([0, 1, 2]), lanes_at_once=1)
        others = [([0, 1, 2], stage(slow, sim.now.broadcast, gather(sim.now.kept, [0, 1, 2])))]
        others += [([m], stage(sim.trainer([m]), sim.now.broadcast, gather(sim.now.kept, [m]))) for m in range(3)]
        for clients, found in others:
            for a, b in zip(found, together, strict=True):
                if b.lanes:
                    assert_close_states(a, gather(b, clients))
        told_apart = together[0] if together[0].lanes else together[1]
        assert gap(gather(told_apart, [0]), gather(told_apart, [1])) > 1e-3


# FedDyn on quadratics: client m has L_m(w) = ½ (x w − y)², curvature x², with x = 1, 2, 3 at pixels 85, 170, 255.


def quadratic(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits[..., 0] - targets.to(logits)) ** 2 / 2


def quadratics(monkeypatch: pytest.MonkeyPatch, method: Method, *clients: tuple[int, int], **set: Any) -> Experiment:
    """Clients (x, y), each with that sample twice, at w = 1."""
    monkeypatch.setattr("perada.client.trainer.sample_loss", quadratic)
    pixels = pixel_federation(*[[(85 * x, y)] * 2 for x, y in clients])
    settings = {"train__epochs": 2, "train__batch": 2, "train__lr": 0.1, "train__cohort": 0, "method__name": "fedavg"}
    config = small(run__precision="fp64", **{**settings, **set})
    return experiment(Pixel((1.0,), 1), dataclasses.replace(pixels, std=(1 / 3,), classes=("y",)), config, method)


A, B, C = (1, 0), (2, 6), (3, -3)  # ∇L: w, 4w − 12, 9w + 9; minima 0, 3, −1; the sums' 2.4 (A, B) and 3/14 (all)


def held(sim: Experiment) -> tuple[list[float], float, float]:
    """(g of every client, h, w)."""
    h, w = (weights_of(part(sim.now.server, key))[0][0] for key in ("h", "w"))
    assert weights_of(sim.now.broadcast) == [[w]]
    return [g for (g,) in weights_of(sim.now.kept)], h, w


def test_two_rounds_of_feddyn_with_pen_and_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A and B, η = 0.1, two steps θ ← θ − η (∇L(θ) − g + α (θ − w)) with α = ½, from w = 1, g = 0, h = 0.

    Round 1. A: 1 − 0.1 · 1 = 0.9, then 0.9 − 0.1 (0.9 − 0.05) = 0.815. B: 1 + 0.8 = 1.8, then
    1.8 − 0.1 (−4.8 + 0.4) = 2.24. g_A = −½ (−0.185) = 0.0925, g_B = −½ · 1.24 = −0.62,
    h = −½ · ½ (−0.185 + 1.24) = −0.26375, w = 1.5275 + 0.26375/½ = 2.055.
    Round 2. A: 2.055 − 0.1 (2.055 − 0.0925) = 1.85875, then 1.85875 − 0.1 (1.85875 − 0.0925 − 0.098125) = 1.6919375.
    B: 2.055 − 0.1 (8.22 − 12 + 0.62) = 2.371, then 2.371 − 0.1 (9.484 − 12 + 0.62 + 0.158) = 2.5448.
    g_A = 0.0925 + ½ · 0.3630625 = 0.27403125, g_B = −0.62 − ½ · 0.4898 = −0.8649,
    h = −0.26375 − ¼ (−0.3630625 + 0.4898) = −0.295434375, w = 2.11836875 + 0.59086875 = 2.7092375.
    """
    sim = quadratics(monkeypatch, FedDyn(alpha=0.5), A, B)
    for wanted in (([0.0925, -0.62], -0.26375, 2.055), ([0.27403125, -0.8649], -0.295434375, 2.7092375)):
        sim.round()
        g, h, w = held(sim)
        assert g == pytest.approx(wanted[0], abs=1e-12)
        assert (h, w) == pytest.approx(wanted[1:], abs=1e-12)


def test_a_round_of_feddyn_with_one_client_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """h moves by α/M, M being all clients: −¼ (θ − 1), so w = θ + ½ (θ − 1), with θ as in round 1 above; the
    other client's g stays."""
    sim = quadratics(monkeypatch, FedDyn(alpha=0.5), A, B, train__cohort=1)
    (m,) = sim.sampled(0)
    sim.round()
    theta = (0.815, 2.24)[m]
    wanted = [-0.5 * (theta - 1) if k == m else 0.0 for k in (0, 1)]
    g, h, w = held(sim)
    assert g == pytest.approx(wanted, abs=1e-12)
    assert (h, w) == pytest.approx((-0.25 * (theta - 1), theta + (theta - 1) / 2), abs=1e-12)


def test_two_rounds_of_scaffold_with_pen_and_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A and B, η_l = 0.1, K = 2 steps y ← y − η_l (∇L(y) − c_m + c) from x = 1, c_m = c = 0, η_g = 1.

    Round 1. A: 0.9, 0.81. B: 1.8, then 1.8 − 0.1 (7.2 − 12) = 2.28. c_A = (1 − 0.81) / 0.2 = 0.95,
    c_B = (1 − 2.28) / 0.2 = −6.4, x = 1.545, c = −2.725.
    Round 2. A, c − c_A = −3.675: 1.545 + 0.213 = 1.758, then 1.758 + 0.1917 = 1.9497. B, c − c_B = 3.675:
    1.545 + 0.2145 = 1.7595, then 1.7595 + 0.1287 = 1.8882. c_A = 0.95 + 2.725 − 0.4047 / 0.2 = 1.6515,
    c_B = −6.4 + 2.725 − 0.3432 / 0.2 = −5.391, x = 1.91895, c = −1.86975.
    """
    sim = quadratics(monkeypatch, Scaffold(), A, B)
    for wanted in (([0.95, -6.4], -2.725, 1.545), ([1.6515, -5.391], -1.86975, 1.91895)):
        sim.round()
        (c,), (x,) = weights_of(part(sim.now.broadcast, "c")), weights_of(sim.now.broadcast)
        assert [own for (own,) in weights_of(sim.now.kept)] == pytest.approx(wanted[0], abs=1e-12)
        assert (c[0], x[0]) == pytest.approx(wanted[1:], abs=1e-12)


@pytest.mark.parametrize(("cohort", "rounds"), [(0, 60), (2, 100), (1, 200)])
def test_scaffold_finds_the_minimum_of_the_sum(cohort: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FedDyn does below, where FedAvg comes to rest elsewhere. Then c is 0 and c_m is ∇L_m."""
    sim = quadratics(monkeypatch, Scaffold(), A, B, C, train__epochs=2, train__lr=0.05, train__cohort=cohort)
    for _ in range(rounds):
        sim.round()
    assert abs(weights_of(sim.now.broadcast)[0][0] - 3 / 14) < 1e-5
    assert abs(weights_of(part(sim.now.broadcast, "c"))[0][0]) < 1e-4
    own = [c for (c,) in weights_of(sim.now.kept)]
    assert own == pytest.approx([3 / 14, 4 * 3 / 14 - 12, 9 * 3 / 14 + 9], abs=1e-3)


@pytest.mark.parametrize(("cohort", "rounds"), [(0, 60), (2, 100), (1, 150)])
def test_feddyn_finds_the_minimum_of_the_sum_and_fedavg_does_not(
    cohort: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ∇L = 14 w − 3: the minimum is 3/14. FedAvg of all comes to rest where the local moves
    (1 − (1 − η x²)^E)(w_m* − w) cancel, which is elsewhere where the curvatures differ."""
    settings = {"train__epochs": 5, "train__cohort": cohort}
    sim = quadratics(monkeypatch, FedDyn(alpha=4.0), A, B, C, **settings)
    for _ in range(rounds):
        sim.round()
    assert abs(held(sim)[2] - 3 / 14) < 1e-6
    assert held(sim)[0] == pytest.approx([3 / 14, 4 * 3 / 14 - 12, 9 * 3 / 14 + 9], abs=1e-4)  # g_m = ∇L_m
    if cohort == 0:
        other = quadratics(monkeypatch, FedAvg(), A, B, C, **settings)
        for _ in range(60):
            other.round()
        moves = [1 - (1 - 0.1 * x * x) ** 5 for x, _ in (A, B, C)]
        rest = sum(c * y / x for c, (x, y) in zip(moves, (A, B, C), strict=True)) / sum(moves)
        assert abs(weights_of(other.now.broadcast)[0][0] - rest) < 1e-9
        assert abs(rest - 3 / 14) > 1e-2
