"""Clients whose training stops being finite: left out of the round, named, and put back to where they were."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_tensors
from small import after, everything, plain, small

import perada
from perada.client.cohort import LocalCohort
from perada.config import build
from perada.errors import Diverged
from perada.experiment import Experiment
from perada.lanes import State, gather

CLIENTS = [f"client-{m:02d}" for m in range(4)]


def infected(sim: Experiment, sick: int) -> Experiment:
    """Lets one client's images bring its training to infinity, from the start of every round."""
    method, real = sim.method, type(sim.method).client_update

    def update(trainer: Any, received: State, kept: State) -> tuple[State, State]:
        upload, kept = real(method, trainer, received, kept)
        lane = torch.tensor([c == sick for c in trainer.clients])
        for tensor in (*upload.tensors(), *kept.tensors()):
            tensor[lane] = 1e30  # where it was before the step that was not finite
        trainer._done[-1].finite[-len(lane) :][lane] = False
        return upload, kept

    object.__setattr__(sim.method, "client_update", update)
    return sim


@pytest.mark.parametrize("method", ["perada", "ditto", "fedavg", "feddyn", "scaffold"])
def test_a_diverged_client_changes_nothing_at_the_server(method: str) -> None:
    """The round is the round of the other clients alone: mean, teachers and judges."""
    settings = {"method__name": method, "train__cohort": 4, "train__momentum": 0.0}
    sim, other = infected(build(small(**settings)), 1), build(small(**settings))
    start = sim.now.kept
    other.sampled = lambda round: [0, 2, 3]  # type: ignore[method-assign]
    other.round()
    sim.round()
    assert sim.now.last["failed"] == ["client-01"]
    assert math.isfinite(sim.now.last["train_loss"])
    assert [n for n, t in everything(sim).items() if not (t.abs() < 1e9).all()] == []
    assert_same_tensors(gather(sim.now.kept, [1]).params, gather(start, [1]).params)
    for mine, theirs in ((sim.now.broadcast, other.now.broadcast), (sim.now.server, other.now.server)):
        for name, tensor in mine.params.items():
            assert torch.allclose(tensor, theirs.params[name], rtol=1e-4, atol=1e-6), name


def test_an_upload_that_is_not_finite_is_left_out() -> None:
    sim = build(small(method__name="fedavg", train__cohort=4))
    real = type(sim.method).client_update

    def update(trainer: Any, received: State, kept: State) -> tuple[State, State]:
        upload, kept = real(sim.method, trainer, received, kept)
        next(iter(upload.params.values()))[2] = math.inf
        return upload, kept

    object.__setattr__(sim.method, "client_update", update)
    sim.round()
    assert sim.now.last["failed"] == ["client-02"]
    assert all(t.isfinite().all() for t in sim.now.broadcast.tensors())


def test_a_round_in_which_all_fail_changes_nothing_but_is_counted() -> None:
    sim = build(small(train__lr=1e30))
    start = everything(sim)
    sim.round()
    assert_same_tensors(everything(sim), start)
    assert (sim.now.round, sim.now.last["train_loss"]) == (1, None)
    assert sim.now.counters["bytes_up"] == 0
    assert sim.now.counters["bytes_down"] == 2 * sim.now.broadcast.bytes_per_lane()
    assert sim.now.counters["distilled"] == 0


def test_a_training_in_which_all_fail_ends_after_three_rounds(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"3 rounds in a row.*lower"):
        perada.train("digits", set=plain({"train.lr": 1e30, "train.rounds": 50}), out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row.get("failed", []) for row in rows if row["round"]] != []
    with pytest.raises(Diverged):  # the count is part of the checkpoint
        perada.train(out=tmp_path / "run", resume=True)


def test_rounds_that_fail_now_and_then_end_nothing() -> None:
    sim = after(2, train__lr=1e30)
    sim.cohort.options = small().train  # type: ignore[attr-defined]
    sim.round()
    assert sim.now.memory == {}


def test_a_client_that_fails_in_the_last_stage_predicts_with_the_global_model() -> None:
    sim = after(1, method__name="fedavg-ft", method__personal_lr=1e30)
    sim.finish()
    assert sim.now.last["failed"] == CLIENTS
    for n, t in sim.now.kept.params.items():
        assert torch.equal(t, sim.now.broadcast.params[n].expand_as(t))


def test_a_site_alone_has_no_upload_if_it_failed() -> None:
    sim = build(small(train__lr=1e30))
    assert isinstance(sim.cohort, LocalCohort)
    uploads = sim.cohort.train(sim.now, [0])
    assert (uploads.states.lanes, uploads.clients, uploads.report.failed) == (0, 0, ("client-00",))
    assert uploads.kept is not None
    assert_same_tensors(uploads.kept.params, sim.now.kept.params)


def test_a_search_goes_on_without_a_point_that_diverged(tmp_path: Path) -> None:
    said: list[str] = []
    settings = plain({"train.rounds": 3, "train.cohort": 1, "distill.steps": 0})
    del settings["train.lr"]
    search = perada.tune(
        "digits", methods="fedavg", set=settings, grid={"train.lr": [1e30, 0.02]}, out=tmp_path, say=said.append
    )
    assert search.best()["fedavg"]["settings"] == {"train.lr": 0.02}
    assert [line for line in said if "3 rounds in a row" in line]


def test_a_comparison_goes_on_without_a_run_that_diverged(tmp_path: Path) -> None:
    said: list[str] = []
    settings = plain({"train.rounds": 3, "train.cohort": 1, "distill.steps": 0})
    del settings["train.lr"]
    source = tmp_path / "mine.toml"
    source.write_text('preset = "digits"\ntrain.lr = 0.02\n[methods.ditto]\ntrain.lr = 1e30\n')
    table = perada.compare(
        str(source), methods="ditto,fedavg", set=settings, out=tmp_path / "table", say=said.append, baseline=False
    ).table()
    assert [row["name"] for row in table] == ["fedavg"]
    assert [line for line in said if "ditto-0" in line and "3 rounds in a row" in line]
    with pytest.raises(Diverged, match="no run stayed finite"):
        perada.compare(str(source), methods="ditto", set=settings, out=tmp_path / "none", baseline=False)
