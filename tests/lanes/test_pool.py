"""Trainings that share their lanes: what each of them gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_close_norm, assert_same_tensors
from small import everything, small

from perada.callbacks import OnRound
from perada.config import build
from perada.data import Federation
from perada.errors import Interrupted
from perada.experiment import Experiment
from perada.lanes import Pool, bytes_per_lane, pool, replay, train
from perada.sweep import workers
from perada.sweep.compare import Comparison, _trainer, compare
from perada.sweep.tune import tune
from perada.sweep.workers import share_lanes

Runs = dict[str, dict[str, Any]]


def sim_of(settings: dict[str, Any], federation: Federation | None = None) -> Experiment:
    rounds = settings.pop("rounds", 2)
    sim = build(small(run__precision="fp64", train__rounds=rounds, **settings), federation=federation)
    settings["rounds"] = rounds
    return sim


def together(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Experiment], list[int]]:
    """All in one pool, over one federation; and how many jobs each loop that was run had."""
    federation = sim_of(next(iter(runs.values()))).federation
    found: dict[str, Experiment] = {}
    sizes: list[int] = []
    real = pool._together
    monkeypatch.setattr(pool, "_together", lambda jobs, *rest: sizes.append(len(jobs)) or real(jobs, *rest))

    def one(name: str, shared: Pool) -> None:
        sim = sim_of(runs[name], federation)
        sim.model.pool = shared
        for _ in range(sim.config.train.rounds):
            sim.round()
        found[name] = sim

    share_lanes(list(runs), len(runs), one, lambda name: None)
    return found, sizes


SAME: Runs = {f"seed {i}": {"method__name": "perada-no-kd", "run__seed": i, "model__dropout": 0.3} for i in range(3)}
MIXED: Runs = {
    "perada": {"method__name": "perada", "distill__guard": "clients"},
    "no kd": {"method__name": "perada-no-kd", "rounds": 4, "train__lr": 0.05, "method__lam": 0.1},
    "ditto": {"method__name": "ditto", "train__cohort": 3},
    "another ditto": {"method__name": "ditto", "run__seed": 5, "run__lanes": 2},
    "pfedme": {"method__name": "pfedme"},
    "fedprox": {"method__name": "fedprox", "train__momentum": 0.9},
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("runs", [SAME, MIXED], ids=["seeds", "methods"])
def test_together_as_alone(runs: Runs, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {}
    for name, settings in runs.items():
        sim = sim_of(settings)
        for _ in range(sim.config.train.rounds):
            sim.round()
        wanted[name] = sim
    if recorded:
        monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    found, sizes = together(runs, monkeypatch)
    assert max(sizes) == (3 if runs is SAME else 2)
    assert sum(sizes) >= sum(s.config.train.rounds for s in wanted.values())
    for name, sim in wanted.items():
        other = everything(found[name])
        for key, tensor in everything(sim).items():
            if float(tensor.abs().max()) > 0:
                assert_close_norm(other[key], tensor, 1e-9, what=f"{name}: {key}")
        assert found[name].now.last["train_loss"] == pytest.approx(sim.now.last["train_loss"])
        assert found[name].now.counters == sim.now.counters


def test_runs_that_distil_and_runs_that_do_not_stay_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many loops a distillation has: the training of a round is one loop for all of them."""
    runs: Runs = {
        "guarded": {"method__name": "perada", "distill__guard": "clients", "rounds": 3},  # two loops of distillation
        "not guarded": {"method__name": "perada", "distill__guard": "none", "rounds": 3},
        "no kd": {"method__name": "perada-no-kd", "rounds": 3},
    }
    _, sizes = together(runs, monkeypatch)
    assert [n for n in sizes if n > 1] == [3, 3, 3]
    assert sizes.count(1) == 3 * (2 + 1)


def test_other_frozen_weights_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {f"seed {i}": {"method__name": "perada-no-kd", "run__seed": i, "model__weights": "random"} for i in range(2)}
    found, sizes = together(runs, monkeypatch)
    assert set(sizes) == {1}
    alone = sim_of(runs["seed 1"])
    for _ in range(2):
        alone.round()
    assert_same_tensors(everything(found["seed 1"]), everything(alone))


@pytest.mark.parametrize("why", ["limit", "memory"])
def test_no_more_lanes_at_once_than_there_is_room_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = train._group
    monkeypatch.setattr(train, "_group", lambda job, numbers: seen.append(len(numbers)) or real(job, numbers))
    if why == "limit":
        monkeypatch.setattr(Pool.__init__, "__defaults__", (5,))
    else:
        each = bytes_per_lane(sim_of(SAME["seed 0"]).model, (8, 8), 8)
        monkeypatch.setattr("perada.client.cohort.free_memory", lambda device: 6 * each)
    together(SAME, monkeypatch)
    assert max(seen) == 5


def in_threads(names: list[str], work: Callable[[str, Pool], None]) -> list[str]:
    finished: list[str] = []
    share_lanes(names, len(names), work, finished.append)
    return finished


