"""`perada compare`: methods times seeds on one split, resumable at any moment, with the paper's table."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import own_images
import pytest
import torch
from small import SMALL, adapters, flags, tree

import perada
from perada.callbacks import OnRound
from perada.cli import main as cli
from perada.cli.watch import Watch
from perada.config import resolve
from perada.errors import InputError, Interrupted, RunError
from perada.experiment import Experiment
from perada.runs.files import write_atomic
from perada.sweep.compare import Comparison, compare
from perada.sweep.workers import share_cores

TINY: dict[str, Any] = {"data__clients": 3, "distill__steps": 1, "distill__candidates": [1]}
METHODS = ["perada", "standalone"]  # not the paper's order
NAMES = [f"{method}-{seed}" for seed in (0, 1) for method in METHODS]
PARTS = {"config.toml", "manifest.json", "data.json", "metrics.jsonl", "summary.json", "checkpoints", "report.html"}


def words(out: Path | str, *more: str, methods: str = ",".join(METHODS), **set: Any) -> list[str]:
    given = [*flags(**{**TINY, **set}), "--jobs", "1", "--out", str(out)]
    return ["compare", "digits", "--methods", methods, "--no-baseline", *given, *more]


def plain(**set: Any) -> dict[str, Any]:
    return {**SMALL, **{k.replace("__", "."): v for k, v in {**TINY, **set}.items()}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds, never disturbed."""
    out = tmp_path_factory.mktemp("compare") / "whole"
    assert cli.main(words(out, "--seeds", "2")) == 0
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def numbers(out: Path) -> list[list[str]]:
    return list(csv.reader((out / "table.csv").read_text().splitlines()))


def plan_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "plan.json").read_text())


def parts_of(run: str) -> set[str]:
    """The files of a run's folder; a method with a personal and a global model notices drift."""
    return PARTS | ({"drift.json"} if run.startswith("perada") else set())


def assert_same_comparison(found: Path, wanted: Path) -> None:
    """Every run's newest checkpoint byte for byte, every plan, every table."""
    for name in NAMES:
        assert adapters(found / name) == adapters(wanted / name), name
        assert {p.name for p in (found / name).iterdir()} == parts_of(name)
    for ending in ("md", "csv", "tex"):
        assert (found / f"table.{ending}").read_bytes() == (wanted / f"table.{ending}").read_bytes()
    assert tree(found / "plan") == tree(wanted / "plan")
    assert plan_of(found) == plan_of(wanted)
    assert not list(found.rglob("*.part"))


# What a comparison writes.


def test_a_comparison_is_a_plan_runs_and_tables(whole: Path) -> None:
    tables = {"table.md", "table.csv", "table.tex", "rounds.csv", "cost.json", "report.html"}
    assert {p.name for p in whole.iterdir()} == {"plan", "plan.json", *tables, *NAMES}
    assert plan_of(whole) == {"source": "digits", "methods": METHODS, "seeds": [0, 1], "set": plain()}
    assert {p.name for p in (whole / "plan").iterdir()} == {f"{name}.toml" for name in NAMES}
    for name in NAMES:
        assert {p.name for p in (whole / name).iterdir()} == parts_of(name)
        assert (whole / "plan" / f"{name}.toml").read_bytes() == (whole / name / "config.toml").read_bytes()
        assert json.loads((whole / name / "summary.json").read_text())["method"] == name.rpartition("-")[0]


def test_all_share_one_split_and_seeds_differ_in_training(whole: Path) -> None:
    runs = {name: perada.load(whole / name) for name in NAMES}
    first = runs[NAMES[0]]
    for run in runs.values():
        assert run.config.data == first.config.data
        for found, wanted in zip(run.federation.clients, first.federation.clients, strict=True):
            for part in ("train", "val", "test"):
                assert np.array_equal(getattr(found, part), getattr(wanted, part))
    for method in METHODS:
        assert [runs[f"{method}-{seed}"].config.run.seed for seed in (0, 1)] == [0, 1]
        assert adapters(whole / f"{method}-0") != adapters(whole / f"{method}-1")


