"""Scores: many lanes on many images against one plain module at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers import assert_close_norm
from lanes.problems import noisy
from small import lanes_of, pixel_federation, pixel_model, small
from torch import Tensor

import perada.client.scores
from perada.client.scores import Scores, logits_of, logits_on, own_logits, personal_scores, score
from perada.config import build
from perada.data import Client, Federation
from perada.data.corruptions import corrupt
from perada.experiment import Experiment
from perada.lanes import State


@pytest.fixture(scope="module")
def sim() -> Experiment:
    made = build(small(method__name="perada-no-kd", run__precision="fp64"))
    made.now = dataclasses.replace(made.now, kept=noisy(made.now.kept, 0.05))
    return made


def plain(sim: Experiment, k: int, images: Tensor) -> Tensor:
    """One client's model as an ordinary module, on images normalised by hand."""
    net = sim.model.plain(sim.now.kept.map(lambda t: t[k : k + 1]))
    with torch.no_grad():
        return net(((images.double() / 255 - 0.3) / 0.35).repeat(1, 3, 1, 1))


def test_lanes_predict_what_their_plain_modules_predict(sim: Experiment) -> None:
    images = sim.federation.images[:37]
    found = logits_of(sim.model, sim.now.kept, sim.federation, images)
    assert found.shape == (4, 37, 10)
    for k in range(4):
        assert_close_norm(found[k], plain(sim, k, images), 1e-9)


def test_the_size_of_a_chunk_does_not_matter(sim: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eval mode: no image may see its neighbours."""
    index = np.arange(50, 87)
    whole = logits_on(sim.model, sim.now.kept, sim.federation, index)
    for size in (1, 4, 40):
        monkeypatch.setitem(perada.client.scores.CHUNK, "cpu", size)
        assert_close_norm(logits_on(sim.model, sim.now.kept, sim.federation, index), whole, 1e-12)


@pytest.mark.parametrize(
    ("whole", "most", "sizes"),
    [
        (16, 4 * 32, [32, 8]),  # 37 images: two wholes, and five more in a power of two
        (16, 4 * 40, [32, 8]),
        (16, 4 * 5, [4] * 9 + [1]),  # where few are allowed there are never more
        (512, 4 * 64, [64]),
        (512, 4 * 1, [1] * 37),
    ],
)
def test_a_pass_that_is_filled_up_predicts_the_same(
    sim: Experiment, whole: int, most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; of what it was filled up with nothing is seen."""
    index, real, seen = np.arange(50, 87), sim.model.on_all, list[int]()
    wanted = logits_on(sim.model, sim.now.kept, sim.federation, index)
    monkeypatch.setattr(sim.model, "on_all", lambda lanes, x: (seen.append(x.shape[0]), real(lanes, x))[1])
    monkeypatch.setitem(perada.client.scores.WHOLE, "cpu", whole)
    monkeypatch.setitem(perada.client.scores.CHUNK, "cpu", most)
    assert_close_norm(logits_on(sim.model, sim.now.kept, sim.federation, index), wanted, 1e-12)
    assert seen == sizes


def test_own_logits_are_each_lanes_on_its_own_images(sim: Experiment) -> None:
    """Ragged and empty lists included."""
    indices = [np.arange(5), np.arange(100, 111), np.zeros(0, np.int64), np.array([1796])]
    found = own_logits(sim.model, sim.now.kept, sim.federation, indices)
    assert [len(f) for f in found] == [5, 11, 0, 1]
    for k in (0, 1, 3):
        assert_close_norm(found[k], plain(sim, k, sim.federation.images[indices[k]]), 1e-9)


def test_one_lane_serves_every_client(sim: Experiment) -> None:
    indices = [np.arange(5), np.arange(7, 9)]
    found = own_logits(sim.model, sim.now.kept.map(lambda t: t[:1]), sim.federation, indices)
    assert_close_norm(found[1], plain(sim, 0, sim.federation.images[7:9]), 1e-9)


@pytest.mark.parametrize("lanes", [1, 4])
def test_clients_without_images_have_no_logits(sim: Experiment, lanes: int) -> None:
    """One client without validation data, and nobody with any."""
    state = sim.now.kept.map(lambda t: t[:lanes])
    none = np.zeros(0, np.int64)
    for indices in ([np.arange(3), none, np.arange(2), none], [none] * 4):
        assert [len(f) for f in own_logits(sim.model, state, sim.federation, indices)] == [len(i) for i in indices]


def test_accuracy_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 1.0]])
    assert score(logits, torch.tensor([0, 1, 1, 1])) == 75.0
    assert score(logits[:0], torch.tensor([], dtype=torch.int64)) is None


def test_macro_auc_by_hand() -> None:
    """Label 0: positives 0.8, 0.4 against negatives 0.6, 0.1: 3 of 4 pairs in order. Label 1 has one class only."""
    logits = torch.tensor([[0.8, 0.0], [0.4, 0.0], [0.6, 0.0], [0.1, 0.0]])
    targets = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert score(logits, targets) == pytest.approx(75.0)
    assert perada.client.scores.label_areas(logits, targets) == [0.75, None]
    assert score(logits[:, 1:], targets[:, 1:]) is None
    assert score(logits[:0], targets[:0]) is None


def test_scores_pass_over_clients_that_have_none() -> None:
    found = Scores({"a": 80.0, "b": None, "c": 90.0}).as_dict()
    assert (found["mean"], found["std"]) == (85.0, 5.0)
    assert found["per_client"] == {"a": 80.0, "b": None, "c": 90.0}
    assert Scores({"a": None}).as_dict() == {"mean": None, "std": None, "per_client": {"a": None}}


