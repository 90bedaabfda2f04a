"""Killed, interrupted, resumed: whatever happens to the process, nothing that was finished is lost or changed."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import train
from small import SMALL, adapters, as_older, damage, flags, plain, small, tree

import perada
from perada.callbacks import OnRound
from perada.cli import main as cli

# Real runs. `PERADA` is a run with distillation and the guard at the clients.

ROUNDS = 10
PERADA: dict[str, Any] = {"train__rounds": ROUNDS, "distill__guard": "clients"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert train(out, **PERADA) == 0
    return out


def without_clock(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_same_run(found: Path, wanted: Path) -> None:
    """Final adapters byte for byte, and the whole history of metrics."""
    assert adapters(found).keys() == adapters(wanted).keys()
    assert [n for n, data in adapters(found).items() if data != adapters(wanted)[n]] == []
    assert without_clock(found) == without_clock(wanted)


def process(out: Path, *words: str, **set: Any) -> subprocess.Popen[str]:
    """`python -m perada train` as a user starts it, with the thread count of this process."""
    command = [sys.executable, "-m", "perada", "train", "digits", *flags(**set), "--out", str(out), "--device", "cpu"]
    return subprocess.Popen(
        [*command, *words],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # a shell's background job ignores it
    )


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with the test, whatever becomes of it."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for one in running:
        if one.poll() is None:
            one.kill()
        one.communicate()


def wait_for_rounds(out: Path, rounds: int, child: subprocess.Popen[str]) -> None:
    metrics, end = out / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < end:
        if metrics.is_file() and metrics.read_text().count("\n") >= rounds:
            return
        assert child.poll() is None, child.communicate()
        time.sleep(0.005)
    raise AssertionError(f"no {rounds} rounds in 90 s")


def test_killed_in_the_middle_and_resumed_a_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: Path, started: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9, twice, at rounds that are not chosen with care; then --resume."""
    out = tmp_path / "killed"
    for kill, words in ((2, ()), (5, ("--resume",))):
        child = process(out, *words, **PERADA)
        started.append(child)
        wait_for_rounds(out, kill, child)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not (out / "summary.json").exists(), "it was killed too late to test anything"
    assert train(out, "--resume", **PERADA) == 0
    assert_same_run(out, uninterrupted)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["round"] == ROUNDS


