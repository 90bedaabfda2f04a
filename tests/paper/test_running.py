"""Run by run, round by round, in slices of time, on another machine: the same results."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small import adapters, tree

from experiments import results
from experiments.running import Clock, lay_over, run_experiment, state_of
from perada.client.cohort import Uploads
from perada.errors import InputError, Interrupted, RunError
from perada.experiment import Experiment
from perada.runs.moment import Progress

from .tiny import experiment, place, staged, trial, two

Found = dict[str, dict[str, Any]]


def numbers(home: Path, experiment: str = "digits") -> Found:
    """The results without what a clock said."""
    held = results.read(home / "results", experiment)
    for one in held.values():
        for row in (*one["rows"], one):
            row.pop("seconds")
    return held


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PerAda and FedAvg, four rounds each, never disturbed."""
    home = tmp_path_factory.mktemp("whole")
    state = run_experiment(two(train__rounds=4), place(home))
    assert (list(state.found), state.left) == (["perada-0", "fedavg-0"], [])
    return home


def test_a_result_has_its_settings_and_rows_and_no_weights(whole: Path) -> None:
    found = results.read(whole / "results", "digits")
    assert set(found) == {"perada-0", "fedavg-0"}
    one = found["perada-0"]
    summary = json.loads((whole / "runs" / "digits" / "perada-0" / "summary.json").read_text())
    assert one["settings"]["train.rounds"] == 4
    assert one["settings"]["method.name"] == "perada"
    assert [r["round"] for r in one["rows"]] == [1, 2, 3, 4]
    assert not any("per_client" in json.dumps(r) for r in one["rows"])
    assert one["last"]["local_test"] == summary["local_test"]
    assert set(one["last"]["local_test"]["per_client"]) == {f"client-0{m}" for m in range(4)}
    assert one["validation"] == {"local_val": summary["local_val"]["mean"], "server_val": None}
    assert one["guard"] == {"kind": "clients", "distilled": 4, "accepted": summary["accepted"]}
    assert found["fedavg-0"]["guard"]["kind"] is None
    assert {"date", "device", "versions", "code", "together", "digest"} <= one.keys()
    text = (whole / "results" / "digits" / "perada-0.json").read_text()
    assert str(whole) not in text, "no path of a machine"
    assert len(text) < 10_000


def test_what_is_done_is_not_done_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Experiment, "round", lambda self: pytest.fail("trained again"))
    before = tree(whole)
    assert run_experiment(two(train__rounds=4), place(whole)).left == []
    assert tree(whole) == before


def test_a_result_that_got_lost_is_made_from_the_run_folder(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    assert run_experiment(two(train__rounds=4), place(tmp_path)).left == []
    assert numbers(tmp_path) == numbers(whole)


class Ticking(Clock):
    """A clock that lets `rounds` rounds pass in all: time is counted in rounds."""

    def __init__(self, rounds: int) -> None:
        self.time = 0.0
        super().__init__(rounds / 60 + 1e-6, reserve=0.0, finishing=0.0, now=lambda: self.time)

    def watch(self, on_round: Any, shifts: bool) -> Any:
        def counted(progress: Progress) -> None:
            if progress.round == progress.rounds or self.time + 1 > (self.end or 0.0):
                self.stopped = self.stopped or progress.round < progress.rounds
                if self.stopped:
                    raise KeyboardInterrupt
            else:
                self.time += 1
            on_round(progress)

        return counted


@pytest.mark.parametrize("together", [1, 2])
def test_slices_of_time_on_changing_machines_give_the_same(whole: Path, tmp_path: Path, together: int) -> None:
    """Each slice in another folder, as on another machine; both runs at once, too."""
    at, slices = tmp_path / "0", 0
    at.mkdir()
    while True:
        clock = Ticking(3)
        state = run_experiment(two(train__rounds=4), place(at), clock, together)
        if not state.left:
            break
        assert clock.stopped
        slices += 1
        there = tmp_path / str(slices)
        shutil.move(at, there)
        at = there
    assert slices >= 2
    found, wanted = numbers(at), numbers(whole)
    for run in wanted:
        if together == 1:
            assert found[run] == wanted[run]
            here = at / "runs" / "digits" / run
            assert adapters(here) == adapters(whole / "runs" / "digits" / run), "the same bytes"
        else:  # merged lanes are equal to rounding: a label may tip
            assert found[run]["together"] == 2
            assert [r["round"] for r in found[run]["rows"]] == [1, 2, 3, 4]
            for row, other in zip(found[run]["rows"], wanted[run]["rows"], strict=True):
                assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)