def test_a_failure_stops_the_others_where_they_can_save() -> None:
    """As Ctrl-C would: it reaches them at their next loop, and the failure is what is told."""
    stopped: list[str] = []
    federation = sim_of(SAME["seed 0"]).federation

    def work(name: str, shared: Pool) -> None:
        sim = sim_of({**SAME["seed 0"], "run__seed": int(name)}, federation)
        sim.model.pool = shared
        sim.round()
        if name == "1":
            raise OSError("disk full")
        try:
            for _ in range(50):
                sim.round()
        except KeyboardInterrupt:
            stopped.append(name)
            assert sim.now.round >= 1
            raise

    with pytest.raises(OSError, match="disk full"):
        in_threads(["0", "1", "2"], work)
    assert sorted(stopped) == ["0", "2"]
    assert not [t for t in threading.enumerate() if t.name.startswith("perada-run")]


def test_a_loop_that_fails_fails_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(train, "_group", broken)
    with pytest.raises(MemoryError, match="no room"):
        together(SAME, monkeypatch)


def test_runs_of_a_comparison_in_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as one after another, finished runs and all."""
    settings = {"train.rounds": 2, "train.epochs": 1, "distill.steps": 2, "run.shifts": False, "run.precision": "fp64"}
    settings |= {"data.clients": 4, "train.cohort": 2}
    names = "perada-no-kd,standalone"
    alone = compare("digits", methods=names, seeds=2, set=settings, out=tmp_path / "alone", jobs=1)
    shared = compare("digits", methods=names, seeds=1, set=settings, out=tmp_path / "shared", jobs=1)
    plan = (tmp_path / "alone" / "plan.json").read_bytes()
    (tmp_path / "shared" / "plan.json").write_bytes(plan)
    for name in Comparison(tmp_path / "alone").names:
        (tmp_path / "shared" / "plan" / f"{name}.toml").write_bytes(
            (tmp_path / "alone" / "plan" / f"{name}.toml").read_bytes()
        )
    assert len(shared.finished()) == 2
    monkeypatch.setattr(workers, "shares", lambda device: True)
    seen: list[tuple[int, int, str]] = []
    compare(out=tmp_path / "shared", resume=True, jobs=2, on_run=lambda *at: seen.append(at))
    assert (seen[0], seen[-1]) == ((2, 4, "perada-no-kd-1"), (4, 4, "done"))
    assert {f"{name} and others, round 2 of 2" for name in ("perada-no-kd-1", "standalone-1")} <= {
        s for _, _, s in seen
    }
    for name in alone.names:
        a, b = ({k: r.summary[k] for k in ("local_test", "global_test", "bytes_up")} for r in (
            next(r for r in c.runs if r.path.name == name) for c in (alone, shared)))  # fmt: skip
        assert a == b


def test_an_interrupt_saves_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"train.rounds": 30, "train.epochs": 1, "run.shifts": False, "data.clients": 4, "train.cohort": 2}
    found = compare(
        "digits", methods="fedavg", seeds=1, set={**settings, "train.rounds": 1}, out=tmp_path / "c", baseline=False
    )
    for name in ("fedavg-1", "fedavg-2"):
        text = (tmp_path / "c" / "plan" / "fedavg-0.toml").read_text().replace("rounds = 1\n", "rounds = 30\n", 1)
        (tmp_path / "c" / "plan" / f"{name}.toml").write_text(text)
    seen: list[str] = []

    def on_round(progress: Any) -> None:
        seen.append(str(progress.round))
        if len(seen) == 5:
            raise KeyboardInterrupt

    train, callbacks = _trainer(found, {}, found.runs[0].federation), [OnRound(on_round)]
    with pytest.raises(Interrupted):
        share_lanes(["fedavg-1", "fedavg-2"], 2, lambda name, pool: train(name, callbacks, print, pool), print)
    rounds = [len(list((tmp_path / "c" / n / "checkpoints").glob("round-*"))) for n in ("fedavg-1", "fedavg-2")]
    assert all(rounds)


def test_points_of_a_search_in_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores as one after another, and nothing left behind."""
    settings = {"train.rounds": 2, "train.epochs": 1, "run.precision": "fp64", "data.clients": 4, "train.cohort": 2}
    grid = {"train.lr": (0.01, 0.05), "method.lam": (0.1, 1.0)}
    alone = tune("digits", methods="perada-no-kd", set=settings, grid=grid, out=tmp_path / "alone")
    monkeypatch.setattr(workers, "jobs_for", lambda runs, device: 3)
    seen: list[int] = []
    monkeypatch.setattr(
        workers, "share_lanes", lambda names, *rest: seen.append(len(names)) or share_lanes(names, *rest)
    )
    monkeypatch.setattr(workers, "shares", lambda device: True)
    shared = tune("digits", methods="perada-no-kd", set=settings, grid=grid, out=tmp_path / "shared")
    assert seen == [4]
    assert not list((tmp_path / "shared").glob("current*"))
    scores = [{str(r["settings"]): r["local_val"] for r in s.results()} for s in (alone, shared)]
    assert scores[0] == pytest.approx(scores[1])
    assert alone.best() == shared.best()
    assert (tmp_path / "alone" / "tuned.toml").read_text() == (tmp_path / "shared" / "tuned.toml").read_text()
