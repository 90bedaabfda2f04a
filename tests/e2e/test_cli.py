"""The commands a user types: training, looking things up, and what the shell sees of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import said, strict
from PIL import Image
from small import adapters, flags
from typer.main import get_command

import perada
from perada import __main__
from perada.cli import main as cli
from perada.methods import REGISTRY

COMMANDS = ["train", "evaluate", "bounds", "predict", "export", "report", "partition", "params", "methods", "presets"]


# Training.


def test_train_writes_a_run_folder_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    text = said(capsys, "train", "digits", *flags(), "--out", str(out))
    assert "perada" in text
    assert str(out) in text.replace("\n", "")
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.toml",
        "manifest.json",
        "data.json",
        "metrics.jsonl",
        "summary.json",
        "drift.json",
        "checkpoints",
        "report.html",
    }
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["round-0001", "round-0002"]


def test_metrics_have_a_row_for_every_evaluated_round(run: Path) -> None:
    rows = [strict(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rows] == [1, 2]
    for row in rows:
        for split in ("local_test", "local_val", "global_test"):
            assert row[split].keys() == {"mean", "std", "per_client"}
            assert list(row[split]["per_client"]) == [f"client-{m:02d}" for m in range(4)]
        assert row["bytes_up"] > 0
        assert row["bytes_down"] > 0
        assert row["seconds"] > 0
    assert rows[1]["bytes_up"] == 2 * rows[0]["bytes_up"]


def test_train_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    found = strict(said(capsys, "train", "digits", *flags(train__rounds=1), "--out", str(out), "--json"))
    assert found["run"] == str(out)
    assert found["round"] == 1
    assert found["method"] == "perada"
    assert Path(found["report"]).is_file()


def test_eval_every_spares_evaluations_but_not_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=5, run__eval_every=2, method__name="perada-no-kd")
    assert cli.main(["train", "digits", *words, "--out", str(out)]) == 0
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [2, 4, 5]


@pytest.mark.parametrize("method", REGISTRY)
def test_every_method_trains(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=1)
    found = strict(said(capsys, "train", "digits", "--method", method, *words, "--out", str(out), "--json"))
    assert found["method"] == method
    assert found["bytes_up"] == (0 if method == "standalone" else found["bytes_up"])
    whole = "full", "adapter"  # of the partial methods no whole model is at the server; MTL's is a mean
    parts = REGISTRY[method]().parts
    assert (found["global_model"] is not None) == (
        parts.shares in whole and parts.withholds is None and method != "mtl"
    )
    assert perada.load(out).clients == tuple(f"client-{m:02d}" for m in range(4))


def test_shifted_test_sets_at_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=1, run__shifts=True, method__name="perada-no-kd")
    found = strict(said(capsys, "train", "digits", *words, "--out", str(out), "--json"))
    assert 0 <= found["shifted"]["mean"] <= 100


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two sites of cats (bright) and dogs (dark)."""
    draw = np.random.default_rng(0)
    for site in ("north", "south"):
        for name, level in (("cat", 200), ("dog", 60)):
            for i in range(12):
                path = tmp_path / "photos" / site / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = draw.integers(-40, 40, (10, 12, 3))
                Image.fromarray((level + noise).clip(0, 255).astype(np.uint8)).save(path)
    return tmp_path / "photos"