def test_a_clock_stops_a_run_where_the_next_round_would_be_too_long() -> None:
    """Rounds of 100 s in 600: after the fifth, one half as long again and the reserve of 15 s do not fit."""
    time, seen = [0.0], list[int]()
    clock = Clock(10, reserve=15, now=lambda: time[0])
    watch = clock.watch(lambda p: seen.append(p.round), shifts=False)

    def rounds() -> None:
        for number in range(1, 9):
            time[0] += 100
            watch(Progress(number, 100, None, ()))

    with pytest.raises(KeyboardInterrupt):
        rounds()
    assert seen == [1, 2, 3, 4, 5]
    assert clock.stopped


def test_a_run_that_is_stopped_stops_no_other(tmp_path: Path) -> None:
    """Of two that are trained together one has long rounds: the other goes on to its end; nothing new is begun."""

    class Uneven(Clock):
        def watch(self, on_round: Any, shifts: bool) -> Any:
            def long(progress: Progress) -> None:
                if progress.round == 1:
                    self.over(1e9)
                    raise KeyboardInterrupt

            self.seen = getattr(self, "seen", 0) + 1
            return long if self.seen == 1 else on_round

    runs = [trial(f"{m}-0", method__name=m) for m in ("perada", "fedavg", "ditto")]
    plan = experiment(*runs, train__rounds=6)
    state = run_experiment(plan, place(tmp_path), Uneven(60), together=2)
    assert list(state.found) == ["fedavg-0"]
    assert not (tmp_path / "runs" / "digits" / "ditto-0").exists()
    assert run_experiment(plan, place(tmp_path)).left == []


def test_a_group_of_more_runs_than_are_trained_at_once(tmp_path: Path) -> None:
    """Two, then the one that is left: by how many a machine's seconds are shared is what was so."""
    runs = [trial(f"{m}-0", method__name=m) for m in ("perada", "fedavg", "ditto")]
    state = run_experiment(experiment(*runs), place(tmp_path), together=2)
    assert state.left == []
    assert [r["together"] for r in state.found.values()] == [2, 2, 1]


def test_only_some_runs_or_groups(tmp_path: Path) -> None:
    runs = [trial("perada-0", "adapters", method__name="perada"), trial("fedavg-0", "full", method__name="fedavg")]
    both = experiment(*runs)
    with pytest.raises(InputError, match="unknown run 'ful': did you mean 'full'"):
        run_experiment(both, place(tmp_path), only=["ful"])
    assert run_experiment(both, place(tmp_path), only=["full"]).left == ["perada-0"]
    assert run_experiment(both, place(tmp_path), only=["perada-0"]).left == []


def test_a_runs_own_public_images_are_found_beside_the_data_and_may_move(tmp_path: Path) -> None:
    """The file is named in the plan; where it lies is the machine's."""
    rng = np.random.default_rng(0)
    run = trial("other-0", method__name="perada", distill__data="public.npz", distill__size=0)
    one = experiment(run, train__rounds=3, model__weights="random", model__backbone="resnet8", data__partition="iid")
    one = replace(one, preset="folder-fedavg", file="own.npz")
    for file, many in (("own", 200), ("public", 40)):
        images = rng.integers(0, 256, (many, 64, 64, 3), dtype=np.uint8)
        for home in ("here", "there"):
            (tmp_path / home).mkdir(exist_ok=True)
            np.savez(tmp_path / home / f"{file}.npz", images=images, labels=np.arange(many) % 4)
    assert run_experiment(one, place(tmp_path, data=str(tmp_path / "here")), Ticking(1)).left == ["other-0"]
    shutil.rmtree(tmp_path / "here")
    assert run_experiment(one, place(tmp_path, data=str(tmp_path / "there"))).left == []
    text = (tmp_path / "results" / "digits" / "other-0.json").read_text()
    assert '"distill.data": "public.npz"' in text
    assert str(tmp_path) not in text


def test_validation_images_are_no_file_beside_the_data(tmp_path: Path) -> None:
    run = trial("own-0", method__name="perada", distill__data="validation", distill__batch=64)
    assert place(tmp_path, data=str(tmp_path)).here(experiment(run), run) == {"data.root": str(tmp_path)}
    assert run_experiment(experiment(run), place(tmp_path)).left == []
    assert '"distill.data": "validation"' in (tmp_path / "results" / "digits" / "own-0.json").read_text()


