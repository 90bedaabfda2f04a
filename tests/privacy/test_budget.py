"""What rounds cost in real runs: killed and resumed, with a budget, and with a target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small import after, plain, small

import perada
from perada.callbacks import Callback, OnRound
from perada.config import build
from perada.errors import Damaged, InputError
from perada.privacy.accountant import Step
from perada.privacy.mechanism import Mechanism
from perada.privacy.spending import SPENT, ledger_in
from perada.runs.moment import Progress

pytest.importorskip("dp_accounting")
DP: dict[str, Any] = {
    "privacy__noise": 3.0,
    "privacy__deterministic": True,
    "distill__guard": "none",
    "distill__steps": 1,
    "train__rounds": 4,
    "train__batch": 4,
}
TIGHT: dict[str, Any] = {"privacy__noise": 1.0, "privacy__budget": 4.5, "train__rounds": 50}  # one or two rounds each
pytestmark = pytest.mark.filterwarnings("ignore:Privacy.deterministic")


def train(out: Path, resume: bool = False, callbacks: tuple[Callback, ...] = (), **more: Any) -> perada.Run:
    source = None if resume else "digits"
    return perada.train(
        source, set=None if resume else plain({**DP, **more}), out=out, resume=resume, callbacks=callbacks
    )


def ledger(run: perada.Run) -> dict[str, Any]:
    return dict(run.experiment.now.memory[SPENT])


class PowerCut(Exception):
    pass


def cut_in(round: int) -> OnRound:
    def cut(progress: Progress) -> None:
        if progress.round == round:
            raise PowerCut

    return OnRound(cut)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> perada.Run:
    return train(tmp_path_factory.mktemp("privacy") / "whole")


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_was_cut_off_ends_with_the_same_ledger(whole: perada.Run, tmp_path: Path, every: int) -> None:
    with pytest.raises(PowerCut):
        train(tmp_path / "run", callbacks=(cut_in(3),), run__checkpoint_every=every)
    again = train(tmp_path / "run", resume=True)
    assert ledger(again) == ledger(whole)
    assert again.summary["privacy"] == whole.summary["privacy"]
    rows = [[row["epsilon"] for row in run.folder.metrics()] for run in (again, whole)]
    assert rows[0] == rows[1]


def test_a_killed_process_leaves_a_ledger_that_goes_on_exactly(whole: perada.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = (
        "import os, signal, sys, json, perada\n"
        "from perada.callbacks import OnRound\n"
        "kill = lambda p: p.round == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "perada.train('digits', set=json.loads(sys.argv[1]), out=sys.argv[2], callbacks=[OnRound(kill)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, json.dumps(plain(DP)), str(out)], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert ledger(train(out, resume=True)) == ledger(whole)


def test_epsilon_never_falls_and_only_those_who_trained_pay() -> None:
    run, before = build(small(**DP)), dict[str, float]()
    for _ in range(3):
        trained = {run.clients[m] for m in run.sampled(run.now.round)}
        run.round()
        now = run.epsilons
        risen = {name for name in now if now[name] > before.get(name, 0.0)}
        assert risen == trained & run.spending.bill.keys()
        assert all(now[name] >= value for name, value in before.items())
        before = now


@pytest.mark.parametrize("method", ["perada", "ditto", "fedavg"])
def test_every_noisy_step_is_in_the_ledger(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [0], Mechanism.__call__

    def counted(self: Mechanism, gradient: Any, *rest: Any) -> Any:
        steps[0] += gradient.batch.lanes if isinstance(gradient.batch.lanes, int) else len(gradient.batch.lanes)
        return step(self, gradient, *rest)

    monkeypatch.setattr(Mechanism, "__call__", counted)
    more = {"method__personal_epochs": 2} if method in ("perada", "ditto") else {}
    run = after(2, **{**DP, "method__name": method, **more})
    rows = ledger_in(run.now.memory)
    assert steps[0] == sum(sum(rows.of(name).values()) for name in rows) > 0


def test_a_budget_stops_clients_and_then_the_training(tmp_path: Path) -> None:
    said: list[Progress] = []
    lines: list[str] = []
    settings, watch = plain({**DP, **TIGHT}), [OnRound(said.append)]
    run = perada.train("digits", set=settings, out=tmp_path / "run", callbacks=watch, say=lines.append)
    done = f"every client's Privacy.budget is spent after round {run.summary['round']}: nothing more is trained"
    assert lines.count(done) == 1
    epsilons = run.summary["privacy"]["epsilon"]["per_client"]
    experiment = run.experiment
    assert set(experiment.exhausted) == set(experiment.clients)
    assert 2 <= run.summary["round"] < 50
    assert all(0 < value <= 4.5 for value in epsilons.values())
    assert run.folder.metrics()[-1]["exhausted"] == list(experiment.exhausted)
    named = [set(progress.exhausted) for progress in said]
    assert all(one <= other for one, other in pairwise(named))
    for name, bill in experiment.spending.bill.items():
        assert ledger_in(experiment.now.memory).epsilon(name, experiment.privacy, bill) > 4.5
    with pytest.raises(InputError, match=r"every client's Privacy\.budget is spent: nothing more is trained"):
        experiment.round()
    before = experiment.now
    assert train(tmp_path / "run", resume=True).experiment.now.memory == before.memory


def test_clients_without_budget_are_not_trained_while_others_go_on() -> None:
    run = build(small(**{**DP, **TIGHT}))
    while not run.exhausted:
        run.round()
    gone = set(run.exhausted)
    assert gone < set(run.clients)
    spent = {name: ledger_in(run.now.memory).of(name) for name in gone}
    while not run.spending.over(run.now.memory):
        assert gone.isdisjoint(run.clients[m] for m in run.taking_part())
        run.round()
    assert {name: ledger_in(run.now.memory).of(name) for name in gone} == spent


def test_a_target_is_solved_once_and_written_down(tmp_path: Path) -> None:
    settings = {
        "privacy__noise": 0.0,
        "privacy__target": 5.0,
        "train__cohort": 0,
        "train__rounds": 1,
        "privacy__accountant": "rdp",
    }
    run = train(tmp_path / "run", **settings)
    noise = run.summary["privacy"]["noise"]
    assert run.config.privacy.noise == noise > 0 == run.config.privacy.target
    assert max(run.summary["privacy"]["epsilon"]["per_client"].values()) == pytest.approx(5.0, abs=0.01)
    again = train(tmp_path / "run", resume=True)
    assert again.config.privacy.noise == noise
    steps = [step for name in ledger_in(run.experiment.now.memory).spent.values() for step in name]
    assert {step.noise for step in steps} == {noise}
    assert isinstance(steps[0], Step)
    longer = perada.train(out=tmp_path / "run", resume=True, set={"train.rounds": 3})
    assert max(longer.summary["privacy"]["epsilon"]["per_client"].values()) <= 5.0, "more rounds do not pass it"


def test_a_checkpoint_with_a_damaged_ledger_is_not_used(whole: perada.Run) -> None:
    from perada.runs.moment import check_note

    note = json.loads(json.dumps(whole.folder.load()[0].note))  # type: ignore[union-attr]
    check_note(note, 4)
    name = next(iter(note["memory"][SPENT]))
    note["memory"][SPENT][name][0][4] = -1
    with pytest.raises((ValueError, Damaged)):
        check_note(note, 4)


def test_a_missing_accountant_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'perada\[dp\]'"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clients_train_a_round_once_however_often_it_is_gathered() -> None:
    exp = build(small(**{**DP, "train__cohort": 2}))
    first = exp.gather()
    assert exp.gather() is first  # the very same noise
    exp.update(first)
    for name, paid in ledger_in(exp.now.memory).spent.items():
        assert paid == exp.spending.bill[name]
    assert exp.gather() is not first