def test_your_own_folder_from_training_to_prediction(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "run", ["--set", "data.size=8", "--set", "train.cohort=2", "--set", "train.batch=4"]
    words += ["--set", "model.backbone=resnet8", "--set", "model.pretrain_rounds=2", "--set", "train.rounds=2"]
    found = strict(said(capsys, "train", "folder-fedavg", "--data", str(photos), *words, "--out", str(out), "--json"))
    assert list(found["local_test"]["per_client"]) == ["north", "south"]
    image = photos / "south" / "cat" / "3.png"
    predicted = strict(said(capsys, "predict", str(out), "--client", "south", str(image), "--json"))
    assert predicted[0]["probabilities"].keys() == {"cat", "dog"}
    assert strict(said(capsys, "partition", "folder", "--data", str(photos), "--json"))["classes"] == ["cat", "dog"]


# Names and lanes.


def test_the_beginning_of_a_name_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--method", "fedalt"]) == 2
    assert capsys.readouterr().err == "error: unknown method 'fedalt': did you mean 'fedalt-adapter'?\n"


@pytest.mark.parametrize("lanes", ["0", "-1", "many", "1.5", ""])
def test_lanes_are_a_number_or_auto(lanes: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["train", "digits", "--lanes", lanes, "--out", str(tmp_path / "r")]) == 2
    assert "auto, or a number from 1" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_lanes_may_be_given_anew_when_a_run_is_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another machine has another memory."""
    words = ["train", "digits", *flags(train__rounds=1), "--out", str(tmp_path / "r")]
    assert cli.main([*words, "--lanes", "1"]) == 0
    assert "1 lane at once" in (found := capsys.readouterr().err)
    assert "4 lanes take turns" in found
    more = ["train", "--resume", "--set", "train.rounds=2", "--lanes", "auto", "--out", str(tmp_path / "r")]
    assert cli.main(more) == 0
    assert "4 lanes at once" in capsys.readouterr().err


# Looking things up.


@pytest.mark.parametrize(
    ("backbone", "classes", "full", "adapter"),
    [
        ("resnet18", 10, 11_181_642, 1_413_258),
        ("resnet18", 65, 11_209_857, 1_441_473),
        ("resnet34", 65, 21_318_017, 2_578_625),
    ],
)
def test_params_are_the_papers(
    backbone: str, classes: int, full: int, adapter: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = strict(said(capsys, "params", backbone, "--classes", str(classes), "--json"))
    assert (found["full"], found["adapter"]) == (full, adapter)
    assert found["feature_extractor"] == full - found["output"]
    assert found["buffers"].keys() == found.keys() - {"backbone", "classes", "buffers"}


def test_params_of_the_groups_of_resnet18(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "params", "resnet18", "--json"))
    wanted = {"input": 4_731_968, "output": 5_130, "batch_norm": 7_808, "adapter_modules": 1_400_320}
    assert {k: found[k] for k in wanted} == wanted
    assert found["full"] + found["adapter_modules"] == 12_581_962
    assert "11,181,642" in said(capsys, "params", "resnet18")


def test_methods_say_what_they_train_and_send(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["name"]: one for one in strict(said(capsys, "methods", "--json"))}
    assert found.keys() == REGISTRY.keys()
    sizes = {name: (one["trained"], one["communicated"]) for name, one in found.items()}
    assert sizes["perada"] == sizes["perada-no-kd"] == (2 * 1_413_258, 1_413_258)
    assert sizes["standalone"] == (11_181_642, 0)
    assert sizes["fedavg"] == (11_181_642, 11_181_642)
    assert "perada-no-kd" in said(capsys, "methods")


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "presets", "--json"))
    assert {"digits", "folder", "folder-fedavg"} <= {one["name"] for one in found}
    assert all(one["description"] for one in found)
    assert "digits" in said(capsys, "presets")


def test_partition_says_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "partition", "digits", "--json", "--set", "data.clients=5"))
    assert len(found["clients"]) == 5
    for client in found["clients"]:
        assert sum(client["counts"]) == client["train"]
    total = sum(c["train"] + c["val"] + c["test"] for c in found["clients"])
    assert total == 1797
    assert 0 < found["unlikeness"] <= 1
    text = said(capsys, "partition")
    assert "client-19" in text


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == f"perada {perada.__version__}\n"
    text = said(capsys, "--help")
    assert all(command in text for command in COMMANDS)


def _commands(group: Any, *before: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield " ".join([*before, name])
        yield from _commands(command, *before, name) if hasattr(command, "commands") else ()


@pytest.mark.parametrize("command", list(_commands(get_command(cli.app))))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, *text = [line for line in said(capsys, *command.split(), "--help").splitlines() if line]
    assert usage.startswith("Usage: ")
    assert f" {command} " in usage
    assert text[0].startswith("  ")  # what it does
    assert text[0].strip()
    assert "\\" not in "".join(text)


def test_help_says_what_arguments_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "evaluate", "--help")
    assert "a run folder" in text
    assert "[required]" in text


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([])
    found = capsys.readouterr()
    assert code in (0, 2)
    assert "Usage" in found.out + found.err
    assert "Traceback" not in found.err


# As a process: what the shell sees.


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perada", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_process_prints_json_on_standard_output_and_progress_on_standard_error(tmp_path: Path, run: Path) -> None:
    found = shell("train", "digits", *flags(), "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert strict(found.stdout)["run"] == "runs/digits-perada-0"
    assert "rounds" in found.stderr
    assert adapters(tmp_path / "runs" / "digits-perada-0") == adapters(run), "the same bytes as in this process"


def test_a_process_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    found = shell("train", "digits", "--method", "perda", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: unknown method 'perda': did you mean 'perada'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`perada params resnet18 --json | head -1`."""
    words = [sys.executable, "-m", "perada", "partition", "digits", "--json"]
    child = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    stderr = child.stderr.read()
    child.stderr.close()
    child.wait(60)
    assert "Traceback" not in stderr
    assert "Exception" not in stderr


LOST = "error: cannot write to standard output: "


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--version >/dev/full", 1, f"{LOST}No space left on device\n"),
        ("--version >&-", 1, f"{LOST}Bad file descriptor\n"),
        ("--version | true", 1, ""),  # which is gone by then
        ("--version >/dev/null 2>&-", 0, ""),
        ("--version >&- 2>&- <&-", 1, ""),
        ("--version 2>&1 | true", 1, ""),
        ("presets >/dev/full", 1, f"{LOST}No space left on device\n"),
        ("presets --json >&-", 1, f"{LOST}Bad file descriptor\n"),
    ],
)
def test_output_that_cannot_be_written(words: str, code: int, says: str) -> None:
    """One line at most, and nothing from Python when it exits. Python may write at once, or when it exits."""
    for unbuffered in ("", "1") if words.startswith("--version") else ("",):
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = f"set -o pipefail; wait() {{ sleep 0.2; {sys.executable} -m perada $@; }}; wait {words}"
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
        assert (found.returncode, found.stderr) == (code, says)


# The first two seconds.


def test_an_interrupt_while_python_still_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *rest: Any) -> None:
            if name == "perada.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "perada.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:  # the latter would end all tests
        __main__.script()
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_version_needs_no_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "perada.cli.main", None)  # importing it fails
    monkeypatch.setattr(sys, "argv", ["perada", "--version"])
    __main__.script()
    assert capsys.readouterr().out == f"perada {perada.__version__}\n"


def test_importing_the_package_is_quick_and_has_all_that_it_promises() -> None:
    code = "import sys, perada; assert 'torch' not in sys.modules, 'two seconds'\n"
    code += "from perada import *\nassert all(n in globals() and n in dir(perada) for n in perada.__all__)\n"
    code += "try: perada.nothing\nexcept AttributeError as e: print(e)"
    other = "import perada; perada.methods.REGISTRY['perada']; perada.data.Federation"  # as docs/new-method.md has it
    subprocess.run([sys.executable, "-c", other], check=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'perada' has no attribute 'nothing'\n"
