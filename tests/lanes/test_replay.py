"""A loop whose steps could be recorded, run on the CPU: all its tensors stay where they are, and nothing changes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from small import everything, small

from perada.config import build
from perada.data.public import Chunks
from perada.experiment import Experiment
from perada.lanes import Batch, Pull, Result, conv, fold, key_of, mean, ops, replay, sgd
from perada.lanes.state import State, flattened

from .problems import K, Problem, cross_entropy, problem

CASES = {
    "perada-no-kd": {"model__dropout": 0.3, "data__augment": "crop"},
    "ditto": {},
    "fedrep": {},
    "fedalt-adapter": {"train__weight_decay": 0.1, "train__clip": 0.5},
    "fedprox": {"train__momentum": 0.9},
    "feddyn": {},
    "scaffold": {"train__clip": 0.5},
}


def trained(method: str, rounds: int = 3) -> Experiment:
    sim = build(small(method__name=method, run__precision="fp64", train__cohort=3, **CASES[method]))
    for _ in range(rounds):
        sim.round()
    return sim


@pytest.mark.parametrize("method", CASES)
def test_a_loop_in_standing_tensors_gives_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of other clients and other numbers of steps; the widths are rounded up to those that are recorded."""
    wanted = trained(method)
    monkeypatch.setattr(replay, "DEVICES", ("cuda", "cpu"))
    found = trained(method)
    loops = list(found.model.replays.values())
    assert 1 <= len(loops) <= 4, "the rounds share them"
    assert len(wanted.model.replays) == 0
    assert_same_tensors(everything(found), everything(wanted))
    assert found.now.last == wanted.now.last


KERNELS = {
    "perada-no-kd": {"model__dropout": 0.3, "data__augment": "crop", "run__lanes": 3},
    "ditto": {},
    "fedrep": {"train__clip": 0.5, "train__weight_decay": 0.1},
    "pfedme": {"method__inner_steps": 2},
    "scaffold": {},
}


def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every block; test_triton.py has them as they are."""
    from perada.lanes.ops.triton import columns, flat

    monkeypatch.setattr(flat, "_BLOCK", 1 << 17)
    monkeypatch.setattr(columns, "_BLOCK", 1 << 13)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a Linux package")
@pytest.mark.parametrize("method", KERNELS)
def test_the_whole_fast_path_in_triton_s_interpreter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, kernels and gradients written in place, for whole rounds: the same as the plain path, to rounding."""
    large_blocks(monkeypatch)
    settings = {
        "run__precision": "fp64",
        "data__val": 0.01,
        "data__test": 0.01,
        "data__server_val": 0.97,
        **KERNELS[method],
    }

    def one_round() -> Experiment:
        sim = build(small(method__name=method, **settings))
        sim.round()
        return sim

    wanted = everything(one_round())
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    monkeypatch.setattr(conv, "choose", lambda *shape: "columns")  # where all of a model is trained
    found = one_round()
    assert found.model.replays
    for name, tensor in everything(found).items():
        assert_close_norm(tensor, wanted[name], 1e-9, what=name)


class Recordable:
    """A problem's batches in the form that can be recorded."""

    def __init__(self, given: Problem) -> None:
        self.given, self.capacity = given, given.images.shape[1]
        self.images = given.images.clone()
        self.keys = torch.tensor([key_of(0, "client", k) for k in range(K)])

    def shape(self) -> str:
        return "always the same"

    def copy_(self, other: Recordable) -> None: ...

    def twin(self) -> Recordable:
        return self

    def __call__(self, step: int | torch.Tensor, lanes: torch.Tensor) -> Batch:
        at = torch.as_tensor(step).expand(len(lanes)).clamp(max=self.capacity - 1)
        images, targets, weights = (t[lanes, at] for t in (self.images, self.given.targets, self.given.weights))
        return Batch(images.flatten(0, 1), targets, weights, fold(self.keys[lanes], at))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a Linux package")
