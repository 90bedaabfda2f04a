"""PerAda against Algorithm 1, worked out by hand on a model of two parameters; and what it uploads."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_tensors
from small import (
    Pixel,
    everything,
    experiment,
    lanes_of,
    pixel_federation,
    pixel_model,
    pixels,
    small,
    weights_of,
)

from perada.client.trainer import Train, Trainer
from perada.config import Config, build
from perada.experiment import Experiment
from perada.lanes import State, gather, mean
from perada.methods.perada import PerAda

# Two clients of two samples (x, label); a batch of two is all a client has, so every step is known.
A, B = [(2.0, 0), (0.4, 1)], [(2.0, 1), (2.0, 1)]
FEDERATION = pixel_federation([(255, 0), (51, 1)], [(255, 1), (255, 1)])
START = (0.5, 0.75)
ETA, LAM = 0.1, 0.5
PUBLIC = [2.0, 0.8]  # x of the public pixels 255 and 102
ETA_G = 0.1

Vector = list[float]


def softmax(logits: Vector) -> Vector:
    powers = [math.exp(z) for z in logits]
    return [p / sum(powers) for p in powers]


def logits(w: Vector, x: float) -> Vector:
    """The model of two parameters: z_j = (w_j x)²."""
    return [(w[0] * x) ** 2, (w[1] * x) ** 2]


def gradient(w: Vector, data: list[tuple[float, int]]) -> Vector:
    """Of the mean cross-entropy: mean (p_j − [j = y]) · 2 w_j x²."""
    terms = [[(softmax(logits(w, x))[j] - (j == y)) * 2 * w[j] * x * x for j in (0, 1)] for x, y in data]
    return [sum(t[j] for t in terms) / len(terms) for j in (0, 1)]


def personal(v: Vector, w: Vector, data: list[tuple[float, int]], steps: int, eta: float, lam: float) -> Vector:
    """v ← v − η_p (∇L(v) + λ (v − w)), S times."""
    for _ in range(steps):
        g = gradient(v, data)
        v = [v[j] - eta * (g[j] + lam * (v[j] - w[j])) for j in (0, 1)]
    return v


def distilled(w: Vector, theta: list[Vector], steps: int) -> Vector:
    """Adam (0.9, 0.999, 1e-8) with a cosine rate on KL(softmax(mean logits) ‖ softmax(student)), all of PUBLIC."""
    m, s = [0.0, 0.0], [0.0, 0.0]
    for r in range(steps):
        g = [0.0, 0.0]
        for x in PUBLIC:
            teacher = softmax([sum(logits(t, x)[j] for t in theta) / len(theta) for j in (0, 1)])
            student = softmax(logits(w, x))
            g = [g[j] + (student[j] - teacher[j]) * 2 * w[j] * x * x / len(PUBLIC) for j in (0, 1)]
        rate = ETA_G * (1 + math.cos(math.pi * r / steps)) / 2
        for j in (0, 1):
            m[j] = 0.9 * m[j] + 0.1 * g[j]
            s[j] = 0.999 * s[j] + 0.001 * g[j] ** 2
            hat = m[j] / (1 - 0.9 ** (r + 1)) / (math.sqrt(s[j] / (1 - 0.999 ** (r + 1))) + 1e-8)
            w = [w[i] - rate * hat if i == j else w[i] for i in (0, 1)]
    return w


def by_hand(rounds: int, steps: int = 2, personal_steps: int = 2, eta_p: float = ETA, kd: int = 0) -> dict[str, Any]:
    """Algorithm 1 in plain numbers, both clients in every round."""
    w, v, theta = list(START), [list(START), list(START)], [[0.0], [0.0]]
    for _ in range(rounds):
        v = [personal(v[m], w, data, personal_steps, eta_p, LAM) for m, data in enumerate((A, B))]
        theta = [personal(list(w), w, data, steps, ETA, 0.0) for data in (A, B)]
        w = [(theta[0][j] + theta[1][j]) / 2 for j in (0, 1)]
        w = distilled(w, theta, kd)
    return {"w": w, "v": v, "theta": theta}


def config(method: str = "perada-no-kd", **set: Any) -> Config:
    settings = {
        "method__name": method,
        "method__lam": LAM,
        "train__epochs": 2,
        "train__batch": 2,
        "train__lr": ETA,
        "distill__steps": 2,
        "distill__lr": ETA_G,
        "distill__guard": "none",
        "run__precision": "fp64",
        **set,
    }
    return small(**settings)


def simulation(config: Config) -> Experiment:
    return experiment(Pixel(START, power=2), FEDERATION, config, public=pixels(255, 102))


def close(found: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-12) -> bool:
    return bool(np.allclose(found, wanted, rtol=0, atol=tolerance))


def test_the_first_step_of_one_client_with_pen_and_paper() -> None:
    """Client A at w = (½, ¾). At x = 2 the logits are (1, 2.25), p₀ = 1/(1 + e^1.25) = 0.2227, label 0; at
    x = 0.4 they are (0.04, 0.09), p₀ = 1/(1 + e^0.05) = 0.4875, label 1. So
    g₀ = ½ [(0.2227 − 1) · 2 · ½ · 4 + 0.4875 · 2 · ½ · 0.16] = −1.5156 and θ₀ = ½ + 0.1 · 1.5156 = 0.65156;
    g₁ = ½ [0.7773 · 2 · ¾ · 4 − 0.4875 · 2 · ¾ · 0.16] = 2.2734 and θ₁ = ¾ − 0.22734 = 0.52266.
    """
    theta, _ = PerAda().client_update(trainer([0], lr=ETA), lanes_of(START), lanes_of(START))
    assert close(weights_of(theta), [[0.65156, 0.52266]], 1e-5)


def test_one_round_is_algorithm_1_by_hand() -> None:
    sim = simulation(config())
    sim.round()
    assert close(weights_of(sim.now.kept), [[0.730733471918, 0.464437840095], [0.389204704310, 0.933212007555]])
    # mean of θ_A = (0.738311469488, 0.453070843740) and θ_B = (0.384750701533, 0.939893011720)
    assert close(weights_of(sim.now.server), [[0.561531085511, 0.696481927730]])
    assert close(weights_of(sim.now.broadcast), weights_of(sim.now.server), 0.0)


def test_two_rounds_are_algorithm_1_by_hand() -> None:
    """In the second round v starts where it was left, away from w: the pull acts from the first step on."""
    sim = simulation(config())
    sim.round()
    sim.round()
    assert close(weights_of(sim.now.kept), [[0.812550888294, 0.427718624037], [0.377275108901, 0.980622339953]])
    assert close(weights_of(sim.now.server), [[0.582469482178, 0.701316810587]])


def test_a_distilled_round_and_the_next_one_by_hand() -> None:
    """The student leaves the mean (0.5615, 0.6965) for the softmax of the teachers' mean logits; the next
    round's v is pulled towards the distilled w and its θ starts there."""
    sim = simulation(config("perada"))
    sim.round()
    assert close(weights_of(sim.now.broadcast), [[0.491815718122, 0.764160454576]])
    sim.round()
    assert close(weights_of(sim.now.kept), [[0.806980645050, 0.433320255008], [0.371040083576, 0.986203493099]])
    assert close(weights_of(sim.now.broadcast), [[0.489799182831, 0.766643579424]])


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("kd", [0, 2])
def test_rounds_equal_a_plain_loop(rounds: int, kd: int) -> None:
    wanted = by_hand(rounds, kd=kd)
    sim = simulation(config("perada" if kd else "perada-no-kd"))
    for _ in range(rounds):
        sim.round()
    assert close(weights_of(sim.now.kept), wanted["v"])
    assert close(weights_of(sim.now.server), [wanted["w"]])