def test_a_run_of_it_is_the_run_that_train_makes(whole: Path, tmp_path: Path) -> None:
    run = perada.train("digits", method="perada", set=plain(), seed=1, out=tmp_path / "alone")
    assert adapters(run.path) == adapters(whole / "perada-1")


def test_the_table_has_the_runs_numbers(whole: Path) -> None:
    head, *rows = numbers(whole)
    assert [r[0] for r in rows] == ["standalone", "perada"], "the paper's order"
    for row in rows:
        found = dict(zip(head, row, strict=True))
        seeds = [json.loads((whole / f"{row[0]}-{s}" / "summary.json").read_text()) for s in (0, 1)]
        means = [s["local_test"]["mean"] for s in seeds]
        assert float(found["local_test_mean"]) == pytest.approx(sum(means) / 2)
        assert float(found["local_test_std_clients"]) == pytest.approx(sum(s["local_test"]["std"] for s in seeds) / 2)
        assert float(found["local_test_std_seeds"]) == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
        assert (found["global_model_global_test_mean"] == "") == (row[0] == "standalone")
        assert int(found["trained"]) == seeds[0]["parameters"]["trained"]


def test_files_and_terminal_have_every_method_and_the_paths(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("report.html", "table.md", "table.csv", "table.tex"):
        text = (whole / name).read_text()
        assert [m for m in METHODS if m not in text] == [], name
    assert not re.search(r'(src|href)="http', (whole / "report.html").read_text())
    assert "mean of 2 seeds" in (whole / "table.md").read_text()
    assert cli.main(["compare", "--out", str(whole), "--resume"]) == 0
    text = capsys.readouterr().out
    for word in (*METHODS, "Local-test", "Global-test", "trained", "sent", "global model of"):
        assert word in text
    assert str(whole / "report.html") in text


@pytest.mark.parametrize("resume", [False, True])
def test_json_is_one_document(resume: bool, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = words(tmp_path / "new", "--json", methods="standalone", train__rounds=1)
    assert cli.main(["compare", "--out", str(whole), "--resume", "--json"] if resume else new) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["path"] == str(whole if resume else tmp_path / "new")
    assert [m["name"] for m in found["methods"]] == (["standalone", "perada"] if resume else ["standalone"])
    assert found["methods"][0]["seeds"] == (2 if resume else 1)


def test_settings_of_one_method_reach_only_that_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FedAvg has no method.lam; `train.lr` in [methods.ditto] is for Ditto only."""
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    own = "[methods.ditto]\ntrain.lr = 0.5\n[methods.mtl]\ntrain.lr = 9\n"
    file.write_text(resolve("digits", plain(train__rounds=1, train__lr=0.03)).toml() + own)
    chosen = ["--methods", "fedavg,ditto", "--set", "method.lam=0.25", "--out", str(out)]
    assert cli.main(["compare", str(file), *chosen]) == 0
    ditto, fedavg = (tomllib.loads((out / n / "config.toml").read_text()) for n in ("ditto-0", "fedavg-0"))
    assert (ditto["train"]["lr"], fedavg["train"]["lr"]) == (0.5, 0.03)
    assert ditto["method"]["lam"] == 0.25
    assert fedavg["method"] == {"name": "fedavg"}
    assert resolve(str(file), {"method.name": "ditto", "train.lr": 0.7}).train.lr == 0.7, "what is typed wins"


# What is refused, before anything is written.

CASES: dict[str, tuple[list[str], list[str]]] = {
    "a setting no method has": (words("new", "--set", "method.lamda=1"), ["did you mean 'method.lam'?"]),
    "another methods setting": (words("new", "--set", "method.mu=1", methods="ditto"), ["'method.mu'"]),
    "an unknown setting": (words("new", "--set", "train.lrr=1"), ["did you mean 'train.lr'?"]),
    "a method as a setting": (words("new", "--set", "method.name=ditto"), ["method.name", "--methods"]),
    "an unknown method": (words("new", methods="fedavg,dito"), ["'dito'", "did you mean 'ditto'?"]),
    "no method": (words("new", methods=""), ["--methods"]),
    "only commas": (words("new", methods=" , "), ["--methods"]),
    "no seed": (words("new", "--seeds", "0"), ["--seeds"]),
    "a folder with something in it": (words("full"), ["full holds something else", "--out"]),
    "a folder with a comparison in it": (words("whole"), ["whole exists", "--resume", "--out"]),
    "a file for a folder": (words("notes.txt"), ["notes.txt"]),
    "resume of nothing": (["compare", "--out", "gone", "--resume"], ["gone is not a comparison"]),
    "resume of something else": (["compare", "--out", "full", "--resume"], ["full is not a comparison"]),
    "resume of a run": (["compare", "--out", "whole/perada-0", "--resume"], ["is not a comparison"]),
    "resume with another setting": (words("whole", "--resume", train__lr=0.5), ["another train.lr"]),
    "resume with another split": (words("whole", "--resume", data__seed=5), ["another data.seed"]),
    "settings for an unknown method": (["compare", "nonsense.toml", "--out", "new"], ["unknown method 'nonsense'"]),
    "an unknown setting for a method": (["compare", "typo.toml", "--out", "new"], ["did you mean 'train.lr'?"]),
    "more clients a round than there are": (words("new", train__cohort=4), ["train.cohort=4", "3 clients"]),
    "a guard without validation data": (words("new", methods="fedavg,feddf", data__val=0), ["distill.guard"]),
    "momentum for a method without": (words("new", methods="fedavg,pfedme", train__momentum=0.9), ["PFedMe"]),
    "resume of a search": (["compare", "--out", "search", "--resume"], ["search is not a comparison"]),
    "no public images": (words("new", methods="standalone,feddf", distill__data="none"), ["distillation needs public"]),
    "a folder below a file": (words("notes.txt/new"), ["notes.txt"]),
    "a name that is too long": (words("a" * 300), ["too long"]),
    "resume with a setting alone": (["compare", "--out", "whole", "--resume", "--set", "train.lr=0.5"], ["train.lr"]),
    "a method on other data": (words("whole", "--resume", methods="mtl", data__size=9), ["another data.size"]),
    "another split for one method": (["compare", "split.toml", *words("new")[2:]], ["data.seed", "one split"]),
    "resume with another source": (["compare", "split.toml", "--out", "whole", "--resume"], ["made from digits"]),
    "resume on a device that is not here": (words("whole", "--resume", "--device", "cuda"), ["run.device=cuda"]),
    "a list for a methods name": (["train", "name.toml", "--out", "new"], ["method.name", "text"]),
}
FILES = {
    **dict.fromkeys(("full/precious", "notes.txt", "search/search.json"), "{}"),
    "nonsense.toml": 'preset = "digits"\n[methods.nonsense]\ntrain.lr = 1',
    "typo.toml": 'preset = "digits"\n[methods.ditto]\ntrain.lrr = 1',
    "split.toml": 'preset = "digits"\n[methods.perada]\ndata.seed = 7',
    "name.toml": 'preset = "digits"\n[method]\nname = ["perada"]',
}
for what in ("[]", '["perada"]', '["perada"], "seeds": [], "set": {}', '1, "seeds": 1, "set": 1', ""):
    CASES[f"damaged, {what}"] = (["compare", "--out", f"damaged-{len(what)}", "--resume"], ["plan.json is damaged"])
    FILES[f"damaged-{len(what)}/plan.json"] = f'{{"source": "digits", "methods": {what}}}'


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    name: str, whole: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given, says = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perada.sweep.compare.train", lambda *args, **kwargs: pytest.fail("something was trained"))
    shutil.copytree(whole, "whole")
    for file, text in FILES.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(text)
    before = tree(tmp_path)
    assert cli.main(given) == 2
    found = capsys.readouterr()
    assert (found.out, len(found.err.splitlines())) == ("", 1)
    assert found.err.startswith("error: ")
    assert [w for w in says if w not in found.err] == []
    assert tree(tmp_path) == before


def test_from_python_methods_are_a_list_or_text_and_the_table_is_rows(whole: Path, tmp_path: Path) -> None:
    given = {"seeds": 1, "set": plain(train__rounds=1)}
    first = perada.compare("digits", methods=["standalone", "fedavg"], out=str(tmp_path / "list"), **given)
    second = perada.compare("digits", methods="standalone, fedavg", out=tmp_path / "text", **given)
    assert (first.path, first.names) == (tmp_path / "list", ["standalone-0", "fedavg-0"])
    rows, again = first.table(), second.table()
    assert all(row.pop("cost")["seconds"] > 0 for row in (*rows, *again))  # which differ
    assert rows == again
    assert [row["name"] for row in first.table()] == ["standalone", "fedavg"]
    assert first.table()[0]["local_test"]["mean"] == first.runs[0].summary["local_test"]["mean"]
    assert [row.method for row in Comparison(whole).standings().rows] == ["standalone", "perada"]


def test_a_method_of_another_package_is_compared_below_ours(tmp_path: Path) -> None:
    names = ["perada.methods.fedprox:FedProx", "fedavg"]
    found = compare("digits", methods=names, set=plain(train__rounds=1), out=tmp_path / "out", baseline=False)
    assert [row["name"] for row in found.table()] == names[::-1]
    assert "| perada.methods.fedprox:FedProx |" in (tmp_path / "out" / "table.md").read_text()


def test_python_refuses_the_same(tmp_path: Path) -> None:
    for given in ({"methods": []}, {"seeds": 0}, {"methods": ["dito"]}, {"set": {"method.name": "ditto"}}):
        with pytest.raises(InputError):
            compare("digits", out=tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


# Interrupted and killed processes.


def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that collects the names of runs trained from now on."""
    seen: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(Path(kwargs["out"]).name)
        return perada.train(*args, **kwargs)

    monkeypatch.setattr("perada.sweep.compare.train", counted)
    return seen


def fingerprint(run: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in run.rglob("*")}


def test_interrupted_in_a_middle_run_it_goes_on_from_there(whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out, begun = tmp_path / "out", []

    def on_round(progress: Any) -> None:
        if begun[-1][2] == "standalone-0" and progress.round == 1:
            raise KeyboardInterrupt

    given = {"methods": METHODS, "seeds": 2, "set": plain(), "out": out, "callbacks": [OnRound(on_round)]}
    with pytest.raises(Interrupted) as stop:
        compare("digits", **given, on_run=lambda *at: begun.append(at))
    assert (begun[0], begun[-1]) == ((0, 4, NAMES[0]), (1, 4, NAMES[1]))
    assert stop.value.path == out
    assert [r[0] for r in numbers(out)[1:]] == ["perada"], "the table of what is finished is there already"
    before, seen = fingerprint(out / NAMES[0]), trained(monkeypatch)
    assert cli.main(["compare", "--out", str(out), "--resume"]) == 0
    assert (seen, fingerprint(out / NAMES[0])) == (NAMES[1:], before)
    assert_same_comparison(out, whole)
    rounds = [json.loads(line)["round"] for line in (out / "standalone-0" / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [1, 2], "the round that was finished is not trained again"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left")])
def test_the_line_that_resumes_can_be_pasted_into_a_shell(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before = (1, "what is finished is saved: ") if isinstance(stop, OSError) else (130, "Continue with: ")
    out, real, rounds = tmp_path / "my runs", Watch.round, []

    def interrupt(self: Watch, progress: Any) -> None:
        rounds.append(progress.round)
        if len(rounds) == 3:  # 0 and 1 of the first run; 0 of the second, before anything of it is saved
            raise stop
        real(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "round", interrupt)
        assert cli.main(words(out, methods="standalone,fedavg", train__rounds=1)) == code
    found = capsys.readouterr()
    assert found.out == ""
    line = found.err.strip().splitlines()[-1]
    assert line.startswith("interrupted" if code == 130 else "error: fedavg-0: ")
    assert line.endswith(f"{before}perada compare --out {shlex.quote(str(out))} --resume")
    assert cli.main(shlex.split(line.split(before)[1])[1:]) == 0
    assert [r[0] for r in numbers(out)[1:]] == ["standalone", "fedavg"]


def test_killed_it_goes_on_and_ends_as_if_nothing_had_happened(whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out, second, end = tmp_path / "out", tmp_path / "out" / NAMES[1] / "metrics.jsonl", time.monotonic() + 90
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "perada", *words(out, "--seeds", "2")]
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as child:
        try:
            while not (second.is_file() and "\n" in second.read_text()) and time.monotonic() < end:
                assert child.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.005)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL
    finished = [n for n in NAMES if (out / n / "report.html").exists()]
    assert 1 <= len(finished) < len(NAMES), "it was killed too late to test anything"
    seen = trained(monkeypatch)
    assert cli.main(["compare", "--out", str(out), "--resume", "--device", "cpu"]) == 0
    assert seen == [n for n in NAMES if n not in finished]
    for name in NAMES:
        assert adapters(out / name) == adapters(whole / name)
    assert numbers(out) == numbers(whole)


def test_a_killed_process_is_one_line_that_says_how_to_resume(tmp_path: Path) -> None:
    line = r"^a training process was killed .*; what is finished is saved: .* perada compare --out .* --resume$"
    with pytest.raises(RunError, match=line), Comparison(tmp_path).working():
        share_cores(["a", "b"], 2, partial(os._exit, 9), pytest.fail, print)


@pytest.mark.parametrize("lost", [PARTS, {"report.html"}, {"report.html", "summary.json"}])
def test_killed_as_a_run_began_or_ended_it_goes_on(lost: set[str], copy: Path, whole: Path, monkeypatch: Any) -> None:
    """Killed before config.toml was renamed, or before the report was written: no finished round is trained again."""
    for part in lost:
        (shutil.rmtree if part == "checkpoints" else os.unlink)(copy / NAMES[1] / part)
    if lost == PARTS:
        (copy / NAMES[1] / ".config.toml.123.part").write_text("[data]")
    seen, steps, real = trained(monkeypatch), [], Experiment.update
    monkeypatch.setattr(Experiment, "update", lambda self, uploads: steps.append(1) or real(self, uploads))
    assert cli.main(["compare", "--out", str(copy), "--resume"]) == 0
    assert (seen, len(steps)) == ([NAMES[1]], 2 if lost == PARTS else 0)
    assert_same_comparison(copy, whole)


@pytest.mark.parametrize("source", ["digits", "mine.toml"])
def test_killed_before_its_plan_was_whole_it_starts_anew(
    source: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new comparison in the same folder uses nothing of the killed one, and not its source either."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('preset = "digits"\n[train]\nclip = 0.5\n')

    def die(path: Path, data: bytes) -> None:
        if path.name == "plan.json":
            raise SystemExit
        write_atomic(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("perada.sweep.plan.write_atomic", die)
        with pytest.raises(SystemExit):
            compare(source, methods=METHODS, set=plain(), out="out")
    assert (len(list(Path("out/plan").iterdir())), Path("out/plan.json").exists()) == (2, False)
    assert cli.main(["compare", "--out", "out", "--resume"]) == 2
    assert cli.main(words("out", "--jobs", "2" if source == "digits" else "1")) == 0
    seen = trained(monkeypatch)
    assert cli.main(["compare", "--out", "out", "--resume", "--seeds", "2"]) == 0
    assert seen == NAMES[2:]
    assert_same_comparison(Path("out"), whole)


def test_what_is_added_is_computed_as_the_others_were(copy: Path) -> None:
    """Added runs have the precision of the old ones: here float64, which works without a GPU."""
    for name in NAMES:
        for file in (copy / f"plan/{name}.toml", copy / name / "config.toml"):
            file.write_text(re.sub('precision = ".*"', 'precision = "fp64"', file.read_text()))
    assert cli.main(words(copy, "--resume", methods="perada,mtl")) == 0
    assert resolve(str(copy / "mtl-0/config.toml")).run.precision == "fp64"


def test_resume_adds_methods_and_keeps_the_others(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = {n: fingerprint(copy / n) for n in NAMES}, trained(monkeypatch)
    assert cli.main(words(copy, "--resume", "--device", "cpu", methods="perada,mtl")) == 0
    assert seen == ["mtl-0", "mtl-1"]
    assert {n: fingerprint(copy / n) for n in NAMES} == before
    assert plan_of(copy) == {"source": "digits", "methods": [*METHODS, "mtl"], "seeds": [0, 1], "set": plain()}
    assert [r[:2] for r in numbers(copy)[1:]] == [["standalone", "2"], ["mtl", "2"], ["perada", "2"]]
    assert "mtl" in (copy / "report.html").read_text()
    plan, mine, other = (resolve(str(copy / f)) for f in ("plan/mtl-0.toml", "mtl-0/config.toml", "plan/perada-0.toml"))
    assert plan.data == mine.data == other.data
    assert (plan.run.device, mine.run.device) == ("auto", "cpu"), "the plan is for any machine"
    assert cli.main(["compare", "--out", str(copy), "--resume", "--seeds", "3"]) == 0
    assert seen[2:] == ["perada-2", "standalone-2", "mtl-2"]


@pytest.mark.parametrize(("here", "more"), [(".", ["--data", "new/mine.npz"]), ("old/sub", [])])
def test_resume_finds_the_data(here: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data moved, or the current folder is another one: relative paths still mean the same."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    Path("old/sub").mkdir(parents=True)
    np.savez("old/mine.npz", images=images, labels=np.arange(60) % 3, site=np.arange(60) // 20)
    small = {"model.weights": "random", "data.size": 16, "train.rounds": 1, "train.epochs": 1}
    compare(data="old/mine.npz", methods="standalone", set=small, out="out")
    Path("old").rename("new" if more else "old")
    monkeypatch.chdir(here)
    assert cli.main(["compare", "--out", str(tmp_path / "out"), "--resume", "--methods", "mtl", *more]) == 0
    assert [r[0] for r in numbers(tmp_path / "out")[1:]] == ["standalone", "mtl"]


def test_resume_without_out_takes_the_newest(whole: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("compare-digits-old", "compare-digits-3", "compare-digits-2", "compare-digits")):
        os.utime(shutil.copytree(whole, f"runs/{name}"), (1e9 - age, 1e9 - age))
    assert cli.main(["compare", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "runs/compare-digits-3"


def test_on_ones_own_images_standalone_is_always_compared(tmp_path: Path) -> None:
    for n in range(24):
        own_images.picture(
            tmp_path / "sites" / "ab"[n % 2] / ("dark", "light")[n // 2 % 2] / f"{n}.png", 100 * (n // 2 % 2)
        )
    said = list[str]()
    small = {**own_images.TINY, "data.test": 0.25, "train.batch": 4}
    chosen = {"methods": ["fedavg"], "data": tmp_path / "sites", "set": small, "out": tmp_path / "out"}
    found = compare("folder", **chosen, say=said.append)
    assert [row["name"] for row in found.table()] == ["standalone", "fedavg"]
    assert any(line.startswith("standalone is compared, too") for line in said)
