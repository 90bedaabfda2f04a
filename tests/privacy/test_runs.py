"""Whole trainings with differential privacy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from small import SMALL, small

import perada
from perada.client.trainer import Trainer
from perada.config import build, from_tables, resolve
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State, repeat, split, stack, ways
from perada.methods import REGISTRY, FedAvg
from perada.privacy import training
from perada.privacy.mechanism import Mechanism

from .networks import record_all

pytestmark = pytest.mark.filterwarnings("ignore:Privacy.deterministic")
METHODS = ("perada", "perada-no-kd", "ditto", "fedavg", "standalone")
PRIVATE = {"privacy.noise": 1.0, "distill.guard": "none"}
DETERMINISTIC = {**PRIVATE, "privacy.deterministic": True}


def made(rounds: int = 0, **set: object) -> Experiment:
    exp = build(small(**{"privacy__noise": 1.0, "distill__guard": "none", **set}))
    for _ in range(rounds):
        exp.round()
    return exp


def same(a: State, b: State, near: float = 0.0) -> bool:
    pairs = [(t, u) for x, y in ((a.params, b.params), (a.buffers, b.buffers)) for n, t in x.items() for u in (y[n],)]
    return all(torch.allclose(t, u, rtol=near, atol=near) for t, u in pairs)


@pytest.mark.parametrize("method", METHODS)
def test_all_private_methods_train(method):
    exp = made(method__name=method)
    before = exp.now
    exp.round()
    assert not exp.now.last.get("failed")
    changed = exp.now.kept if method == "standalone" else exp.now.broadcast
    old = before.kept if method == "standalone" else before.broadcast
    assert not same(changed, old)
    assert all(t.isfinite().all() for t in changed.tensors())


@pytest.mark.parametrize("method", ["perada", "ditto"])
def test_running_statistics_stay_those_of_the_backbone(method):
    exp = made(2, method__name=method)
    first = exp.model.initial().buffers
    for state in (exp.now.broadcast, exp.now.kept):
        assert state.buffers
        for n, b in state.buffers.items():
            assert torch.allclose(b, first[n].expand_as(b), rtol=1e-6)


def test_two_trainings_differ_unless_they_are_deterministic():
    one, two = made(1), made(1)
    assert not same(one.now.broadcast, two.now.broadcast)
    one, two = (made(1, privacy__deterministic=True) for _ in range(2))
    assert same(one.now.broadcast, two.now.broadcast)
    assert same(one.now.kept, two.now.kept)


@pytest.mark.parametrize("method", ["perada-no-kd", "fedavg"])
def test_lanes_one_by_one_are_those_of_a_cohort(method):
    both = [made(1, method__name=method, privacy__deterministic=True, run__lanes=lanes) for lanes in (1, 4)]
    assert same(*(e.now.broadcast for e in both), near=1e-5)


def test_a_resumed_run_goes_on_exactly(tmp_path):
    settings = {**SMALL, **DETERMINISTIC}
    perada.train("digits", set={**settings, "train.rounds": 1}, out=tmp_path / "a")
    resumed = perada.train("digits", set={**settings, "train.rounds": 2}, out=tmp_path / "a", resume=True)
    whole = perada.train("digits", set={**settings, "train.rounds": 2}, out=tmp_path / "b")
    assert same(resumed.experiment.now.broadcast, whole.experiment.now.broadcast)
    assert same(resumed.experiment.now.kept, whole.experiment.now.kept)
    with pytest.raises(InputError, match=r"another privacy\.noise"):
        perada.train(out=tmp_path / "a", set={"privacy.noise": 2.0}, resume=True)
    opened = perada.load(tmp_path / "a")
    assert opened.config.privacy == perada.Privacy(noise=1.0, deterministic=True)


def test_privacy_cannot_be_added_to_a_run(tmp_path):
    perada.train("digits", set={**SMALL, "train.rounds": 1, "distill.guard": "none"}, out=tmp_path / "a")
    assert "[privacy]" not in (tmp_path / "a" / "config.toml").read_text()
    with pytest.raises(InputError, match=r"another privacy\.noise"):
        perada.train(out=tmp_path / "a", set={"privacy.noise": 1.0}, resume=True)


def test_a_configuration_is_written_and_read():
    config = resolve("digits", {**PRIVATE, "privacy.clip": 0.5})
    assert "[privacy]" in config.toml()
    assert from_tables(config.as_dict()) == config
    assert resolve("digits").privacy == perada.Privacy()


def test_a_deterministic_training_warns():
    lines: list[str] = []
    build(small(privacy__noise=1.0, distill__guard="none", privacy__deterministic=True), say=lines.append)
    assert [x for x in lines if x.startswith("warning: Privacy.deterministic: UNSAFE")]
    exp = made()
    with pytest.warns(UserWarning, match="UNSAFE"):
        Experiment(
            exp.net, exp.federation, perada.methods.FedAvg(), privacy=perada.Privacy(noise=1.0, deterministic=True)
        )


REFUSED = {
    "APFL has no differential privacy": {"method__name": "apfl"},
    "clients send no validation scores: set Distill.guard to none or server": {"distill__guard": "clients"},
    "set Distill.data to public images": {"distill__data": "validation"},
    "set Train.weighting to uniform": {"train__weighting": "samples"},
    "set Drift.prior to uniform or public": {"drift__prior": "shared"},
    "set Train.clip to 0": {"train__clip": 1.0},
    "pretraining with FedAvg": {"model__weights": "fedavg"},
    "Standalone has no Privacy.level=client": {"method__name": "standalone", "privacy__level": "client"},
    "set Train.aggregate to mean": {"train__aggregate": "median", "privacy__level": "client"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_tell_more_is_refused_in_one_line(message):
    with pytest.raises(InputError, match=message) as caught:
        made(**REFUSED[message])
    assert "\n" not in str(caught.value)


def test_a_step_of_a_methods_own_is_refused():
    exp = made()
    trainer = exp.trainer([0])
    with pytest.raises(InputError, match="no differential privacy"):
        trainer.loop((exp.now.broadcast,), lambda gradient, states: states)


@dataclass(frozen=True)
class Twice(FedAvg):
    """Says that it trains privately, and trains more than the ledger knows of."""

    how: str = "again"

    def client_update(self, trainer: Trainer, w: State, kept: State) -> tuple[State, State]:
        start = repeat(w, len(trainer.clients))
        if self.how == "longer":
            return trainer.sgd(start, epochs=3), kept
        if self.how == "two copies":
            return split(trainer.sgd(stack(start, start)), 2)[1], kept
        return trainer.sgd(trainer.sgd(start)), kept


@dataclass(frozen=True)
class Last(FedAvg):
    def finish(self, trainer: Trainer, received: State, kept: State) -> State:
        return trainer.sgd(repeat(received, len(trainer.clients)))


@pytest.mark.parametrize(
    ("how", "why"), [("again", "one training in a round"), ("longer", "not .3."), ("two copies", "not .1, 1.")]
)
def test_training_that_the_ledger_does_not_know_of_is_refused(how, why, monkeypatch):
    exp = made(method__name="fedavg")
    steps, original = [0], Mechanism.__call__

    def counted(self, gradient, *rest):
        steps[0] += len(gradient.batch.lanes)
        return original(self, gradient, *rest)

    monkeypatch.setattr(Mechanism, "__call__", counted)
    exp = Experiment(exp.net, exp.federation, Twice(how), privacy=perada.Privacy(noise=1.0), train=exp.train)
    with pytest.raises(InputError, match=f"differential privacy accounts for .*{why}"):
        exp.round()
    assert steps[0] <= sum(exp.trainer(exp.sampled(0)).steps)


def test_a_private_method_with_a_last_stage_is_refused():
    exp = made(method__name="fedavg")
    with pytest.raises(InputError, match="Last has no last stage, because it is not accounted for"):
        Experiment(exp.net, exp.federation, Last(), privacy=perada.Privacy(noise=1.0), train=exp.train)


def test_recorded_matrices_train_as_others(monkeypatch):
    """A whole round of full models, whose convolutions are recorded, is that with gradients per sample."""
    monkeypatch.setattr(ways, "LEAST", 2.0)  # nothing is worth it
    whole = made(1, method__name="ditto", privacy__deterministic=True, model__backbone="resnet8")
    record_all(monkeypatch)
    short = made(1, method__name="ditto", privacy__deterministic=True, model__backbone="resnet8")
    assert not whole.model.way.recorded
    assert len(short.model.way.recorded) > 5
    assert same(whole.now.broadcast, short.now.broadcast, near=1e-4)
    assert same(whole.now.kept, short.now.kept, near=1e-4)


@pytest.mark.parametrize("how", [{"data.resident": "no"}, {"data.augment": "crop"}, {"model.adapt_from": "layer3"}])
def test_streamed_augmented_and_kept_images(how):
    exp = build(resolve("digits", {**SMALL, **PRIVATE, "method.name": "perada-no-kd", **how}))
    exp.round()
    assert not exp.now.last.get("failed")


def test_methods_say_whether_they_train_privately():
    assert {name for name, made_by in REGISTRY.items() if made_by().parts.private} == set(METHODS)


def test_the_copies_of_a_client_have_keys_of_their_own(monkeypatch):
    """The personal and the local lane of a client draw independently: the accountant composes them as such."""
    seen: list[list[object]] = []
    original = training.randomness_of

    def noted(privacy, device, keys):
        seen.append(list(keys))
        return original(privacy, device, keys)

    monkeypatch.setattr(training, "randomness_of", noted)
    exp = made(2, method__name="ditto", privacy__deterministic=True)
    keys = [key for each in seen for key in each]
    assert len(keys) == 2 * 2 * 2  # rounds, clients of a cohort, copies
    assert len(set(keys)) == len(keys)
    assert {key[2] for key in keys} <= {c.name for c in exp.federation.clients}
