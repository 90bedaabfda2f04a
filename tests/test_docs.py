"""What the documents say is so."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import SMALL

import perada
from perada.methods import REGISTRY, grids, method_sizes

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "new-method.md").read_text()
FILE, LINE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the example of docs/new-method.md in it: one new file, one more line."""
    home = tmp_path_factory.mktemp("package")
    shutil.copytree(Path(perada.__file__).parent, home / "perada", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "perada" / "methods" / "fedavgm.py").write_text(FILE)
    registry = home / "perada" / "methods" / "__init__.py"
    before = registry.read_text()
    last = '    "feddf": _method("feddf.FedDF"),\n'
    assert before.count(last) == 1
    registry.write_text(before.replace(last, last + LINE))
    changed = [d for d in difflib.ndiff(before.splitlines(), registry.read_text().splitlines()) if d[0] in "+-?"]
    assert changed == [f"+ {LINE.rstrip()}"]
    return home


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "perada", *words], cwd=package, env=env, capture_output=True, text=True, timeout=300
    )


def words(**extra: object) -> list[str]:
    both = {**SMALL, **{k.replace("__", "."): v for k, v in extra.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


def test_the_example_method_trains_counts_and_compares(package: Path) -> None:
    done = run(package, "compare", "digits", "--methods", "fedavg,fedavgm", "--out", "both", "--json", *words())
    assert done.returncode == 0, done.stderr
    found = {m["name"]: m for m in json.loads(done.stdout)["methods"]}
    assert found["fedavgm"]["trained"] == found["fedavg"]["trained"]
    assert found["fedavgm"]["global_test"] != found["fedavg"]["global_test"]
    listed = json.loads(run(package, "methods", "--json").stdout)
    assert len(listed) == len(REGISTRY) + 1
    assert listed[-1] == {"name": "fedavgm", **method_sizes("fedavg")}


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
    env = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    zero, off, size = json.loads(done.stdout)
    assert zero < 1e-9 * size
    assert off < 1e-9 * size


def test_a_bad_value_of_the_example_is_one_line(package: Path) -> None:
    done = run(package, "train", "digits", "--method", "fedavgm", "--set", "method.beta=2", "--out", "never")
    assert done.returncode == 2
    assert done.stderr == "error: method.beta must be in [0, 1), not 2.0\n"
    assert not (package / "never").exists()


def test_the_table_of_methods_has_every_method_with_its_numbers() -> None:
    text = (DOCS / "methods.md").read_text()
    rows = [[c.strip() for c in line.strip("|\n").split("|")] for line in text.splitlines() if line.startswith("| `")]
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