def test_personal_scores_by_plain_modules(sim: Experiment) -> None:
    f = sim.federation
    found = personal_scores(sim.model, sim.now.kept, f)
    pool = np.concatenate([c.test for c in f.clients])
    for k, c in enumerate(f.clients):
        for name, index in (("local_test", c.test), ("local_val", c.val), ("global_test", pool)):
            right = plain(sim, k, f.images[index]).argmax(-1) == f.targets[index]
            assert found[name].per_client[c.name] == pytest.approx(100 * float(right.double().mean())), (k, name)
    assert len(set(found["global_test"].per_client.values())) > 1


@pytest.mark.parametrize("splits", [["local"], ["val"], ["global"], ["local", "global"]])
def test_any_choice_of_splits_gives_the_same_scores(sim: Experiment, splits: list[str]) -> None:
    every = personal_scores(sim.model, sim.now.kept, sim.federation)
    found = personal_scores(sim.model, sim.now.kept, sim.federation, splits)
    names = {"local": "local_test", "val": "local_val", "global": "global_test"}
    assert found == {names[s]: every[names[s]] for s in splits}


def test_a_shared_model_is_scored_on_each_clients_data() -> None:
    """One lane that always says 1; the clients hold different shares of label 1."""
    f = pixel_federation([(255, 1)] * 4, [(255, 0)] * 3 + [(255, 1)])
    clients = tuple(Client(c.name, c.train, c.train[:2], c.train) for c in f.clients)
    f = dataclasses.replace(f, clients=clients)
    found = personal_scores(pixel_model(0.0, 1.0), lanes_of([0.0, 1.0]), f)
    assert found["local_test"].per_client == {"client-00": 100.0, "client-01": 25.0}
    assert found["local_val"].per_client == {"client-00": 100.0, "client-01": 0.0}
    assert found["global_test"].per_client == {"client-00": 62.5, "client-01": 62.5}


def test_a_client_without_data_is_scored_none(sim: Experiment) -> None:
    clients = list(sim.federation.clients)
    none = np.zeros(0, np.int64)
    clients[1] = dataclasses.replace(clients[1], val=none, test=none)
    f = dataclasses.replace(sim.federation, clients=tuple(clients))
    for lanes in (sim.now.kept, sim.now.broadcast):
        found = personal_scores(sim.model, lanes, f)
        assert found["local_test"].per_client["client-01"] is None
        assert found["local_val"].per_client["client-01"] is None
        assert found["global_test"].per_client["client-01"] is not None


def test_multilabel_federations_are_scored_by_auc() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 1, 1), generator=draw, dtype=torch.uint8)
    bright = images.flatten() > 127
    targets = torch.stack([bright, ~bright], 1).float()
    index = np.arange(40)
    f = Federation("labels", images, targets, ("bright", "dark"), (Client("a", index, index, index),), (0.0,), (1.0,))
    assert f.multilabel
    found = personal_scores(pixel_model(0.0, 0.0), lanes_of([1.0, -1.0]), f)
    assert found["local_test"].per_client == {"a": 100.0}
    assert f.label_counts().tolist() == [[int(bright.sum()), int((~bright).sum())]]


def test_evaluation_is_in_eval_mode_and_leaves_statistics_alone(sim: Experiment) -> None:
    before = {n: b.clone() for n, b in sim.now.kept.buffers.items()}
    a, b = (personal_scores(sim.model, sim.now.kept, sim.federation) for _ in range(2))
    assert a == b
    assert all(torch.equal(before[n], sim.now.kept.buffers[n]) for n in before)


def test_the_global_model_is_scored_only_where_there_is_one(sim: Experiment) -> None:
    row = sim.evaluate()
    logits = plain_broadcast(sim)
    pool = sim.federation.test
    right = logits.argmax(-1) == sim.federation.targets[pool]
    assert row is not None
    assert row.global_model == pytest.approx(100 * float(right.double().mean()))
    alone = build(small(method__name="standalone")).evaluate()
    assert alone is not None
    assert not alone.has_global_model
    assert alone.as_dict()["global_model"] is None


def plain_broadcast(sim: Experiment) -> Tensor:
    w: State = sim.now.broadcast
    net = sim.model.plain(w)
    with torch.no_grad():
        return net(((sim.federation.images[sim.federation.test].double() / 255 - 0.3) / 0.35).repeat(1, 3, 1, 1))


def test_shifted_scores_are_those_of_plain_modules_on_shifted_images(sim: Experiment) -> None:
    run = perada.Run.__new__(perada.Run)
    run.__dict__.update(experiment=sim, federation=sim.federation, config=sim.config, data_given=False)
    pool = sim.federation.test
    images = torch.from_numpy(corrupt(sim.federation.images[pool].numpy(), "gaussian_blur", 4))
    found = run.evaluate(["gaussian_blur:4"])["gaussian_blur:4"]
    for k, c in enumerate(sim.federation.clients):
        right = plain(sim, k, images).argmax(-1) == sim.federation.targets[pool]
        assert found.per_client[c.name] == pytest.approx(100 * float(right.double().mean()))


def test_all_severities_are_their_mean(sim: Experiment) -> None:
    run = perada.Run.__new__(perada.Run)
    run.__dict__.update(experiment=sim, federation=sim.federation, config=sim.config, data_given=False)
    each = run.evaluate([f"contrast:{s}" for s in range(1, 6)])
    every = run.evaluate(["contrast"])["contrast"].per_client
    for name, value in every.items():
        assert value == pytest.approx(np.mean([e.per_client[name] for e in each.values()]))