def test_a_clock_keeps_time_for_the_end_and_none_without_minutes() -> None:
    time = [0.0]
    last = Progress(7, 7, None, ())
    for shifts, at, stops in ((True, 440.0, False), (True, 460.0, True), (False, 599.0, False)):
        time[0] = 0.0
        clock = Clock(10, reserve=15, finishing=150, now=lambda: time[0])
        watch = clock.watch(lambda p: None, shifts)
        time[0] = at
        if stops:
            with pytest.raises(KeyboardInterrupt):
                watch(last)
        else:
            watch(last)
    free = Clock(None, now=lambda: time[0])
    time[0] = 1e9
    free.watch(lambda p: None, True)(last)
    assert not free.stopped


def test_a_clock_learns_from_the_first_how_long_the_end_takes() -> None:
    """Runs that are trained together end one after another: the last of six must not be asked for 90 seconds."""
    time, last = [0.0], Progress(7, 7, None, ())
    clock = Clock(10, now=lambda: time[0])
    watches = [clock.watch(lambda p: None, True) for _ in range(2)]
    time[0] = 480.0
    watches[0](last)
    clock.finished(20.0)
    time[0] = 560.0
    watches[1](last)
    clock.finished(10.0)
    assert clock.finishing == 30.0  # of the longest
    time[0] = 575.0
    with pytest.raises(KeyboardInterrupt):
        watches[1](last)


def test_a_run_tells_its_clock_how_long_its_end_took(tmp_path: Path) -> None:
    clock = Clock(60, finishing=1e5)
    run_experiment(two(run__shifts=True, run__severities=[3]), place(tmp_path), clock)
    assert clock.finishing < 1e3


def test_minutes_that_are_over_at_once_train_nothing(tmp_path: Path) -> None:
    state = run_experiment(two(), place(tmp_path), Clock(1e-9))
    assert state.left == ["perada-0", "fedavg-0"]


