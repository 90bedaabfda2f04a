"""What the documents say is so: their programs run, their tables are the code's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from small import SMALL

from perada.data import Federation
from perada.methods import REGISTRY, grids, method_sizes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(document: str, language: str) -> list[str]:
    """Returns the code blocks of a document in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / document).read_text("utf8"), re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another package, installed: the file of docs/new-method.md, and the entry point that it declares."""
    home = tmp_path_factory.mktemp("package")
    (file,) = blocks("new-method.md", "python")
    (declared,) = blocks("new-method.md", "toml")
    (home / "mymethods.py").write_text(file)
    points = tomllib.loads(declared)["project"]["entry-points"]
    told = home / "mymethods-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: mymethods\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in found.items()) for group, found in points.items()]
    (told / "entry_points.txt").write_text("\n".join(lines))
    return home


def python(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where the other package is installed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=package, env=env, capture_output=True, text=True, timeout=300)


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(package, "-m", "perada", *words)


def words(**extra: object) -> list[str]:
    both = {**SMALL, **{k.replace("__", "."): v for k, v in extra.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


def test_the_example_method_trains_counts_and_compares(package: Path) -> None:
    done = run(package, "compare", "digits", "--methods", "fedavg,fedavgm", "--out", "both", "--json", *words())
    assert done.returncode == 0, done.stderr
    found = {m["name"]: m for m in json.loads(done.stdout)["methods"]}
    assert found["fedavgm"]["trained"] == found["fedavg"]["trained"]
    assert found["fedavgm"]["global_test"] != found["fedavg"]["global_test"]


def test_the_commands_find_the_example_by_its_place(package: Path) -> None:
    out = ("--out", "by-place")
    done = run(package, "train", "digits", "--method", "mymethods:FedAvgM", *out, *words(train__rounds=1))
    assert done.returncode == 0, done.stderr
    again = run(package, "report", "by-place")
    assert again.returncode == 0, again.stderr


def test_the_example_method_is_what_it_says(package: Path) -> None:
    """β = 0 is FedAvg; otherwise three rounds of s ← β s + w − mean θ, w ← w − s on FedAvg's own uploads."""
    code = f"""
import json, torch
from perada.config import resolve
from perada.lanes import gather, mean
from perada.config import build

settings = {{**{SMALL!r}, "run.precision": "fp64"}}
sims = [build(resolve("digits", {{**settings, **more}})) for more in (
    {{"method.name": "fedavg"}}, {{"method.name": "fedavgm", "method.beta": 0.0}},
    {{"method.name": "fedavgm", "method.beta": 0.7}})]
for _ in range(3):
    sims[0].round(), sims[1].round()
name = "layer2.0.conv1.weight"
zero = float((sims[0].now.broadcast.params[name] - sims[1].now.broadcast.params[name]).norm())
sim, speed = sims[2], 0.0
for _ in range(3):
    w = sim.now.broadcast
    upload, _ = sim.method.client_update(sim.trainer(sim.sampled(sim.now.round)), w, sim.now.kept)
    speed = 0.7 * speed + w.params[name] - mean(upload).params[name]
    wanted = w.params[name] - speed
    sim.round()
print(json.dumps([zero, float((sim.now.broadcast.params[name] - wanted).norm()), float(wanted.norm())]))
"""
    done = python(package, "-c", code)
    assert done.returncode == 0, done.stderr
    zero, off, size = json.loads(done.stdout)
    assert zero < 1e-9 * size
    assert off < 1e-9 * size


def test_a_bad_value_of_the_example_is_one_line(package: Path) -> None:
    done = run(package, "train", "digits", "--method", "fedavgm", "--set", "method.beta=2", "--out", "never")
    assert done.returncode == 2
    assert done.stderr == "error: method.beta must be in [0, 1), not 2.0\n"
    assert not (package / "never").exists()


class Wandb(ModuleType):
    """Stands in for the package wandb, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> Wandb:
        self.told.append(("init", settings))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.told.append((f"log {step}", values))

    def finish(self) -> None:
        self.told.append(("finish", None))


@pytest.mark.skipif(not hasattr(Federation, "from_arrays"), reason="Federation.from_arrays is not merged yet")
def test_the_program_of_the_python_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its blocks, one after the other, as one program."""
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "mine"}
    for block in blocks("python.md", "python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "torch.Size([1, 10])" in said, "a personal model of the own network predicts"
    assert re.findall(r"^(\d+) [\d.]+ \d+$", said, re.MULTILINE) == ["1", "2", "3", "4"], "stopped after round 3"
    assert [what for what, _ in wandb.told] == ["init", "log 1", "log 2", "finish"]
    assert wandb.told[0][1]["config"] == {"method": "FedAvg"}
    assert wandb.told[1][1].keys() >= {"loss", "bytes_up", "local_test", "global_test"}


def test_the_table_of_methods_has_every_method_with_its_numbers() -> None:
    text = (DOCS / "methods.md").read_text()
    table = text.partition("\n## ")[0]  # the first of the document
    rows = [[c.strip() for c in line.strip("|\n").split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert [r[0].strip("`") for r in rows] == list(REGISTRY)
    for row in rows:
        sizes = method_sizes(row[0].strip("`"))
        assert (row[3], row[4]) == (f"{sizes['trained']:,}", f"{sizes['communicated']:,}"), row[0]


def test_the_grids_are_the_papers() -> None:
    lam = {name for name in REGISTRY if "lam" in grids(name)}
    assert lam == {"perada", "perada-no-kd", "ditto", "pfedme", "mtl"}
    assert {grids(n)["lam"] for n in lam} == {(0.1, 1.0)}
    assert grids("fedprox") == {"mu": (0.1, 1.0)}
    assert np.allclose(grids("apfl")["alpha"], (0.1, 0.3, 0.5, 0.7))
    assert {n for n in REGISTRY if grids(n)} == lam | {"fedprox", "apfl"}


def selected(command: str) -> list[str]:
    """Returns the test functions that a pytest command of the documents names, by their files and `-k`."""
    paths, _, words = command.removeprefix("pytest ").partition(" -k ")
    files = [f for p in paths.split() for f in ([ROOT / p] if (ROOT / p).is_file() else (ROOT / p).rglob("test_*.py"))]
    wanted = [w for w in words.strip('"').split() if w != "or"] or [""]
    tests = [n for f in files for n in re.findall(r"^def (test_\w+)", f.read_text("utf8"), re.MULTILINE)]
    assert all(any(w in name for name in tests) for w in wanted), f"{command}: a word of -k names no test"
    return [n for n in tests if any(w in n for w in wanted)]


def test_every_command_of_the_reliability_table_names_tests_that_exist() -> None:
    rows = [line for line in (DOCS / "reliability.md").read_text("utf8").splitlines() if line.startswith("| ")][2:]
    commands = [re.findall(r"`([^`]+)`", row)[-1] for row in rows]
    assert len(commands) > 30
    targets = (ROOT / "Makefile").read_text("utf8")
    for command in commands:
        kind, _, what = command.partition(" ")
        if kind == "pytest":
            assert selected(command), command
        elif kind == "make":
            assert f"\n{what}:" in targets, command
        else:
            assert (ROOT / what.split()[0]).is_file(), command