def test_personal_steps_and_rate_may_differ_from_the_local_ones() -> None:
    wanted = by_hand(2, personal_steps=3, eta_p=0.1)
    sim = simulation(config(method__personal_epochs=3, method__personal_lr=0.1))
    sim.round()
    sim.round()
    assert close(weights_of(sim.now.kept), wanted["v"])
    assert close(weights_of(sim.now.server), [wanted["w"]])


def trainer(clients: list[int], **options: Any) -> Trainer:
    return Trainer(
        pixel_model(*START, power=2), FEDERATION, clients, 0, 0, Train(**{"epochs": 1, "batch": 2, **options})
    )


def test_the_pull_is_lambda_and_not_twice_lambda() -> None:
    """v₊(λ) − v₊(0) = −η λ (v − w) exactly: the gradient of λ/2 ‖v − w‖², not of λ ‖v − w‖²."""
    w, v = lanes_of(START), lanes_of([1.0, -1.0])
    moved = [weights_of(PerAda(lam=lam).client_update(trainer([0], lr=0.1), w, v)[1])[0] for lam in (0.0, 0.7)]
    wanted = [-0.1 * 0.7 * (1.0 - 0.5), -0.1 * 0.7 * (-1.0 - 0.75)]  # −0.035 and 0.1225
    assert close([[moved[1][j] - moved[0][j] for j in (0, 1)]], [wanted])