@pytest.mark.parametrize("together", [1, 2])
def test_ctrl_c_saves_and_the_same_command_goes_on(whole: Path, tmp_path: Path, together: int) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.round == 2:
            signal.raise_signal(signal.SIGINT) if together == 1 else _stop()

    def _stop() -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(Interrupted, match="saved"):
            run_experiment(two(train__rounds=4), place(tmp_path), together=together, on_round=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert any((tmp_path / "runs" / "digits").glob("*/checkpoints/round-0002"))
    assert run_experiment(two(train__rounds=4), place(tmp_path)).left == []
    if together == 1:
        assert numbers(tmp_path) == numbers(whole)


@pytest.mark.parametrize("run", ["no-kd", "perada-0"])
def test_a_machine_that_fails_leaves_one_line_and_what_was_done(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that is tested, and of a candidate of a choice."""
    plan = staged() if run == "no-kd" else two()
    gather = Experiment.gather

    def fail(experiment: Experiment) -> Uploads:
        if experiment.now.round == 1:
            raise MemoryError("no room")
        return gather(experiment)

    monkeypatch.setattr(Experiment, "gather", fail)
    with pytest.raises(RunError, match=f"^{run}: no room; what is finished is saved: the same command goes on"):
        run_experiment(plan, place(tmp_path))
    assert (tmp_path / "runs" / "digits" / run / "checkpoints" / "round-0001").is_dir()


def test_a_settled_preset_makes_results_and_run_folders_of_before_stale(whole: Path, tmp_path: Path) -> None:
    changed = two(train__rounds=4, distill__lr=0.5)
    state = state_of(changed, whole / "results")
    assert state.stale == {"perada-0": ["distill.lr"], "fedavg-0": ["distill.lr"]}
    assert state.left == ["perada-0", "fedavg-0"]
    shutil.copytree(whole / "runs", tmp_path / "runs")
    with pytest.raises(InputError, match=r"perada-0 began with another distill\.lr: move it away"):
        run_experiment(changed, place(tmp_path))


def test_a_stage_waits_for_the_choice_before_it_and_builds_on_it(tmp_path: Path) -> None:
    study = staged()
    assert state_of(study, tmp_path).ready() == ["no-kd", "slow", "fast"]
    state = run_experiment(study, place(tmp_path))
    assert state.left == []
    found = results.read(tmp_path / "results", "digits")
    rate = found["long"]["settings"]["distill.lr"]
    assert rate in (1e-4, 0.05)
    assert found["pulled"]["settings"]["distill.lr"] == rate
    assert found["end"]["settings"]["distill.lr"] in (1e-4, 0.05)
    assert found["end"]["rounds"] == 3
    for name, one in found.items():
        assert ("local_test" in one["last"]) == (name == "end"), "only the end is tested"
        assert (one["validation"]["server_val"] is not None) == (name != "end")
        assert (tmp_path / "runs" / "digits" / name).exists() == (name == "end"), "a point's folder goes"


def test_a_run_of_validation_data_alone_goes_on_where_it_was(tmp_path: Path) -> None:
    """The same numbers as without the stop."""
    study = replace(staged(), trials=staged().trials[:2], choices=())
    run_experiment(study, place(tmp_path / "whole"))
    slices = 0
    while run_experiment(study, place(tmp_path / "cut"), Ticking(1)).left:
        slices += 1
    assert slices >= 2
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_random_and_fedavg_weights_are_a_runs_own(tmp_path: Path) -> None:
    """The FedAvg pretraining is done once for both of its runs."""
    runs = [trial(f"{m}-0", method__name=m, model__weights="fedavg") for m in ("perada-no-kd", "fedavg")]
    both = experiment(*runs, model__pretrain_rounds=2)
    assert run_experiment(both, place(tmp_path)).left == []
    assert len(list((tmp_path / "runs" / "digits" / "pretrain").glob("*.safetensors"))) == 1
    found = results.read(tmp_path / "results", "digits")
    assert {r["settings"]["model.weights"] for r in found.values()} == {"fedavg"}
    assert {r["weights"] for r in found.values()} == {None}


def test_the_file_of_weights_is_named_by_its_checksum_and_need_not_move_along(tmp_path: Path) -> None:
    from helpers import build_backbone

    net, _ = build_backbone("resnet8", 10, "random", 3)
    file = tmp_path / "somewhere" / "pre.safetensors"
    file.parent.mkdir()
    save_file({k: t for k, t in net.state_dict().items() if not k.endswith("tracked")}, file)
    one = replace(two(train__rounds=2), needs_weights=True)
    assert run_experiment(one, place(tmp_path, weights=str(file)), Ticking(1)).left
    begun = results.file_digest(str(file))
    file.unlink()
    again = tmp_path / "elsewhere.safetensors"  # another machine has another path, or no file at all
    with pytest.raises(InputError, match="no file"):
        run_experiment(one, place(tmp_path, weights=str(file)))
    save_file({k: t for k, t in net.state_dict().items() if not k.endswith("tracked")}, again)
    assert run_experiment(one, place(tmp_path, weights=str(again))).left == []
    found = results.read(tmp_path / "results", "digits")["perada-0"]["weights"]
    assert begun is not None
    assert found == {**begun, "file": "elsewhere.safetensors"}


def test_statistics_are_laid_over_weights(tmp_path: Path) -> None:
    one, two_ = {"a": torch.zeros(2), "b.running_mean": torch.zeros(3)}, {"b.running_mean": torch.ones(3)}
    save_file(one, tmp_path / "w.safetensors")
    save_file(two_, tmp_path / "s.safetensors")
    made = lay_over(tmp_path / "w.safetensors", tmp_path / "s.safetensors", tmp_path / "out")
    held = load_file(made)
    assert held["b.running_mean"].tolist() == [1, 1, 1]
    assert held["a"].tolist() == [0, 0]
    save_file({"c": torch.ones(1)}, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match="has c, which"):
        lay_over(tmp_path / "w.safetensors", tmp_path / "s.safetensors", tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        lay_over(tmp_path / "w.safetensors", tmp_path / "none.safetensors", tmp_path / "out")
    save_file({"b.running_mean": torch.ones(5)}, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match=r"has b\.running_mean in another shape"):
        lay_over(tmp_path / "w.safetensors", tmp_path / "s.safetensors", tmp_path / "out")
    with pytest.raises(InputError, match=r"cannot write .*w\+w\.safetensors: "):
        lay_over(tmp_path / "w.safetensors", tmp_path / "w.safetensors", tmp_path / "w.safetensors")


def test_the_data_file_of_an_experiment_is_found_in_the_folder(tmp_path: Path) -> None:
    one = replace(two(), file="pacs_64.npz")
    assert place(tmp_path, data=str(tmp_path)).here(one, one.trials[0]) == {"data.root": str(tmp_path)}
    (tmp_path / "pacs_64.npz").touch()
    found = place(tmp_path, data=str(tmp_path), device="cpu").here(one, one.trials[0])
    assert found == {"data.root": str(tmp_path / "pacs_64.npz"), "run.device": "cpu"}
