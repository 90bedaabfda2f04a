"""Your own images, from nothing to a trained run and predictions, through the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from commands import said, strict
from helpers import assert_same_tensors
from own_images import TINY, picture, refused, table, words
from safetensors.torch import load_file
from small import as_older

import perada
from perada.callbacks import OnRound
from perada.cli import main as cli
from perada.errors import Interrupted
from perada.runs.moment import Progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_sites.py"
# Three sites × four classes × 30 PNGs: two commands.


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("three_sites", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("example")
    assert example().build(root / "sites") == 3 * 4 * 30
    return root


def shell(*typed: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PERADA_CACHE": str(cwd / "cache")}
    command = [sys.executable, "-m", "perada", *typed]
    found = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def run(sites: Path) -> Path:
    """The first of the two commands, as the example says it, but for fewer rounds."""
    fewer = ["--set", "train.rounds=2", "--set", "data.size=64", "--json"]
    found = strict(shell("train", "folder", "--data", "sites", *fewer, "--out", "runs/sites", cwd=sites))
    assert found["run"] == "runs/sites"
    return sites / "runs" / "sites"


def test_a_folder_of_three_sites_is_trained_and_used_with_two_commands(sites: Path, run: Path) -> None:
    files = [f"sites/{site}/{name}/{n:03d}.png" for site, name, n in (("north", "two", 0), ("west", "one", 7))]
    found = strict(shell("predict", "runs/sites", "--client", "north", *files, "--json", cwd=sites))
    assert [one["image"] for one in found] == files
    for one in found:
        assert set(one["probabilities"]) == {"zero", "one", "two", "three"}
        assert sum(one["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
        assert all(0 < p < 1 for p in one["probabilities"].values())
    assert found[0]["probabilities"] != found[1]["probabilities"]
    for name in ("config.toml", "metrics.jsonl", "summary.json", "report.html", "backbone.safetensors"):
        assert (run / name).is_file()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["data"] == "sites"
    assert list(summary["local_test"]["per_client"]) == ["north", "south", "west"]
    assert summary["local_test"]["mean"] > 25, "better than guessing"


def test_the_examples_own_words_are_the_commands_tested_here() -> None:
    text = EXAMPLE.read_text()
    assert "perada train folder --data sites --out runs/sites" in text
    assert "perada predict runs/sites --client north sites/north/two/000.png" in text
    assert "perada drift runs/sites --client south sites/north" in text


def test_class_names_are_in_the_tables_and_the_report(
    sites: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "partition", "--data", str(sites / "sites"), "--set", "data.size=8")
    head = next(line for line in text.splitlines() if line.startswith("client"))
    assert head.split() == ["client", "train", "val", "test", "one", "three", "two", "zero", "picture"]
    north = next(line for line in text.splitlines() if line.startswith("north"))
    assert north.split()[1:8] == ["84", "12", "24", "26", "4", "12", "42"]
    text = said(capsys, "predict", str(run), "--client", "west", str(sites / "sites/west/three/001.png"))
    assert "%" in text
    assert any(name in text for name in ("zero", "one", "two", "three"))
    page = (run / "report.html").read_text()
    assert "north, three: 4" in page


def test_each_client_has_a_model_of_its_own_for_the_same_image(
    sites: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(sites / "sites" / "north" / "two" / "000.png")
    found = [
        strict(said(capsys, "predict", str(run), "--client", c, file, "--json"))[0]["probabilities"]
        for c in ("north", "south", "west")
    ]
    assert found[0] != found[1] != found[2]


@pytest.fixture
def moved(sites: Path, run: Path, tmp_path: Path) -> Iterator[Path]:
    """The data at another place, and nothing where they were."""
    (sites / "sites").rename(tmp_path / "elsewhere")
    yield tmp_path / "elsewhere"
    (tmp_path / "elsewhere").rename(sites / "sites")


def test_the_table_of_clients_needs_no_images(moved: Path, run: Path) -> None:
    with_them, without = perada.load(run, data=moved).table(), perada.load(run).table()
    assert with_them == without
    sizes = {c.name: (len(c.train), len(c.val), len(c.test)) for c in perada.load(run, data=moved).federation.clients}
    assert {r["client"]: (r["train"], r["val"], r["test"]) for r in without} == sizes


def test_a_run_opens_after_its_data_moved(moved: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data" in refused(capsys, "evaluate", str(run))
    found = strict(said(capsys, "evaluate", str(run), "--data", str(moved), "--json"))
    assert found["local_test"] == json.loads((run / "summary.json").read_text())["local_test"]


def test_predictions_and_weights_need_no_data(
    moved: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder is enough where its images are gone, or never were; where they are given they are looked at."""
    file = str(moved / "north" / "two" / "000.png")
    typed = ["predict", str(run), "--client", "north", file, "--json"]
    found = strict(said(capsys, *typed))
    assert sum(found[0]["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
    assert found == strict(said(capsys, *typed, "--data", str(moved)))
    for name, more in (("without", []), ("with", ["--data", str(moved)])):
        said(capsys, "export", str(run), "--client", "north", "--out", str(tmp_path / f"{name}.safetensors"), *more)
    assert_same_tensors(*(load_file(tmp_path / f"{name}.safetensors") for name in ("with", "without")))
    assert "unknown client" in refused(capsys, "predict", str(run), "--client", "nord", file)
    facts = json.loads((run / "data.json").read_text())
    older = tmp_path / "older"
    shutil.copytree(run, older)
    as_older(older)
    (older / "data.json").write_text(json.dumps({k: facts[k] for k in ("classes", "image", "clients")}))
    assert "--data" in refused(capsys, "predict", str(older), "--client", "north", file), "noted less: asks for them"
    assert strict(said(capsys, *["predict", str(older), *typed[2:]], "--data", str(moved))) == found


@pytest.mark.parametrize("change", ["a site more", "a class more", "a class renamed"])
def test_a_run_is_not_used_with_data_of_other_sites_or_classes(
    change: str, sites: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that sorts before the others would shift everybody to a neighbour's model."""
    here = tmp_path / "changed"
    shutil.copytree(sites / "sites", here)
    if change == "a site more":
        shutil.copytree(here / "north", here / "east")
    elif change == "a class more":
        shutil.copytree(here / "north" / "two", here / "north" / "four")
    else:
        for site in ("north", "south", "west"):
            (here / site / "two").rename(here / site / "deux")
    file = str(here / "north" / "one" / "000.png")
    refused(capsys, "predict", str(run), "--client", "north", file, "--data", str(here))


@pytest.mark.parametrize("kind", ["folder", "table", "absolute table", "arrays"])
def test_a_run_is_not_used_with_another_split_of_as_many_images(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who holds out what goes by the order of the files: one new name, and training images are test images."""
    here, out, other = tmp_path / "data", tmp_path / "run", tmp_path / "other"
    source = _fifteen(here, kind)
    assert cli.main(["train", "folder", "--data", str(source), *words(), "--out", str(out)]) == 0
    before = said(capsys, "evaluate", str(out), "--json")
    here.rename(other)
    moved = _fifteen(other, kind) if kind == "absolute table" else other / source.relative_to(here)
    assert said(capsys, "evaluate", str(out), "--data", str(moved), "--json") == before
    _fifteen(other, kind, first="zzz")
    line = refused(capsys, "evaluate", str(out), "--data", str(moved))
    assert "files renamed or exchanged" in line
    again = ["--resume", "--out", str(out), "--set", "train.rounds=2"]
    assert refused(capsys, "train", "folder", "--data", str(moved), *again) == line
    facts = json.loads((out / "data.json").read_text())
    del facts["split"]  # as it was written before
    as_older(out)
    (out / "data.json").write_text(json.dumps(facts))
    assert strict(said(capsys, "evaluate", str(out), "--data", str(moved), "--json")), "older runs still open"


def test_a_run_stopped_in_its_pretraining_does_not_go_on_with_other_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(progress: Progress) -> None:
        assert progress.stage == "pretraining"
        raise KeyboardInterrupt

    root, out = _fifteen(tmp_path / "data", "folder"), tmp_path / "run"
    settings = {**TINY, "model.weights": "fedavg", "model.pretrain_rounds": 2}
    with pytest.raises(Interrupted):
        perada.train("folder", data=str(root), set=settings, out=out, callbacks=[OnRound(stop)])
    _fifteen(root, "folder", first="zzz")
    assert "files renamed" in refused(capsys, "train", "folder", "--data", str(root), "--resume", "--out", str(out))


def _fifteen(root: Path, kind: str, first: str = "00") -> Path:
    """Two sites, two classes, 15 images of each; returns what --data is given. `first` names the first image."""
    shutil.rmtree(root, ignore_errors=True)
    held = [(site, name, n) for site in ("north", "south") for name in ("cat", "dog") for n in range(15)]
    names = [Path(site, name, f"{n:02d}.png" if i else f"{first}.png") for i, (site, name, n) in enumerate(held)]
    for i, path in enumerate(names):
        picture(root / path, 3 * i)
    if kind == "folder":
        return root
    if kind == "arrays":
        y = np.array([name for _, name, _ in held])
        y = np.roll(y, 1) if first != "00" else y
        x = np.arange(60 * 64, dtype=np.uint8).reshape(60, 8, 8)
        np.savez(root / "all.npz", images=x, labels=y, site=np.array([site for site, _, _ in held]))
        return root / "all.npz"
    listed = [root / path if kind == "absolute table" else path for path in sorted(names)]
    rows = [[path, path.parts[-3], path.parts[-2]] for path in listed]
    return table(root / "all.csv", [["path", "site", "label"], *rows])