def test_interrupted_a_run_saves_its_state_and_says_how_to_go_on(
    tmp_path: Path, uninterrupted: Path, started: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGINT where no checkpoint is due for long: what is saved was saved because of the interruption."""
    out = tmp_path / "interrupted"
    child = process(out, **PERADA, run__checkpoint_every=100)
    started.append(child)
    wait_for_rounds(out, 3, child)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("interrupted")
    assert len(list((out / "checkpoints").glob("round-*"))) == 1
    again = shlex.split(re.sub(r".*Continue with: ", "", last))
    assert again[0] == "perada"
    assert again[-1] == "--resume"
    assert cli.main(again[1:]) == 0
    assert_same_run(out, uninterrupted)


def test_interrupted_before_there_is_a_run_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perada.runs.train.build", interrupt)
    assert train(tmp_path / "x", **CRASH) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "interrupted"
    assert not (tmp_path / "x").exists()


def test_the_line_that_resumes_can_be_pasted_into_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a space: the line must be quoted. Stopped before the first round is over, it resumes too."""

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "my run"
    with monkeypatch.context() as patch:
        patch.setattr("perada.runs.train.train_in", interrupt)
        assert train(out, **CRASH) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("interrupted")
    again = shlex.split(line.split("Continue with: ")[1])
    assert again[:2] == ["perada", "train"]
    assert again[-1] == "--resume"
    assert cli.main(again[1:]) == 0
    assert json.loads((out / "summary.json").read_text())["round"] == 2


class Killed(BaseException):
    """Ends a run where it stands, as a kill would: no handler of the product knows it."""


CRASH = {"train__rounds": 2, "method__name": "perada-no-kd", "data__clients": 3, "run__eval_every": 2}


def crash_points(monkeypatch: pytest.MonkeyPatch, out: Path, at: int | None) -> list[str]:
    """Run to the end, or die before the `at`-th change of the disk that names a file; returns their names."""
    seen: list[str] = []
    real = {name: getattr(os, name) for name in ("replace", "link", "mkdir")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(out) in str(args[0]):
                seen.append(f"{name} {Path(args[-1] if name != 'mkdir' else args[0]).name}")
                if at is not None and len(seen) > at:
                    raise Killed
            return real[name](*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, counted(name))
        if at is None:
            train(out, **CRASH)
        else:
            with pytest.raises(Killed):
                train(out, **CRASH)
    return seen


def test_a_kill_before_any_write_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is killed before each rename, link and folder in turn; --resume must end at the same bytes."""
    whole = tmp_path / "whole"
    points = crash_points(monkeypatch, whole, None)
    assert len(points) > 15
    begun = next(i for i, p in enumerate(points) if p == "replace config.toml") + 1
    # Every fourth point, the renames of whole checkpoints always: each costs a run and a half.
    chosen = [i for i in range(begun, len(points)) if i % 4 == 0 or "replace round" in points[i]]
    for at in chosen:
        out = tmp_path / f"crash-{at}"
        crash_points(monkeypatch, out, at)
        assert train(out, "--resume", **CRASH) == 0, points[at]
        assert adapters(out) == adapters(whole), points[at]
        assert without_clock(out) == without_clock(whole), points[at]
        assert not list(out.rglob("*.part")), points[at]


def test_a_run_that_is_finished_resumes_to_itself(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, rows = adapters(uninterrupted), without_clock(uninterrupted)
    capsys.readouterr()
    assert train(uninterrupted, "--resume", **PERADA) == 0
    assert f"{uninterrupted} was finished already" in capsys.readouterr().err
    assert adapters(uninterrupted) == before
    assert without_clock(uninterrupted) == rows


def test_training_a_runs_config_again_gives_the_same_bytes(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert cli.main(["train", str(uninterrupted / "config.toml"), "--out", str(out)]) == 0
    assert_same_run(out, uninterrupted)
    assert (out / "config.toml").read_bytes() == (uninterrupted / "config.toml").read_bytes()


def test_a_summary_says_what_the_run_did(uninterrupted: Path) -> None:
    summary = json.loads((uninterrupted / "summary.json").read_text())
    last = json.loads((uninterrupted / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("local_test", "local_val", "global_test", "global_model", "bytes_up", "bytes_down", "seconds"):
        assert summary[key] == last[key]
    for split in ("local_test", "local_val", "global_test"):
        values = list(summary[split]["per_client"].values())
        assert list(summary[split]["per_client"]) == [f"client-{m:02d}" for m in range(4)]
        assert summary[split]["mean"] == pytest.approx(np.mean(values))
        assert summary[split]["std"] == pytest.approx(np.std(values))
    assert summary["parameters"]["communicated"] == 12330
    assert summary["parameters"]["trained"] == 2 * 12330
    assert summary["versions"]["torch"] == torch.__version__
    assert (summary["device"], summary["precision"]) == ("cpu", "fp32")
    assert (uninterrupted / "report.html").is_file()


def test_more_rounds_on_resume_equal_a_longer_run(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "short"
    assert train(out, **{**PERADA, "train__rounds": 4}) == 0
    assert train(out, "--resume", **PERADA) == 0
    assert_same_run(out, uninterrupted)
    assert f"rounds = {ROUNDS}\n" in (out / "config.toml").read_text()


def test_fewer_rounds_on_resume_are_refused_or_end_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped at round 3, never evaluated there, and now asked for two rounds."""
    settings = {"method__name": "perada-no-kd", "run__eval_every": 10}
    out = tmp_path / "run"
    assert train(out, **settings, train__rounds=3) == 0
    (out / "metrics.jsonl").unlink()  # as if it had been killed between the checkpoint and the evaluation
    capsys.readouterr()
    code = train(out, "--resume", **settings, train__rounds=2)
    assert code in (0, 2)
    config = (out / "config.toml").read_text()
    # config.toml must go on describing the adapters beside it: they are those of three rounds.
    assert "rounds = 3\n" in config


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--set", "train.lr=0.5"], "train.lr"),
        (["--method", "fedavg"], "method.name"),
        (["--seed", "9"], "run.seed"),
        (["--set", "data.alpha=1.0"], "data.alpha"),
        (["--set", "distill.guard=none"], "distill.guard"),
        (["--set", "method.lam=3"], "method.lam"),
    ],
)
def test_resuming_with_a_changed_setting_is_refused(
    uninterrupted: Path, words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = adapters(uninterrupted)
    assert cli.main(["train", "digits", "--out", str(uninterrupted), "--resume", *words]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert key in stderr
    assert adapters(uninterrupted) == before


def test_resuming_with_another_preset_or_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, mine = tmp_path / "run", tmp_path / "mine.toml"
    sections = "[train]\nrounds = 1\nlr = {}\n[method]\nname = 'perada-no-kd'\n[run]\nlanes = {}\n"
    mine.write_text("preset = 'digits'\n" + sections.format(0.02, 0))
    changes = [w for k, v in SMALL.items() if k != "train.lr" for w in ("--set", f"{k}={json.dumps(v)}")]
    assert cli.main(["train", str(mine), *changes, "--set", "train.rounds=1", "--out", str(out)]) == 0
    before = tree(out)
    again = ["train", "--out", str(out), "--resume"]
    other = tmp_path / "other.toml"
    other.write_text("preset = 'digits'\n" + sections.format(0.5, 0))
    for source, key in (("cifar10", "data.name"), (str(other), "train.lr"), ("digits", "train.rounds")):
        capsys.readouterr()
        assert cli.main([*again, source]) == 2
        stderr = capsys.readouterr().err
        assert stderr == (
            f"error: {out} was made from {mine} with another {key}: resume it without {source}, "
            "or choose another --out\n"
        )
        assert tree(out) == before
    other.write_text("preset = 'digits'\n" + sections.format(0.02, 3))  # lanes are this machine's
    about = json.loads((out / "data.json").read_text())
    del about["source"]["settings"]["distill.pull"]  # as if made by a version that did not know it
    (out / "data.json").write_text(json.dumps(about))
    as_older(out)
    for source in ([], [str(mine)], [str(other)], [str(out / "config.toml")]):
        assert cli.main([*again, *source]) == 0


def test_resuming_with_the_runs_preset_is_fine_and_with_another_is_not(
    uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["train", "--out", str(uninterrupted), "--resume"]
    assert cli.main([*again, "digits"]) == 0
    capsys.readouterr()
    assert cli.main([*again, "cifar10"]) == 2
    assert "was made from digits with another" in capsys.readouterr().err


def test_resume_passes_over_a_damaged_checkpoint_with_a_warning(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = {**PERADA, "train__rounds": 4}
    assert train(out, **settings) == 0
    wanted, rows = adapters(out), without_clock(out)
    damage(out / "checkpoints" / "round-0004" / "broadcast.safetensors", "one bit")
    capsys.readouterr()
    assert train(out, "--resume", **settings) == 0
    assert "round-0004 is damaged" in capsys.readouterr().err.replace("\n", " ")
    assert adapters(out) == wanted
    assert without_clock(out) == rows


def test_metrics_of_rounds_that_are_trained_again_are_not_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated every round, saved every third: a kill after round 5 goes back to round 3."""
    settings = {"method__name": "perada-no-kd", "train__rounds": 6, "run__checkpoint_every": 3}
    out = tmp_path / "run"
    with pytest.raises(Killed):
        perada.train("digits", set=plain(settings), out=out, callbacks=[OnRound(die_at(5))])
    assert [r["round"] for r in without_clock(out)] == [1, 2, 3, 4, 5]
    assert train(out, "--resume", **settings) == 0
    assert [r["round"] for r in without_clock(out)] == [1, 2, 3, 4, 5, 6]


def die_at(round: int) -> Any:
    def on_round(progress: Any) -> None:
        if progress.round == round:
            raise Killed

    return on_round


def test_an_interruption_between_two_rounds_saves_the_last_one(tmp_path: Path) -> None:
    def interrupt(progress: Any) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    settings = plain({"method__name": "perada-no-kd", "train__rounds": 5, "run__checkpoint_every": 100})
    with pytest.raises(KeyboardInterrupt):
        perada.train("digits", set=settings, out=out, callbacks=[OnRound(interrupt)])
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["round-0002"]


@pytest.mark.parametrize("method", ["standalone", "fedavg"])
def test_full_model_methods_resume_to_the_same_bytes(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"method__name": method, "train__rounds": 4}
    assert train(tmp_path / "whole", **settings) == 0
    with pytest.raises(Killed):
        perada.train("digits", set=plain(settings), out=tmp_path / "cut", device="cpu", callbacks=[OnRound(die_at(2))])
    assert train(tmp_path / "cut", "--resume", **settings) == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def no_space(monkeypatch: pytest.MonkeyPatch, after: str, error: int = errno.ENOSPC) -> None:
    """Makes every write of a file fail once something of the name `after` was renamed into its place."""
    real, full = os.fsync, [not after]

    def renamed(source: Any, target: Any, real: Any = os.replace) -> None:
        real(source, target)
        full[0] = full[0] or Path(target).name == after

    def synced(handle: int) -> None:
        if full[0]:
            raise OSError(error, os.strerror(error))
        real(handle)

    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(os, "fsync", synced)


def test_a_full_disk_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        no_space(patch, "round-0001")
        assert train(out, method__name="perada-no-kd", train__rounds=3) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "No space left on device" in line
    assert line.endswith(f"it is saved up to round 1: fix this, then perada train --out {out} --resume")
    assert train(out, "--resume", method__name="perada-no-kd", train__rounds=3) == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("rounds", [2, 3])
def test_resuming_on_a_full_or_read_only_disk_is_one_line_and_changes_nothing(
    tmp_path: Path, rounds: int, error: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that is finished, and of one that gets a round more."""
    out, settings = tmp_path / "run", {"method__name": "perada-no-kd"}
    assert train(out, **settings, train__rounds=2) == 0
    before = tree(out)
    with monkeypatch.context() as patch:
        no_space(patch, "", error)
        assert train(out, "--resume", **settings, train__rounds=rounds) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert os.strerror(error) in line
    assert line.endswith(f"it is saved up to round 2: fix this, then perada train --out {out} --resume")
    assert tree(out) == before
    assert train(out, "--resume", **settings, train__rounds=rounds) == 0


def test_a_disk_that_is_full_at_once_is_one_line_that_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No round is saved then, and the line must not say that one is. Files of at most 30 kB stand for the disk."""
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30 * 1024, before[1]))
    try:
        assert train(out, method__name="perada-no-kd", train__rounds=1) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    again = f"perada train --out {out} --resume"
    target = out / "checkpoints" / "round-0001"
    assert line == f"error: cannot write {target}: File too large; no round is saved yet: fix this, then {again}"
    assert cli.main(shlex.split(again)[1:]) == 0


def test_small_is_the_run_that_the_flags_describe() -> None:
    """The tests' two ways to say the same thing do."""
    words = flags(**PERADA)
    sets = [words[i + 1] for i in range(0, len(words), 2)]
    parsed = dict(cli.parse_setting(s) for s in sets)
    assert perada.config.resolve("digits", parsed) == small(**PERADA)