@np.errstate(all="ignore")  # the interpreter computes with numpy
@pytest.mark.parametrize("pulled", [False, True])
def test_lanes_that_fail_in_the_fast_path(pulled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with images that are none, one whose step is too long for its numbers: they keep their last finite state, and
    the others do not notice. With a centre that is none all fail."""
    large_blocks(monkeypatch)
    given = problem("resnet8", "adapter", "residual", 0.3, torch.float32)
    centre = mean(given.start).map(lambda t: torch.full_like(t, torch.nan)) if pulled else mean(given.start)
    pull = Pull(centre, [0.5] * K if pulled else [0.0, 0.0, 0.5, 0.5])
    given.images[1, 2, 0] = torch.nan

    def run() -> Result:
        batches, rates = Recordable(given), [3e38, 0.1, 0.05, 0.1]
        return sgd(given.model, given.start, batches, cross_entropy, rates, [2, 4, 1, 3], pull)

    wanted = run()
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    given.model.to("cpu", torch.float32)
    found = run()
    assert given.model.replays
    assert found.failed == wanted.failed == ((0, 1, 2, 3) if pulled else (0, 1))
    assert all(t.isfinite().all() for t in found.state.params.values())
    for name, tensor in found.state.params.items():
        assert_close_norm(tensor, wanted.state.params[name], 1e-5, what=name)


def test_lanes_in_fewer_slots_than_there_are_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four lanes in two slots of four: 8 steps of 2, no slot ever empty; four slots would have had one empty."""
    given, steps = problem("resnet8", "adapter", "residual", 0.3), [3, 8, 2, 3]

    def run() -> Result:
        return sgd(given.model, given.start, Recordable(given), cross_entropy, [0.1, 0.05, 0.1, 0.02], steps)

    wanted = run()
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    found = run()
    assert [len(r.run.finite) for r in given.model.replays.values()] == [4]
    assert given.model.lane_steps == [16, 0]
    for name, tensor in {**found.state.params, **found.state.buffers}.items():
        assert_close_norm(tensor, {**wanted.state.params, **wanted.state.buffers}[name], 1e-12, what=name)
    assert_close_norm(found.trace.nan_to_num(), wanted.trace.nan_to_num(), 1e-12, what="losses")


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_lanes_that_take_turns_train_as_if_alone(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained("perada-no-kd")
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    sim = build(
        small(
            method__name="perada-no-kd",
            run__precision="fp64",
            train__cohort=3,
            run__lanes=slots,
            **CASES["perada-no-kd"],
        )
    )
    for _ in range(3):
        sim.round()
    assert all(len(r.run.finite) == slots for r in sim.model.replays.values())
    other = everything(wanted)
    for name, tensor in everything(sim).items():
        assert_close_norm(tensor, other[name], 1e-9, what=name)
    assert sim.now.last["train_loss"] == pytest.approx(wanted.now.last["train_loss"])


def test_the_next_round_does_not_change_what_the_last_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    sim = trained("perada-no-kd", 1)
    before = {n: t.clone() for n, t in everything(sim).items()}
    held = sim.now
    sim.round()
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
    sim = build(small(method__name="fedavg", data__resident="no"))
    sim.round()
    assert not sim.model.replays


def test_public_images_kept_behind_the_first_layer_distil_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do steps of distillation that could be recorded."""

    def distilled(stems: bool) -> Experiment:
        sim = build(small(method__name="perada", run__precision="fp64", distill__guard="none"))
        assert isinstance(sim.public, Chunks)
        if stems:
            sim.public.keep(sim.model, 0)
            assert sim.public.stems is None, "no room"
            sim.public.keep(sim.model, 1 << 30)
            assert sim.public.stems is not None
            assert sim.public[0].shape[1] == 16
        sim.round()
        return sim

    wanted = distilled(stems=False)
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    found = distilled(stems=True)
    assert len(found.model.replays) == 2
    for name, tensor in everything(found).items():
        assert_close_norm(tensor, everything(wanted)[name], 1e-9, what=name)


def test_a_recorded_step_of_distillation_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels, too: a GPU without Triton records its steps all the same, and there reading fails."""
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    real = replay.Replay._one

    def one(self: replay.Replay, width: int) -> None:
        def refuse(tensor: torch.Tensor) -> int:
            raise AssertionError("a number was read")

        with pytest.MonkeyPatch.context() as patch:
            for name in ("__int__", "__float__", "__bool__", "item", "tolist"):
                patch.setattr(torch.Tensor, name, refuse)
            real(self, width)

    monkeypatch.setattr(replay.Replay, "_one", one)
    more = {"distill__pull": 0.5, "distill__weight_decay": 0.1}
    sim = build(small(method__name="perada", run__precision="fp64", **more))
    sim.round()
    assert sim.now.last["distill"]["kl_last"] > 0


def test_only_the_last_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose runs come and go would otherwise fill the memory."""
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(replay, "KEPT", 2)
    sim = build(small(method__name="fedrep", run__precision="fp64", train__cohort=3))
    sim.round()
    first = list(sim.model.replays.values())
    assert len(first) == 2
    sim.round()
    assert list(sim.model.replays.values()) == first, "the same two, in the same order of use"
    sim.cohort.lanes = 2  # type: ignore[union-attr]
    sim.round()
    assert len(sim.model.replays) == 2
    assert not set(map(id, sim.model.replays.values())) & set(map(id, first))


@pytest.mark.parametrize("kernels", [False, True])
def test_pull_and_weight_decay_of_a_recorded_distillation(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels and without, as the plain path has them. Two rounds: the second one's centre is written over the
    first one's, in the tensors that stand."""
    settings = {"data__val": 0.01, "data__test": 0.01, "data__server_val": 0.97, "distill__lr": 0.01}
    settings |= {"distill__guard": "none", "distill__steps": 2}
    held = {"distill__pull": 0.5, "distill__weight_decay": 0.1}

    def distilled(**more: float) -> dict[str, torch.Tensor]:
        sim = build(small(method__name="perada", run__precision="fp64", **settings, **more))
        for _ in range(2):
            sim.round()
        assert bool(sim.model.replays) == ("cpu" in replay.DEVICES)
        return everything(sim)

    wanted, without = distilled(**held), distilled()
    assert any(float((wanted[n] - t).norm()) > 1e-4 * float(t.norm()) for n, t in without.items()), "they do something"
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    if kernels:
        pytest.importorskip("perada.lanes.ops.triton.flat", reason="Triton is a Linux package")
        large_blocks(monkeypatch)
        monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    for name, tensor in distilled(**held).items():
        assert_close_norm(tensor, wanted[name], 1e-9, what=name)


def test_recorded_distillation_goes_on_through_the_chunks_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps a round over eight chunks: three rounds use six of them, in one recording."""

    def run() -> Experiment:
        few = {"distill__steps": 2, "distill__size": 128, "distill__guard": "none", "run__precision": "fp64"}
        sim = build(small(method__name="perada", **few))
        assert len(sim.public) == 8
        for _ in range(3):
            sim.round()
        return sim

    wanted = everything(run())
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    found = run()
    assert found.model.replays
    for name, tensor in everything(found).items():
        assert_close_norm(tensor, wanted[name], 1e-9, what=name)
