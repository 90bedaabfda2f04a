"""Tables, folders and array files of one's own, good and bad ones, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import said, strict
from own_images import picture, refused, table, words
from PIL import Image
from small import tree

import perada
from perada.cli import main as cli

# Tables.


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
    chosen = words(data__partition="iid", data__clients=2, data__test=share, model__weights="fedavg", data__fit="pad")
    assert cli.main(["train", "folder", "--data", str(flat), *chosen, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if line.startswith("warning: ")]
    wanted = {"test images": "no client has test images", "another class": "every image is of class 'ant'"}
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
    chosen = ["folder", "--data", str(flat), *words(data__partition="iid", data__clients=2, data__fit="pad")]
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


def test_without_a_path_your_own_images_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "train", "folder") == (
        "error: your own images are needed: give --data PATH with site/class/image files\n"
    )
