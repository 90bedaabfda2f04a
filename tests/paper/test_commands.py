"""`python -m experiments NAME` and `list`, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import commands, overview
from experiments.__main__ import main as run_experiments
from experiments.plans import experiments
from experiments.trials import NAMES
from perada.errors import Interrupted

from .tiny import two


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`digits` with two runs of two rounds."""
    held = {**experiments(), "digits": two()}
    for module in (commands, overview):
        monkeypatch.setattr(module, "experiments", lambda: held)


def words(home: Path, *more: str) -> list[str]:
    return [*more, "--out", str(home / "runs"), "--results", str(home / "results")]


@pytest.mark.usefixtures("tiny")
def test_an_experiment_from_beginning_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_experiments(words(tmp_path, "digits", "--json", "--minutes", "0.0001")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"]
    assert found["runs_left"] == ["perada-0", "fedavg-0"]
    assert run_experiments(words(tmp_path, "digits")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"digits: 2 of 2 runs done in \d\.\d minutes\n", shown)
    held = json.loads((tmp_path / "results" / "digits" / "fedavg-0.json").read_text())["last"]
    scores = [held["local_test"]["mean"], held["global_test"]["mean"], held["global_model"]["global_test"]]
    row = next(line for line in shown.splitlines() if line.startswith("fedavg-0 "))
    assert row.split() == ["fedavg-0", "1", *(f"{v:.2f}" for v in scores)]
    assert run_experiments(words(tmp_path, "digits", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["experiment"], found["runs_done"], found["runs_left"]) == ("digits", ["perada-0", "fedavg-0"], [])
    assert found["scores"]["fedavg-0"]["Local"] == {"mean": scores[0], "half": None, "seeds": 1}
    assert (found["stopped"], found["settled"], found["begun"], found["minutes_left"]) == (False, None, {}, 0)


@pytest.mark.usefixtures("tiny")
def test_the_list_tells_what_is_left_and_by_which_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed() -> dict[str, dict[str, object]]:
        assert run_experiments(words(tmp_path, "list", "--json")) == 0
        return {one["experiment"]: one for one in json.loads(capsys.readouterr().out)}

    before = listed()
    assert tuple(before) == NAMES
    assert before["main"]["left"] == len(experiments()["main"].trials) >= 15
    assert not before["main"]["measured"]
    assert before["digits"]["minutes_left"] == pytest.approx(2 * 2 / 60), "two rounds each, estimated at a second"
    assert run_experiments(words(tmp_path, "digits")) == 0
    capsys.readouterr()
    after = listed()["digits"]
    assert (after["done"], after["left"], after["minutes_left"]) == (2, 0, 0)
    assert float(str(after["minutes_done"])) > 0
    result = tmp_path / "results" / "digits" / "fedavg-0.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "shared_gpu": True}))
    assert f"done in at most {after['minutes_done']:.1f} minutes" in overview.words(listed()["digits"])
    assert run_experiments(words(tmp_path, "list")) == 0
    assert f"≤{after['minutes_done']:.1f}" in capsys.readouterr().out
    result.unlink()
    again = listed()["digits"]
    assert (again["left"], again["begun"]) == (1, {"fedavg-0": [2, 2]})
    assert not again["measured"], "no FedAvg was measured"
    assert again["minutes_left"] == 0, "its rounds are done"
    assert run_experiments(words(tmp_path, "list")) == 0
    assert "distill-study" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["main", "--minutes", "0"], "--minutes must be above 0"),
        (["main", "--statistics", "s.safetensors"], "changes the file of --weights: give both"),
        (["main", "--weights", "w.safetensors", "--statistics", "s.safetensors"], "no such file: w.safetensors"),
        (["main", "--device", "cpu", "--data", "nowhere"], "nowhere"),
        (["mian"], "No such command 'mian'. Did you mean 'main'?\n"),
        (["document", "--results", "nowhere"], "no such folder: nowhere"),
        (["document", "--results", ".", "--out", "report"], "give a file whose name ends in .md"),
        (["document", "--results", ".", "--out", "folder.md"], "give a file whose name ends in .md"),
        (["digits", "--results", "file"], "cannot write to file/digits: Not a directory"),
        (["list", "--results", "file"], "file is not a folder"),
        (["digits", "--only", ""], "--only is empty"),
        (["digits", "--only", ","], "--only is empty"),
        (["digits", "--data", ""], "--data is empty"),
        (["main", "--weights", "file", "--statistics", "file"], "cannot read file or file: "),
    ],
)
def test_bad_input_is_one_line(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder.md").mkdir()
    assert run_experiments([*more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("error: ")


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise Interrupted(tmp_path)

    monkeypatch.setattr(commands, "run_experiment", stop)
    assert run_experiments(words(tmp_path, "digits")) == 130
    assert capsys.readouterr().err.endswith("The same command continues from there.\n")