def test_the_local_adapter_starts_from_w_and_feels_no_pull() -> None:
    w, v = lanes_of(START), lanes_of([1.0, -1.0], [3.0, 2.0])
    theta, _ = PerAda(lam=0.7).client_update(trainer([0, 1], lr=0.1), w, v)
    assert close(weights_of(theta), [personal(list(START), [0.0, 0.0], data, 1, 0.1, 0.0) for data in (A, B)])


def test_the_server_takes_the_plain_mean_unless_asked_to_weigh() -> None:
    unequal = pixel_federation([(255, 0), (51, 1)], [(255, 1)] * 6)
    found = {}
    for weighting in ("uniform", "samples"):
        made = config(train__weighting=weighting, train__epochs=1)
        sim = experiment(Pixel(START, power=2), unequal, made)
        upload, _ = made.make_method().client_update(sim.trainer([0, 1]), sim.now.broadcast, sim.now.kept)
        sim.round()
        found[weighting] = weights_of(sim.now.server)
        a, b = weights_of(upload)
        share = 0.5 if weighting == "uniform" else 2 / 8
        assert close(found[weighting], [[share * a[j] + (1 - share) * b[j] for j in (0, 1)]])
    assert found["uniform"] != found["samples"]


# What is uploaded, on the real network.


@pytest.fixture(scope="module")
def after_a_round() -> Experiment:
    """A moment in which v, θ and w all differ."""
    sim = build(small(method__name="perada-no-kd", train__cohort=4))
    sim.round()
    return sim


def update(sim: Experiment, lam: float = 1.0, kept: State | None = None) -> tuple[State, State]:
    method = PerAda(lam=lam)
    return method.client_update(sim.trainer(range(4)), sim.now.broadcast, sim.now.kept if kept is None else kept)


def test_an_upload_is_the_shared_group_and_nothing_else(after_a_round: Experiment) -> None:
    upload, kept = update(after_a_round)
    group = after_a_round.model.group(PerAda().parts.shares or "")
    assert upload.params.keys() == group.params
    assert upload.buffers.keys() == group.buffers
    assert upload.lanes == kept.lanes == 4
    sizes = {n: t[0].numel() for n, t in upload.params.items()}
    assert sum(sizes.values()) == upload.parameters_per_lane() == 12330


def test_personal_adapters_are_never_in_an_upload(after_a_round: Experiment) -> None:
    """By value: no tensor that training moves equals a personal one, of this client or of another."""
    upload, kept = update(after_a_round)
    inert = after_a_round.model.inert
    moved = [n for n in upload.params if n not in inert] + list(upload.buffers)
    assert len(moved) > 50
    for name in moved:
        theta, v = ({**s.params, **s.buffers}[name] for s in (upload, kept))
        shared = [(a, b) for a in range(4) for b in range(4) if torch.equal(theta[a], v[b])]
        assert not shared, f"{name}: upload {shared[0][0]} is personal adapter {shared[0][1]}"


def test_lambda_changes_the_personal_adapters_and_no_bit_of_the_upload(after_a_round: Experiment) -> None:
    (theta_a, v_a), (theta_b, v_b) = update(after_a_round, 0.1), update(after_a_round, 10.0)
    assert_same_tensors(theta_a.params, theta_b.params)
    assert_same_tensors(theta_a.buffers, theta_b.buffers)
    assert not torch.equal(v_a.params["fc.weight"], v_b.params["fc.weight"])


def test_an_upload_does_not_depend_on_the_personal_adapters(after_a_round: Experiment) -> None:
    """Whatever a client keeps, the server receives the same bits: nothing personal can leak through θ."""
    other = after_a_round.now.kept.map(lambda t: t * 1.5 + 0.1)
    (theta, v), (theta_other, v_other) = update(after_a_round), update(after_a_round, kept=other)
    assert_same_tensors(theta.params, theta_other.params)
    assert_same_tensors(theta.buffers, theta_other.buffers)
    assert not torch.equal(v.params["fc.weight"], v_other.params["fc.weight"])


