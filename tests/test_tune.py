"""`perada tune`: the paper's grids, judged only by the clients' validation data."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SMALL, tree

import perada
from perada.cli import main as cli
from perada.cli.watch import Watch
from perada.client.scores import Scores
from perada.config import parse_grid, resolve
from perada.data import Federation, build_federation
from perada.errors import InputError
from perada.experiment import Experiment
from perada.runs.moment import Evaluation
from perada.sweep.tune import Search, tune

# As in small.py, without the settings that are searched; validation data for scores that differ.
TINY: dict[str, Any] = {k: v for k, v in SMALL.items() if k not in ("train.lr", "distill.lr")}
TINY |= {"data.clients": 3, "data.val": 0.2, "data.server_val": 0.6, "train.rounds": 1, "train.batch": 16}
TINY |= {"distill.steps": 1, "distill.candidates": [1]}
RATES, STEPS = [1e-4, 0.05], [1e-3, 0.05]
LAM = {"method.lam": 1.0}  # given, so not searched


def sets(settings: dict[str, Any]) -> list[str]:
    return [w for k, v in settings.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


def words(out: Path | str, *more: str, methods: str = "fedavg,perada", source: str = "digits", **set: Any) -> list[str]:
    given = sets({**TINY, **LAM, **{k.replace("__", "."): v for k, v in set.items()}})
    grid = ["--grid", "train.lr=0.0001,0.05", "--grid", "distill.lr=0.001,0.05"]
    return ["tune", source, "--methods", methods, *given, *grid, "--out", str(out), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two points of FedAvg and four of PerAda, never disturbed."""
    out = tmp_path_factory.mktemp("tune") / "whole"
    assert cli.main(words(out)) == 0
    return out


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_search_leaves_its_plan_every_result_and_what_was_chosen(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {"search.json", "plan", "results.jsonl", "tuned.toml"}
    assert {p.name for p in (whole / "plan").iterdir()} == {"fedavg.toml", "perada.toml"}
    plan = json.loads((whole / "search.json").read_text())
    assert plan.keys() == {"source", "methods", "set", "grid", "points"}
    wanted: list[Any] = [("fedavg", {"train.lr": lr}) for lr in RATES]
    wanted += [("perada", {"train.lr": lr, "distill.lr": step}) for lr in RATES for step in STEPS]
    for found in (results(whole), plan["points"]):
        assert [(r["method"], r["settings"]) for r in found] == wanted
    assert len({r["local_val"] for r in results(whole)}) > 3, "equal scores choose nothing"


def test_json_is_one_document(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--out", str(whole), "--resume", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found == {"path": str(whole / "tuned.toml"), "chosen": Search(whole).best(), "results": results(whole)}


def test_the_choice_is_the_best_mean_on_local_validation_data(whole: Path, tmp_path: Path) -> None:
    """Every point of FedAvg and one of PerAda trained by itself: the same scores to the last bit."""
    scores = {json.dumps(r["settings"]): r["local_val"] for r in results(whole) if r["method"] == "fedavg"}
    for i, lr in enumerate(RATES):
        run = perada.train("digits", method="fedavg", set={**TINY, "train.lr": lr}, out=tmp_path / str(i))
        assert run.summary["local_val"]["mean"] == scores[json.dumps({"train.lr": lr})]
    point = next(r for r in results(whole) if r["method"] == "perada" and r["settings"]["train.lr"] == 0.05)
    alone = perada.train("digits", set={**TINY, **LAM, **point["settings"]}, out=tmp_path / "perada")
    assert alone.summary["local_val"]["mean"] == point["local_val"]
    tuned = tomllib.loads((whole / "tuned.toml").read_text())["methods"]
    for method, own in (("fedavg", {}), ("perada", LAM)):
        best = max((r for r in results(whole) if r["method"] == method), key=lambda r: r["local_val"])
        found = {f"{s}.{k}": v for s, keys in tuned[method].items() for k, v in keys.items()}
        config = resolve("digits", {**TINY, **own, **best["settings"], "method.name": method})
        mine = {f"method.{k}": v for k, v in config.method.items() if k != "name"}
        assert found == {**mine, **best["settings"]}, "its own settings and what was chosen, nothing else"
        assert resolve(str(whole / "tuned.toml"), {"method.name": method}) == config


def test_of_equal_scores_the_first_is_chosen_and_missing_scores_are_skipped(tmp_path: Path) -> None:
    search = Search(tmp_path)
    (tmp_path / "search.json").write_text(json.dumps({"methods": ["fedavg", "ditto", "mtl"]}))
    for method, lr, score in (
        *(("fedavg", 1.0, 50.0), ("fedavg", 2.0, 70.0), ("fedavg", 3.0, 70.0), ("fedavg", 4.0, 69.9)),
        *(("ditto", 1.0, None), ("ditto", 2.0, 0.0), ("mtl", 1.0, None)),
    ):
        search.record({"method": method, "settings": {"train.lr": lr}, "local_val": score})
    assert {m: r["settings"]["train.lr"] for m, r in search.best().items()} == {"fedavg": 2.0, "ditto": 2.0}
    assert [(row["method"], row["points"]) for row in search.table()] == [("fedavg", 4), ("ditto", 2)]


def changed(part: str) -> Callable[..., Federation]:
    """Returns a `build_federation` that makes every label of one part of the clients' data wrong."""

    def build(*args: Any) -> Federation:
        found = build_federation(*args)
        targets = found.targets.clone()
        for client in found.clients:
            index = torch.from_numpy(getattr(client, part))
            targets[index] = (targets[index] + 1 + index % 8) % 10
        assert not torch.equal(targets, found.targets)
        return replace(found, targets=targets)

    return build


def test_poisoned_test_labels_change_nothing_and_poisoned_validation_labels_do(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("test", "val"):
        monkeypatch.setattr("perada.config.objects.build_federation", changed(part))
        assert cli.main(words(tmp_path / part)) == 0
    assert tree(tmp_path / "test") == tree(whole)
    pairs = zip(results(tmp_path / "val"), results(whole), strict=True)
    assert all(found["local_val"] != wanted["local_val"] for found, wanted in pairs)


def test_wrong_test_labels_do_change_test_scores(tmp_path: Path) -> None:
    """The same run, tested with true and wrong labels: this shows that the test above can fail."""
    found = []
    for i, build in enumerate((build_federation, changed("test"))):
        federation = build(resolve("digits", TINY).data, torch.device("cpu"))
        run = perada.train("digits", method="fedavg", set=TINY, out=tmp_path / str(i), federation=federation)
        found.append(run.summary)
    assert found[0]["local_val"] == found[1]["local_val"]
    assert found[0]["local_test"]["mean"] != found[1]["local_test"]["mean"]


class Untouchable:
    """Stands in for test data; every use of it fails."""

    def refuse(self, *args: object, **kwargs: object) -> Any:
        raise AssertionError("test data were touched")

    __len__ = __iter__ = __getitem__ = __array__ = __getattr__ = __bool__ = refuse


def test_test_data_are_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shifts asked for, an evaluation every round and a guard at the clients."""

    def build(*args: Any) -> Federation:
        found = build_federation(*args)
        return replace(found, clients=tuple(replace(c, test=Untouchable()) for c in found.clients))

    monkeypatch.setattr("perada.config.objects.build_federation", build)
    given = {**TINY, **LAM, "train.rounds": 2, "run.shifts": True, "run.eval_every": 1}
    grid = {"train.lr": [0.05], "distill.lr": [1e-3], "method.alpha": [0.5]}
    found = tune("digits", methods="perada,apfl", set=given, grid=grid, out=tmp_path / "out")
    assert found.best().keys() == {"perada", "apfl"}
    federation = build(resolve("digits", TINY).data, torch.device("cpu"))
    with pytest.raises(AssertionError, match="touched"):  # a plain run does touch them
        perada.train("digits", method="fedavg", set=TINY, out=tmp_path / "run", federation=federation)


def planned(out: Path, source: str = "digits", **given: Any) -> dict[str, dict[str, list[Any]]]:
    """Method -> key -> values to try; nothing is trained."""

    def stop(at: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(source, out=out, on_run=stop, **{"set": TINY, **given})
    found: dict[str, dict[str, dict[Any, None]]] = {}
    points = json.loads((out / "search.json").read_text())["points"]
    for point in points:
        keys = found.setdefault(point["method"], {})
        for key, value in point["settings"].items():
            keys.setdefault(key, {})[value] = None
    every = [(m, dict(zip(g, v, strict=True))) for m, g in found.items() for v in product(*g.values())]
    assert [(p["method"], p["settings"]) for p in points] == every, "every combination, once"
    return {m: {k: list(v) for k, v in keys.items()} for m, keys in found.items()}


LR, SERVER = [5e-4, 1e-3, 5e-3, 1e-2, 0.02], [1e-5, 1e-4, 1e-3, 1e-2]  # 0.02 is the digits preset's own
SPEC: dict[str, dict[str, list[float]]] = {
    **{m: {"train.lr": LR} for m in ("standalone", "fedavg", "fedrep")},
    **{m: {"train.lr": LR, "method.lam": [0.1, 1.0]} for m in ("ditto", "pfedme", "mtl", "perada-no-kd")},
    "apfl": {"train.lr": LR, "method.alpha": [0.1, 0.3, 0.5, 0.7]},
    "perada": {"train.lr": LR, "distill.lr": SERVER, "method.lam": [0.1, 1.0]},
    "feddf": {"train.lr": LR, "distill.lr": SERVER},
}


def test_the_grids_are_the_papers_but_for_what_is_given_or_not_used(tmp_path: Path) -> None:
    assert planned(tmp_path / "out", methods=list(SPEC)) == SPEC
    found = planned(tmp_path / "a", methods="perada,fedavg", set={**TINY, **LAM, "train.lr": 0.2})
    assert found == {"perada": {"distill.lr": SERVER}, "fedavg": {}}
    assert resolve(str(tmp_path / "a/plan/fedavg.toml")).train.lr == 0.2
    found = planned(tmp_path / "b", methods="perada", set={**TINY, "distill.steps": 0})
    assert found["perada"].keys() == {"train.lr", "method.lam"}


def test_given_values_replace_the_grid_or_add_to_it(tmp_path: Path) -> None:
    given = {"train.lr": [0.3, 0.3], "train.epochs": [2, 1, 2], "method.lam": [5.0], "distill.lr": [0.5]}
    both = {k: v for k, v in TINY.items() if k != "train.epochs"}
    found = planned(tmp_path / "out", methods="ditto,fedavg,feddf", set=both, grid=given)
    wanted = {"train.lr": [0.3], "train.epochs": [2, 1]}  # each value once, as they come
    assert found["ditto"] == {**wanted, "method.lam": [5.0]}
    assert found["feddf"] == {**wanted, "distill.lr": [0.5]}
    assert found["fedavg"] == wanted, "it has no λ and does not distil"


def test_the_tune_section_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "digits"\n[tune]\ntrain.lr = [0.1, 0.2]\nmethod.lam = [3]\n')
    assert planned(tmp_path / "a", str(file), methods="ditto")["ditto"] == {"train.lr": [0.1, 0.2], "method.lam": [3]}
    found = planned(tmp_path / "b", str(file), methods="ditto", grid={"train.lr": [0.7]})
    assert found["ditto"] == {"train.lr": [0.7], "method.lam": [3]}, "what is typed wins"


def test_grids_from_the_command_line() -> None:
    assert parse_grid("train.lr=0.1,.5,1") == ("train.lr", [0.1, 0.5, 1])
    assert parse_grid(" train.lr = [1e-3, 1e-2] ") == ("train.lr", [1e-3, 1e-2])
    assert parse_grid("train.weighting=samples,uniform") == ("train.weighting", ["samples", "uniform"])
    for text in ("train.lr", "train.lr=", "train.lr=,", "train.lr=[]", "=1", "", "="):
        with pytest.raises(InputError, match=r"section\.key=value"):
            parse_grid(text)


# What is refused, before anything is written.

CASES: dict[str, tuple[list[str], list[str]]] = {
    "no validation data": (words("new", data__val=0), ["data.val"]),
    "an unknown key": (words("new", "--grid", "train.lrr=1,2"), ["did you mean 'train.lr'?"]),
    "a bad value at the end": (words("new", "--grid", "train.lr=0.1,-1"), ["train.lr", "-1"]),
    "more clients a round than there are": (words("new", train__cohort=4), ["train.cohort=4"]),
    "a folder with something in it": (words("full"), ["full holds something else"]),
    "a folder with a search in it": (words("whole"), ["whole exists", "--resume"]),
    "resume of nothing": (["tune", "--out", "gone", "--resume"], ["gone is not a search"]),
    "resume of something else": (["tune", "--out", "full", "--resume"], ["full is not a search"]),
    "a tune section without lists": (words("new", source="scalar.toml"), ["[tune] train.lr", "a list"]),
    "a tune section with an unknown key": (words("new", source="typo.toml"), ["did you mean 'train.lr'?"]),
    "an unknown key of the methods": (words("new", "--grid", "method.lamda=1,2"), ["'method.lamda'"]),
    "a split as a grid": (words("new", "--grid", "data.seed=1,2"), ["data.seed cannot be searched"]),
    "resume with another grid": (["tune", "--out", "whole", "--resume", "--grid", "train.lr=5"], ["another grid"]),
    "resume of a comparison": (["tune", "--out", "other", "--resume"], ["other is not a search"]),
    "no public images": (words("new", distill__data="none"), ["distillation needs public"]),
    "a folder below a file": (words("notes.txt/new"), ["notes.txt"]),
    "given and searched": (words("new", "--grid", "distill.steps=1,2"), ["distill.steps", "--set", "--grid"]),
    "another split for one method": (words("new", source="split.toml"), ["data.seed", "one split"]),
    "a bad point at the end": (words("new", "--grid", "train.momentum=0,0.9", methods="pfedme"), ["PFedMe"]),
    "resume with another setting": (words("whole", "--resume", train__clip=1), ["another train.clip"]),
    "resume with other methods": (words("whole", "--resume", methods="perada"), ["other methods"]),
    "resume with another source": (["tune", "split.toml", "--out", "whole", "--resume"], ["made from digits"]),
    "resume on a device that is not here": (words("whole", "--resume", "--device", "cuda"), ["run.device=cuda"]),
    "resume of a damaged plan": (["tune", "--out", "cut", "--resume"], ["cut/search.json is damaged"]),
    "resume of half a plan": (["tune", "--out", "half", "--resume"], ["half/search.json is damaged"]),
}
FILES = {"full/precious": "mine", "notes.txt": "mine", "other/plan.json": "{}", "half/search.json": '{"set": {}}'}
FILES |= {"cut/search.json": '{"sour', "split.toml": 'preset = "digits"\n[methods.perada]\ndata.seed = 7'}
FILES |= {"scalar.toml": "[tune]\ntrain.lr = 3", "typo.toml": "[tune]\ntrain.lrr = [3]"}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(
    name: str, whole: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given, says = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perada.sweep.tune.validated", lambda *args, **more: pytest.fail("something was trained"))
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


def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that collects the rounds trained from now on."""
    seen, real = [], Experiment.update
    monkeypatch.setattr(Experiment, "update", lambda self, found: seen.append(self.now.round) or real(self, found))
    return seen


def test_interrupted_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """After round 1 of 2 of the second of three points: one round and one point are left."""
    given = {"methods": "fedavg", "set": {**TINY, "train.rounds": 2}, "grid": {"train.lr": [0.01, 0.05, 0.1]}}
    tune("digits", **given, out=tmp_path / "whole")
    seen, out = [], tmp_path / "my search"

    def interrupt(self: Any, progress: Any) -> None:
        seen.append(progress.round)
        if seen == [0, 1, 2, 0, 1]:
            raise KeyboardInterrupt

    grid = ["--grid", "train.lr=0.01,0.05,0.1", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "round", interrupt)
        assert cli.main(["tune", "digits", "--methods", "fedavg", *sets(given["set"]), *grid]) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.endswith(f"Continue with: perada tune --out {shlex.quote(str(out))} --resume")
    assert not (out / "tuned.toml").exists()
    rounds = steps(monkeypatch)
    assert cli.main(shlex.split(line.split("Continue with: ")[1])[1:]) == 0
    assert rounds == [1, 0, 1], "what was finished is trained again"
    assert tree(out) == tree(tmp_path / "whole")
    assert cli.main(["tune", "--out", str(out), "--resume"]) == 0
    assert len(rounds) == 3


def test_killed_it_goes_on_and_chooses_the_same(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, end = tmp_path / "out", time.monotonic() + 90
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "perada", *words(out)]
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as child:
        try:
            while not (out / "results.jsonl").is_file() and child.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()
    done = len(results(out))
    assert 1 <= done < 6, "it was killed too late to test anything"
    rounds = steps(monkeypatch)
    assert cli.main(["tune", "--out", str(out), "--resume", "--device", "cpu"]) == 0
    assert len(rounds) <= 6 - done
    assert {k: v for k, v in tree(out).items() if k[0] != "."} == tree(whole)


def test_killed_before_its_plan_was_whole_it_starts_anew(tmp_path: Path) -> None:
    planned(tmp_path, methods="fedavg,ditto")
    (tmp_path / "search.json").rename(tmp_path / ".search.json.123.part")  # the last name it gives
    assert {p.name for p in tmp_path.iterdir()} == {"plan", ".search.json.123.part"}
    with pytest.raises(InputError, match="not a search"):
        tune(out=tmp_path, resume=True)
    assert planned(tmp_path, methods="fedavg") == {"fedavg": {"train.lr": LR}}


def test_train_and_compare_take_what_was_chosen(whole: Path, tmp_path: Path) -> None:
    tuned, out = whole / "tuned.toml", tmp_path / "out"
    assert cli.main(["compare", str(tuned), "--methods", "fedavg,perada,standalone", "--out", str(out)]) == 0
    assert cli.main(["train", str(tuned), "--method", "perada", "--out", str(tmp_path / "run")]) == 0
    best = Search(whole).best()
    for method, path in (("fedavg", out / "fedavg-0"), ("perada", out / "perada-0"), ("perada", tmp_path / "run")):
        assert perada.load(path).config == resolve(str(tuned), {"method.name": method})
        assert perada.load(path).summary["local_val"]["mean"] == best[method]["local_val"]
    assert perada.load(out / "standalone-0").config.train == resolve(str(whole / "plan/fedavg.toml")).train


@pytest.mark.parametrize(
    ("text", "methods", "set", "key", "wanted"),
    [
        ("", "fedavg,ditto", {"method.lam": 0.25}, "method.lam", 0.25),
        ("[method]\npersonal_lr = 0.5\n", "fedavg,ditto", {}, "method.personal_lr", 0.5),
        ("", "apfl,feddyn", {}, "method.alpha", 0.1),
        ("[methods.fedavg]\ntrain.clip = 2.0\n", "fedavg,ditto", {}, "train.clip", 0.0),
        ("[methods.ditto]\ntrain.clip = 2.0\n", "fedavg,ditto", {}, "train.clip", 2.0),
    ],
)
def test_every_method_is_searched_and_written_with_its_own_settings(
    text: str, methods: str, set: dict[str, Any], key: str, wanted: float, tmp_path: Path, monkeypatch: Any
) -> None:
    file, seen = tmp_path / "mine.toml", []
    file.write_text('preset = "digits"\n' + text)

    def trained(home: Path, path: Path, config: Any, *rest: Any, **more: Any) -> Any:
        seen.append(config)
        return Evaluation(1, {"local_val": Scores({"client-00": 1.0})})

    monkeypatch.setattr("perada.sweep.tune.validated", trained)
    monkeypatch.setattr("perada.sweep.tune.shutil.rmtree", lambda path: None)
    tune(str(file), methods=methods, set={**TINY, **set}, grid={"train.lr": [0.05]}, out=tmp_path / "out")
    written = resolve(str(tmp_path / "out" / "tuned.toml"), {"method.name": methods.split(",")[-1]})
    section, _, name = key.partition(".")  # of the last method
    assert [c.as_dict()[section][name] for c in (seen[-1], written)] == [wanted, wanted]


def test_a_method_of_another_package_is_searched_and_its_choice_is_read_again(tmp_path: Path) -> None:
    prox = "perada.methods.fedprox:FedProx"
    grid = {"train.lr": [0.05], "method.mu": [0.5]}
    found = tune("digits", methods=["fedavg", prox], set=TINY, grid=grid, out=tmp_path / "out")
    assert list(found.best()) == ["fedavg", prox]
    config = resolve(str(tmp_path / "out" / "tuned.toml"), {"method.name": prox})
    assert (config.method["mu"], config.train.lr) == (0.5, 0.05)


def test_a_grid_of_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--grid", "train.lr=0.05", "--grid", "train.weighting=samples,uniform"]
    assert cli.main(["tune", "digits", "--methods", "fedavg", *sets(TINY), *grid, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.startswith("2 trainings\n")
    assert [r["settings"]["train.weighting"] for r in results(tmp_path / "out")] == ["samples", "uniform"]


def test_a_grid_of_lists(tmp_path: Path) -> None:
    given = {k: v for k, v in TINY.items() if k != "distill.candidates"}
    grid = {"train.lr": [0.05], "distill.lr": [1e-3], "distill.candidates": [[1], [1, 2]]}
    tune("digits", methods="feddf", set=given, grid=grid, out=tmp_path / "out")
    assert [r["settings"]["distill.candidates"] for r in results(tmp_path / "out")] == [[1], [1, 2]]
