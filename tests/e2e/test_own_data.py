"""Your own images, from nothing to a trained run and predictions, through the command line."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from commands import said, strict
from helpers import assert_same_tensors
from PIL import Image
from safetensors.torch import load_file
from small import tree

import perada
from perada import cli
from perada.errors import Interrupted
from perada.rounds import Progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_sites.py"
TINY = {"model.backbone": "resnet8", "model.weights": "random", "data.size": 8, "train.rounds": 1, "train.epochs": 1}


def words(**more: Any) -> list[str]:
    """A training of a second; `data__size=8` is --set data.size=8."""
    both = {**TINY, **{k.replace("__", "."): v for k, v in more.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what these tests decode stays in the user's cache."""
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "perada-cache"))


def refused(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    capsys.readouterr()
    assert cli.main(list(typed)) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1, found.err
    assert found.err.startswith("error: ")
    return found.err


def picture(path: Path, value: int = 0, mode: str = "RGB") -> Path:
    """Noise around one brightness, which a network can tell from another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(value)
    pixels = (value % 200 + rng.integers(0, 40, (10, 12, 3))).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


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
    fewer = ["--set", "model.pretrain_rounds=4", "--set", "train.rounds=2", "--json"]
    size = ["--set", "data.size=16", "--set", "model.backbone=resnet8"]
    found = strict(shell("train", "folder", "--data", "sites", *size, *fewer, "--out", "runs/sites", cwd=sites))
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
    assert "perada train folder --data sites --set data.size=16 --set model.backbone=resnet8 --out runs/sites" in text
    assert "perada predict runs/sites --client north sites/north/two/000.png" in text


def test_class_names_are_in_the_tables_and_the_report(
    sites: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "partition", "--data", str(sites / "sites"), "--set", "data.size=8")
    head = next(line for line in text.splitlines() if line.startswith("client"))
    assert head.split() == ["client", "train", "val", "test", "one", "three", "two", "zero", "picture"]
    north = next(line for line in text.splitlines() if line.startswith("north"))
    assert north.split()[1:8] == ["84", "12", "24", "21", "21", "21", "21"]
    text = said(capsys, "predict", str(run), "--client", "west", str(sites / "sites/west/three/001.png"))
    assert "%" in text
    assert any(name in text for name in ("zero", "one", "two", "three"))
    page = (run / "report.html").read_text()
    assert "north, three: 21" in page


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
        perada.train("folder", data=str(root), set=settings, out=out, on_round=stop)
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


# Tables.


def table(path: Path, rows: Sequence[Sequence[object]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as f:
        csv.writer(f, delimiter=delimiter).writerows(rows)
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_with_classes_and_a_declared_split(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[list[object]] = [["path", "site", "split", "label"]]
    for i in range(48):
        split = ("train", "train", "val", "test", "", "train")[i % 6]
        rows.append([f"scans/{i}.png", "lab" if i // 6 % 2 else "ward", split, "wolf" if i % 4 < 2 else "fox"])
        picture(tmp_path / "scans" / f"{i}.png", i)
    file = table(tmp_path / f"animals.{ending}", rows, "\t" if ending == "tsv" else ",")
    out = tmp_path / "run"
    found = strict(said(capsys, "train", "--data", str(file), *words(), "--out", str(out), "--json"))
    assert found["data"] == "animals"
    assert found["metric"] == "accuracy"
    opened = perada.load(out)
    f = opened.federation
    assert f.classes == ("fox", "wolf")
    for c in f.clients:
        mine = {i for i in range(48) if rows[i + 1][1] == c.name}
        for name, index in (("test", c.test), ("val", c.val), ("train", c.train)):
            declared = {i for i in mine if (rows[i + 1][2] or "train") == name}
            assert set(index.tolist()) == declared, (c.name, name)
    net, test = opened.model("ward"), f.clients[1].test
    with torch.no_grad():
        right = net(opened.normalise(f.images[test])).argmax(-1) == f.targets[test]
    assert found["local_test"]["per_client"]["ward"] == pytest.approx(100 * float(right.double().mean()))
    one = strict(said(capsys, "predict", str(out), "--client", "lab", str(tmp_path / "scans" / "5.png"), "--json"))[0]
    assert set(one["probabilities"]) == {"fox", "wolf"}
    assert sum(one["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)


LABELS = ["Edema", "Mass", "Nodule", "Cyst", "Hernia"]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites, five labels each of 0 and 1, no declared split."""
    root, rng = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    rows: list[list[object]] = [["path", "site", *LABELS]]
    for i in range(60):
        picture(root / f"{i}.png", i)
        rows.append([f"{i}.png", ("a", "b", "c")[i % 3], *rng.integers(0, 2, 5).tolist()])
    table(root / "scans.csv", rows)
    assert cli.main(["train", "--data", str(root / "scans.csv"), *words(), "--out", str(root / "run")]) == 0
    return root


def test_a_table_with_several_labels(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((scans / "run" / "summary.json").read_text())
    assert summary["metric"] == "auc"
    assert list(summary["local_test"]["per_client"]) == ["a", "b", "c"]
    assert list(summary["global_test"]["per_label"]) == LABELS
    assert 0 <= summary["global_test"]["mean"] <= 100
    text = said(capsys, "evaluate", str(scans / "run"))
    assert all(f"AUC of {name}" in text for name in LABELS)
    found = strict(said(capsys, "predict", str(scans / "run"), "--client", "b", str(scans / "4.png"), "--json"))
    chances = found[0]["probabilities"]
    assert list(chances) == LABELS
    assert all(0 < p < 1 for p in chances.values())
    assert abs(sum(chances.values()) - 1) > 0.1, "each label on its own"


def test_predict_prints_every_label_of_several(
    scans: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scans)
    text = said(capsys, "predict", "run", "--client", "b", "4.png")
    assert [name for name in LABELS if name not in text] == []


# Folders and arrays.


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """class/image, in grey, with transparency and in colour."""
    for i in range(45):
        name, mode = ("ant", "bee", "cow")[i % 3], ("RGB", "L", "RGBA", "P", "LA")[i % 5]
        picture(tmp_path / "flat" / name / f"{i:02d}.png", 4 * i, mode)
    return tmp_path / "flat"


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards"])
def test_a_folder_of_classes_with_simulated_sites(
    kind: str, flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = words(data__partition=kind, data__clients=3, data__alpha=0.5)
    found = strict(said(capsys, "partition", "folder", "--data", str(flat), *chosen, "--json"))
    assert found["classes"] == ["ant", "bee", "cow"]
    assert [c["name"] for c in found["clients"]] == ["client-00", "client-01", "client-02"]
    assert sum(c["train"] + c["val"] + c["test"] for c in found["clients"]) == 45
    held = [sum(n > 0 for n in c["counts"]) for c in found["clients"]]
    if kind == "iid":
        assert held == [3, 3, 3]
        assert max(c["train"] for c in found["clients"]) - min(c["train"] for c in found["clients"]) <= 1
    if kind == "shards":
        assert max(held) <= 3
        assert found["unlikeness"] > 0.3
    out = tmp_path / "run"
    done = strict(said(capsys, "train", "folder", "--data", str(flat), *chosen, "--out", str(out), "--json"))
    assert done["round"] == 1
    assert len(done["local_test"]["per_client"]) == 3


def test_an_array_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, n = np.random.default_rng(0), 40
    names = np.array(["low", "high"])
    y = np.arange(n) % 2
    x = (100 * y[:, None, None] + rng.integers(0, 100, (n, 8, 8))).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", images=x, labels=names[y], site=np.where(np.arange(n) < 20, "p", "q"))
    out = tmp_path / "run"
    found = strict(said(capsys, "train", "--data", str(tmp_path / "mine.npz"), *words(), "--out", str(out), "--json"))
    assert found["data"] == "mine"
    assert list(found["local_test"]["per_client"]) == ["p", "q"]
    Image.fromarray(x[1]).save(tmp_path / "one.png")
    one = strict(said(capsys, "predict", str(out), "--client", "q", str(tmp_path / "one.png"), "--json"))[0]
    run = perada.load(out)
    with torch.no_grad():
        wanted = run.model("q")(run.normalise(torch.from_numpy(x[1:2, None]))).softmax(-1)[0]
    held = [one["probabilities"][name] for name in ("high", "low")]  # in the order of their names
    assert held == pytest.approx(wanted.tolist(), abs=1e-6)


def test_unreadable_files_are_named_and_passed_over_where_that_is_asked_for(
    flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first.png", "second.jpg"):
        (flat / "bee" / name).write_bytes(b"no picture")
    chosen = ["folder", "--data", str(flat), *words(data__partition="iid", data__clients=2)]
    before = tree(tmp_path)
    said_no = refused(capsys, "train", *chosen, "--out", str(tmp_path / "run"))
    assert str(flat / "bee" / "first.png") in said_no
    assert "second.jpg" in said_no
    assert "data.skip_bad=true" in said_no
    assert tree(tmp_path) == before
    found = strict(said(capsys, "partition", *chosen, "--set", "data.skip_bad=true", "--json"))
    assert sum(c["train"] + c["val"] + c["test"] for c in found["clients"]) == 45
    capsys.readouterr()
    for n in range(20):  # however many they are
        (flat / "cow" / f"cut-{n:02d}.png").write_bytes(b"")
    bad = [*(flat / "bee" / name for name in ("first.png", "second.jpg")), *sorted(flat.glob("cow/cut-*"))]
    for command in (["train", *chosen, "--out", str(tmp_path / "run")], ["partition", *chosen]):
        assert cli.main([*command, "--set", "data.skip_bad=true"]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [p for p in bad if sum(f"cannot read {p}: skipped" in line for line in lines) != 1] == [], command[0]


@pytest.mark.parametrize("lacks", ["test images", "another class", "nothing"])
def test_what_the_data_lack_is_said_before_the_training(
    lacks: str, flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lacks == "another class":
        for name in ("bee", "cow"):
            shutil.rmtree(flat / name)
    share = 0.0 if lacks == "test images" else 0.2
    chosen = words(data__partition="iid", data__clients=2, data__test=share, model__weights="fedavg")
    assert cli.main(["train", "folder", "--data", str(flat), *chosen, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if line.startswith("warning: ")]
    wanted = {"test images": "nobody has test images", "another class": "every image is of class 'ant'"}
    assert [wanted[lacks] in line for line in found] == [True] if lacks in wanted else found == []
    if found:
        pretraining = next(i for i, line in enumerate(lines) if line.startswith("pretraining"))
        assert lines.index(found[0]) < pretraining, "before the work begins"


def test_public_images_that_are_not_used_are_said_to_be(
    flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preset's distill.steps is 0."""
    for i in range(4):
        picture(tmp_path / "pub" / f"{i}.png", i)
    chosen = ["folder", "--data", str(flat), *words(data__partition="iid", data__clients=2)]
    public = ["--set", f"distill.data={tmp_path / 'pub'}"]
    for n, (more, said_so) in enumerate(
        [([], 0), (public, 1), ([*public, "--set", "distill.steps=1"], 0), ([*public, "--method", "fedavg"], 0)]
    ):
        capsys.readouterr()
        assert cli.main(["train", *chosen, *more, "--out", str(tmp_path / f"run-{n}")]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
        assert [f"nothing is distilled, and distill.data={tmp_path / 'pub'}" in line for line in lines] == [
            True
        ] * said_so


BAD_TABLES = {
    "no path": ("file,site,label", "0.png,a,cat", "no column 'path'"),
    "no label": ("path,site", "0.png,a", "no column 'label'"),
    "image missing": ("path,site,label", "0.png,a,cat\ngone.png,a,dog", "row 3: no image"),
    "label out of range": ("path,site,Edema,Mass", "0.png,a,0,2", "row 2: Mass is '2'"),
    "unknown split": ("path,site,split,label", "0.png,a,tset,cat", "row 2: split is 'tset'"),
    "too few values": ("path,site,label", "0.png,a", "row 2: 2 values for 3 columns"),
    "nothing in it": ("path,site,label", "", "no images"),
}


@pytest.mark.parametrize("command", ["train", "partition"])
@pytest.mark.parametrize(("head", "rows", "says"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_table_that_cannot_be_used_is_named(
    command: str, head: str, rows: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(tmp_path / "0.png")
    (tmp_path / "mine.csv").write_text(f"{head}\n{rows}\n")
    line = refused(capsys, command, "folder", "--data", str(tmp_path / "mine.csv"), *words())
    assert str(tmp_path / "mine.csv") in line
    assert says in line


def test_an_array_file_with_a_label_out_of_range_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 2, 1])
    np.savez(tmp_path / "mine.npz", images=x, labels=y, classes=np.array(["a", "b"]), site=np.array(list("ppqq")))
    line = refused(capsys, "train", "--data", str(tmp_path / "mine.npz"), *words(), "--out", str(tmp_path / "run"))
    assert f"{tmp_path / 'mine.npz'}: label 2 of image 2 is out of range" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["[red]kite", "[/b]"])
def test_names_in_brackets_are_printed_as_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(8):
        picture(tmp_path / f"{i}.png", i)
    table(
        tmp_path / "x.csv", [["path", "site", "label"], *([f"{i}.png", "a", name if i % 2 else "b"] for i in range(8))]
    )
    assert name in said(capsys, "partition", "--data", str(tmp_path / "x.csv"), "--set", "data.size=8")


def test_a_run_is_used_without_the_servers_public_images(
    flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(4):
        picture(tmp_path / "public" / f"{i}.png", i)
    chosen = words(data__partition="iid", data__clients=2, distill__data=str(tmp_path / "public"), distill__steps=1)
    assert cli.main(["train", "folder", "--data", str(flat), *chosen, "--out", str(tmp_path / "run")]) == 0
    shutil.rmtree(tmp_path / "public")
    said(capsys, "predict", str(tmp_path / "run"), "--client", "client-00", str(flat / "ant" / "00.png"))