def test_a_serialised_upload_holds_no_personal_adapter(after_a_round: Experiment) -> None:
    """θ and v are trained in one tensor; a view of it carries the whole of it through torch.save and pickle."""
    upload, kept = update(after_a_round)
    sent = io.BytesIO()
    torch.save({**upload.params, **upload.buffers}, sent)
    secret = kept.params["fc.weight"][0].numpy().tobytes()
    assert upload.params["fc.weight"][0].numpy().tobytes() in sent.getvalue()
    assert secret not in sent.getvalue()


def test_a_round_leaves_the_moment_before_it_untouched() -> None:
    """A round is all or nothing: an interruption in the middle of one must find the last one whole."""
    sim = build(small(method__name="perada-no-kd"))
    before = everything(sim)
    held = {n: t.clone() for n, t in before.items()}
    sim.round()
    assert_same_tensors(held, before)


def test_clients_that_were_not_sampled_keep_their_adapter() -> None:
    sim = build(small(method__name="perada-no-kd"))
    before = sim.now.kept
    sim.round()
    away = [m for m in range(4) if m not in sim.sampled(0)]
    assert len(away) == 2
    assert_same_tensors(gather(before, away).params, gather(sim.now.kept, away).params)
    for name in ("fc.weight", "bn1.running_mean"):
        tensors = {**sim.now.kept.params, **sim.now.kept.buffers}
        assert not torch.equal(tensors[name][sim.sampled(0)[0]], tensors[name][away[0]])


def test_the_whole_model_predicts_with_the_personal_adapter() -> None:
    sim = build(small(method__name="perada-no-kd"))
    sim.round()
    assert_same_tensors(sim.personal().params, sim.now.kept.params)


# Small clients.


def with_few_samples(config: Config, sizes: list[int], val: bool) -> Experiment:
    """The digits run with its first clients cut down to these numbers of training samples."""
    sim = build(config)
    clients = list(sim.federation.clients)
    for m, size in enumerate(sizes):
        held = clients[m].val if val else np.zeros(0, np.int64)
        clients[m] = dataclasses.replace(clients[m], train=clients[m].train[:size], val=held)
    federation = dataclasses.replace(sim.federation, clients=tuple(clients))
    public = getattr(sim.public, "images", None)
    return experiment(sim.net, federation, config, adapter=sim.adapter, public=public)


@pytest.mark.parametrize("method", ["perada", "fedavg", "standalone"])
@pytest.mark.parametrize("batch", [8, 64])
def test_clients_with_one_sample_or_less_than_a_batch_train(method: str, batch: int) -> None:
    """A batch is always full: one image eight times over has no variance, which must not become NaN."""
    sim = with_few_samples(small(method__name=method, train__cohort=4, train__batch=batch), [1, 1, 3, 7], val=True)
    for _ in range(2):
        sim.round()
    assert "failed" not in sim.now.last
    assert [n for n, t in everything(sim).items() if not t.isfinite().all()] == []
    assert math.isfinite(sim.now.last["train_loss"])
    row = sim.evaluate()
    assert all(0 <= v <= 100 for v in row.scores["local_test"].per_client.values())


def test_a_client_of_one_sample_alone_in_its_cohort_trains() -> None:
    sim = with_few_samples(small(train__cohort=1), [1, 1, 1, 1], val=True)
    sim.round()
    assert "failed" not in sim.now.last
    assert [n for n, t in everything(sim).items() if not t.isfinite().all()] == []


def test_one_client_on_its_own_machine_does_what_it_does_in_a_cohort(after_a_round: Experiment) -> None:
    """Deployment is a cohort of one: the same code and, in float64, the same numbers."""
    sim = build(small(method__name="perada-no-kd", run__precision="fp64"))
    method = PerAda()
    upload, kept = method.client_update(sim.trainer(range(4)), sim.now.broadcast, sim.now.kept)
    for m in range(4):
        one, mine = method.client_update(sim.trainer([m]), sim.now.broadcast, gather(sim.now.kept, [m]))
        for a, b in ((upload, one), (kept, mine)):
            for name in a.params:
                size = max(float(b.params[name].norm()), 1e-12)
                assert float((a.params[name][m] - b.params[name][0]).norm()) <= 1e-9 * size, name


def test_the_mean_of_one_upload_is_that_upload(after_a_round: Experiment) -> None:
    upload, _ = update(after_a_round)
    one = gather(upload, [2])
    assert_same_tensors(mean(one).params, one.params)
