"""Fetching data sets, looking at partitions, and the paper's presets on files in the official layouts, as typed."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import said, strict
from data.test_sources import dump
from PIL import Image
from small import tree

import perada
from perada.cli import main as cli
from perada.config import build, resolve
from perada.data import download
from perada.data.cifar import CIFAR10_CLASSES
from perada.data.download import Entry, Remote
from perada.data.manifest import DISEASES

from .test_own_data import refused

SMALL = {"model.backbone": "resnet8", "model.weights": "random", "train.rounds": 1, "train.epochs": 1}
SMALL |= {"train.batch": 8, "distill.steps": 2, "distill.batch": 4, "distill.candidates": [1, 2]}


def words(**more: Any) -> list[str]:
    both = {**SMALL, **{k.replace("__", "."): v for k, v in more.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "perada-cache"))
    monkeypatch.setenv("PERADA_DATA", str(tmp_path / "perada-data"))


# perada data.


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def shop(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server on this machine in place of the official ones; what lies in the folder is served."""
    goods = tmp_path_factory.mktemp("shop")
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/batches.meta")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    (goods / "cifar-10-python.tar.gz").write_bytes(held.getvalue())
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.001)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(goods)))
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    known = download.CATALOGUE["cifar10"]
    md5, file = hashlib.md5(held.getvalue()).hexdigest(), "cifar-10-python.tar.gz"
    remote = Remote(url + file, file, f"md5:{md5}")
    here = Entry(known.name, known.title, known.folder, known.megabytes, known.home, (remote,))
    monkeypatch.setitem(download.CATALOGUE, "cifar10", here)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield goods
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_there_is_to_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    found = {one["name"]: one for one in strict(said(capsys, "data", "list", "--root", str(tmp_path), "--json"))}
    assert {"cifar10", "cifar100", "cifar10.1", "cifar10-c", "stl10", "office-home", "chexpert"} <= found.keys()
    assert [name for name, one in found.items() if one["here"]] == ["cifar10"]
    assert found["cifar10"]["checksum"] == "md5:c58f30108f718f92721af3b95e74349a"
    assert [name for name, one in found.items() if one["by_hand"]] == ["office-home", "chexpert"]
    text = said(capsys, "data", "list", "--root", str(tmp_path))
    assert all(name in text for name in found)
    assert "by hand" in text
    assert next(line for line in text.splitlines() if line.startswith("cifar10 ")).split()[2] == "yes"


@pytest.mark.parametrize("given", [True, False])
def test_getting_a_data_set(given: bool, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "perada-data"  # $PERADA_DATA
    text = said(capsys, "data", "get", "cifar10", *(["--root", str(root)] if given else []))
    assert str(root / "cifar-10-batches-py") in text.replace("\n", "")
    assert tree(root) == {"cifar-10-batches-py": None, "cifar-10-batches-py/batches.meta": b"hello"}
    (shop / "cifar-10-python.tar.gz").unlink()
    said(capsys, "data", "get", "cifar10", "--root", str(root))  # what is there is not fetched again
    assert strict(said(capsys, "data", "list", "--json"))[0]["here"]


def last_line(err: str) -> str:
    """The error; what a progress bar drew goes before it."""
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_a_corrupt_download_is_refused_and_leaves_nothing(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shop / "cifar-10-python.tar.gz"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert cli.main(["data", "get", "cifar10", "--root", str(tmp_path / "root")]) == 2
    line = last_line(capsys.readouterr().err)
    assert line.startswith("error: cifar-10-python.tar.gz from http://127.0.0.1")
    assert "wrong checksum" in line
    assert list((tmp_path / "root").iterdir()) == []
    file.unlink()
    assert cli.main(["data", "get", "cifar10", "--root", str(tmp_path / "root")]) == 2
    assert "404" in last_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("office-home", ["Google Drive", "https://www.hemanthdv.org", "OfficeHomeDataset_10072016/Art"]),
        ("chexpert", ["register", "https://stanfordmlgroup.github.io", "CheXpert-v1.0-small/train.csv"]),
        ("cifar1O", ["unknown data set", "did you mean 'cifar10'?"]),
    ],
)
def test_what_cannot_be_fetched(name: str, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "get", name, "--root", str(tmp_path)]) == 2
    line = last_line(capsys.readouterr().err)
    assert [word for word in says if word not in line] == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_fetched_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "data", "get", "chexpert", "--root", str(tmp_path))


# Official layouts, a few images each.

NOISE = np.random.default_rng(0)


def cifar10(root: Path, each: int = 8) -> Path:
    """Six batches of `each` images; the brightness is the class."""
    for i in range(6):
        y = (np.arange(each) + i * each) % 10
        x = (20 * y[:, None] + NOISE.integers(0, 50, (each, 3072))).astype(np.uint8)
        name = f"data_batch_{i + 1}" if i < 5 else "test_batch"
        dump(root / "cifar-10-batches-py" / name, {"labels": y.tolist(), "data": x})
    names = [name.encode() for name in CIFAR10_CLASSES]
    dump(root / "cifar-10-batches-py" / "batches.meta", {"num_cases_per_batch": each, "label_names": names})
    return root


def cifar100(root: Path) -> Path:
    for name, n in (("train", 12), ("test", 3)):
        x = NOISE.integers(0, 256, (n, 3072), np.uint8)
        dump(root / "cifar-100-python" / name, {"data": x, "fine_labels": list(range(n))})
    dump(root / "cifar-100-python" / "meta", {"fine_label_names": [f"c{i}".encode() for i in range(100)]})
    return root


def stl10(root: Path) -> Path:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for name, n in (("train", 20), ("test", 10)):
        (folder / f"{name}_X.bin").write_bytes(NOISE.integers(0, 256, n * 3 * 96 * 96, np.uint8).tobytes())
        (folder / f"{name}_y.bin").write_bytes(bytes(1 + i % 10 for i in range(n)))
    (folder / "class_names.txt").write_text("\n".join(CIFAR10_CLASSES) + "\n")
    return root


def jpeg(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((value + NOISE.integers(0, 40, (16, 20, 3))).astype(np.uint8)).save(path)


def office(root: Path) -> Path:
    for i, domain in enumerate(("Art", "Clipart", "Product", "Real World")):
        for j, name in enumerate(("Alarm_Clock", "Bed", "Mug")):
            for n in range(5):
                jpeg(root / "OfficeHomeDataset_10072016" / domain / name / f"{n:05}.jpg", 40 * i + 30 * j)
    return root


def chexpert(root: Path) -> Path:
    base = root / "CheXpert-v1.0-small"
    base.mkdir(parents=True)
    with (base / "train.csv").open("w", newline="") as f:
        write = csv.writer(f).writerow
        write(["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", *DISEASES])
        for i in range(80):
            name = f"CheXpert-v1.0-small/train/patient{i:05}/study1/view1_frontal.jpg"
            jpeg(root / name, 100 * (i % 2))
            few = [("", "1.0")[i // 2**j % 2] for j in range(5)]
            write([name, "Male", 60, "Frontal", "AP", "", *few[:4], "-1.0" if few[4] else "0.0"])
    return root


SOURCES = {"cifar10": cifar10, "stl10": stl10, "office-home": office, "chexpert": chexpert}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def wrong_label(path: Path) -> None:
    """The first of the labels, wherever the file has it."""
    data = path.read_bytes()
    at = data.index(b"](J") + 3 if path.name.startswith("data_batch") else 0
    path.write_bytes(data[:at] + b"\x63" + data[at + 1 :])


def edit(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text().replace(old, new))


RAY = "train/patient00003/study1/view1_frontal.jpg"
ART = "OfficeHomeDataset_10072016/Art/Bed/00001.jpg"
# Data set, broken file, how -> what the line says beside the file's name.
BROKEN: dict[str, tuple[str, str, Callable[[Path], Any], str]] = {
    "truncated batch": ("cifar10", "cifar-10-batches-py/data_batch_3", cut, "cut short"),
    "missing batch": ("cifar10", "cifar-10-batches-py/test_batch", Path.unlink, "missing"),
    "label out of range": ("cifar10", "cifar-10-batches-py/data_batch_2", wrong_label, "label 99 of image 0"),
    "truncated STL-10": ("stl10", "stl10_binary/train_X.bin", cut, "whole images"),
    "STL-10 label": ("stl10", "stl10_binary/test_y.bin", wrong_label, "label 98 of image 0"),
    "damaged photograph": ("office-home", ART, lambda p: p.write_bytes(b"x"), "data.skip_bad=true"),
    "missing domain": ("office-home", "OfficeHomeDataset_10072016/Clipart", shutil.rmtree, "incomplete"),
    "X-ray missing": ("chexpert", f"CheXpert-v1.0-small/{RAY}", Path.unlink, "train.csv: row 5"),
    "no column": ("chexpert", "CheXpert-v1.0-small/train.csv", edit("Edema", "Oedema"), "no column 'Edema'"),
    "label of 7": ("chexpert", "CheXpert-v1.0-small/train.csv", edit("-1.0", "7"), "row 18: Pleural Effusion is '7'"),
}


@pytest.mark.parametrize("command", ["train", "partition"])
@pytest.mark.parametrize(("name", "file", "how", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(
    command: str,
    name: str,
    file: str,
    how: Callable[[Path], Any],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = SOURCES[name](tmp_path / "files")
    preset = ["cifar10", "--set", "data.name=stl10"] if name == "stl10" else [name]
    how(data / file)
    before = tree(tmp_path)
    line = refused(capsys, command, *preset, "--data", "files", *words(data__clients=2, data__size=16, train__cohort=0))
    assert Path(file).name in line
    assert says in line
    assert tree(tmp_path) == before, "nothing is written"


# Partitions.


def test_a_partition_as_a_picture_and_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = cifar10(tmp_path / "files", 16), tmp_path / "who.html"
    chosen = ["partition", "cifar10", "--data", str(root), "--set", "data.clients=3"]
    text = said(capsys, *chosen, "--out", str(out))
    assert str(out) in text.replace("\n", "")
    assert "total-variation distance" in text.replace("\n", " ")
    found = strict(said(capsys, *chosen, "--json"))
    assert found["classes"] == list(CIFAR10_CLASSES)
    shares = np.array([c["counts"] for c in found["clients"]], float)
    assert shares.sum() == sum(c["train"] for c in found["clients"]) == 72
    shares /= shares.sum(1, keepdims=True)
    apart = [0.5 * np.abs(shares[i] - shares[j]).sum() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found["unlikeness"] == pytest.approx(np.mean(apart))
    page = out.read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert not re.search(r'(src|href)="(http|//)|@import|<script src|url\(http', page)
    cells = {
        f"{c['name']}, {name}: {n}"
        for c in found["clients"]
        for name, n in zip(found["classes"], c["counts"], strict=True)
        if n
    }
    drawn = re.findall(r"<circle[^>]*><title>([^<]*)</title></circle>", page)
    assert set(drawn) == cells
    assert len(drawn) == len(cells) < 30
    assert f"{found['unlikeness']:.2f}" in page


def test_a_partition_as_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict(said(capsys, "partition", "digits", "--json", "--out", str(tmp_path / "who.html")))
    assert (tmp_path / "who.html").is_file()


# The paper's presets.

PAPER = {  # SPEC, sections 6 and 7; CIFAR-10 has the distillation steps of the study `settle`
    "cifar10": [64, 8, 10, 200, 1.0, 0.01, 1e-3, 60, 2048, "dirichlet", 0.1, 20, "cifar100", "crop"],
    "office-home": [128, 0, 1, 100, 0.1, 0.05, 1e-4, 100, 256, "site", None, None, "cifar10", "resized-crop"],
    "chexpert": [256, 8, 1, 30, 1.0, 0.01, 1e-5, 50, 128, "dirichlet", 0.3, 20, "cifar10", "resized-crop"],
}


@pytest.mark.parametrize(("name", "wanted"), PAPER.items())
def test_presets_have_the_papers_numbers(name: str, wanted: list[Any]) -> None:
    c = resolve(name)
    found: list[Any] = [c.train.batch, c.train.cohort, c.train.epochs, c.train.rounds, c.method["lam"], c.train.lr]
    found += [c.distill.lr, c.distill.steps, c.distill.batch, c.data.partition]
    found += [c.data.alpha, c.data.clients] if c.data.partition == "dirichlet" else [None, None]
    assert [*found, c.distill.data, c.data.augment] == wanted
    assert c.data.size == {"office-home": 224}.get(name, 64)
    assert (c.model.backbone, c.model.weights, c.data.normalise) == ("resnet18", "torchvision", "imagenet")
    assert c.method_name == "perada"
    wanted_val = {"cifar10": 0.1, "office-home": 1391 / 15588, "chexpert": 22342 / 223414}[name]
    assert c.data.val == (wanted_val if name == "cifar10" else pytest.approx(wanted_val, abs=5e-5))
    if name != "cifar10":
        total, test = {"office-home": (15588, 1656), "chexpert": (223414, 20099)}[name]
        assert c.data.test == pytest.approx(test / total, abs=1e-4)


def trained(name: str, root: Path, out: Path, capsys: pytest.CaptureFixture[str], **more: Any) -> perada.Run:
    typed = ["train", name, "--data", str(root), *words(**more), "--out", str(out / "run"), "--json"]
    found = strict(said(capsys, *typed))
    assert found["data"] == name
    assert (found["round"], found["distilled"]) == (1, 1), "public images beside the clients' are used"
    assert found["global_model"]["global_test"] is not None
    return perada.load(out / "run")


def test_the_cifar10_preset_from_files_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cifar100(cifar10(tmp_path / "files"))
    run = trained("cifar10", root, tmp_path, capsys, data__clients=2, train__cohort=2)
    f = run.federation
    assert f.images.shape == (48, 3, 32, 32)
    assert sorted(f.test.tolist()) == list(range(40, 48)), "the official test batch"
    assert sum(len(c.val) for c in f.clients) == 4
    assert len(build(run.config).public) == 3
    assert run.experiment.public == [], "a finished run needs none"
    np.save(root / "cifar10.1_v6_data.npy", NOISE.integers(0, 256, (10, 32, 32, 3), np.uint8))
    np.save(root / "cifar10.1_v6_labels.npy", np.arange(10, dtype=np.int32))
    found = strict(said(capsys, "evaluate", str(run.path), "--on", "cifar10.1,fog:3", "--json"))
    assert all(v % 10 == 0 for v in found["cifar10.1"]["per_client"].values())
    assert len(found["fog:3"]["per_client"]) == 2


def test_the_office_home_preset_from_files_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("office-home", cifar10(office(tmp_path / "files")), tmp_path, capsys, data__size=16)
    assert run.clients == ("Art", "Clipart", "Product", "Real World")
    assert run.federation.classes == ("Alarm_Clock", "Bed", "Mug")
    assert build(run.config).public[0].shape[1:] == (3, 16, 16), "CIFAR-10 at the clients' size"


def test_the_chexpert_preset_from_files_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cifar10(chexpert(tmp_path / "files"))
    more = {"data__clients": 2, "train__cohort": 2, "data__size": 16, "data__meta_min": 5, "data__test": 0.3}
    run = trained("chexpert", root, tmp_path, capsys, **more)
    assert run.federation.classes == DISEASES
    assert run.federation.targets[16].tolist() == [0, 0, 0, 0, 1], "an uncertain label counts as positive"
    assert run.summary["metric"] == "auc"
    assert list(run.summary["global_test"]["per_label"]) == list(DISEASES)
    assert all(0 <= v <= 100 for v in run.summary["global_test"]["per_label"].values())


# Public data beside the clients'.


@pytest.mark.parametrize("how", ["a folder with a dot", "the inner folder", "a damaged file"])
def test_public_data_beside_the_clients(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = cifar100(cifar10(tmp_path / ("files.v2" if how == "a folder with a dot" else "files")))
    place = root / "cifar-10-batches-py" if how == "the inner folder" else root
    typed = ["train", "cifar10", "--data", str(place), *words(data__clients=2, train__cohort=2)]
    if how == "a damaged file":
        cut(root / "cifar-100-python" / "train")
        assert str(root / "cifar-100-python" / "train") in refused(capsys, *typed, "--out", str(tmp_path / "run"))
    else:
        assert cli.main([*typed, "--out", str(tmp_path / "run")]) == 0


def test_a_test_set_that_was_fetched_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("cifar10", cifar100(cifar10(tmp_path / "files")), tmp_path, capsys, data__clients=2, train__cohort=2)
    place = tmp_path / "perada-data" / "CIFAR-10.1"  # where `perada data get cifar10.1` puts it
    place.mkdir(parents=True)
    np.save(place / "cifar10.1_v6_data.npy", NOISE.integers(0, 256, (10, 32, 32, 3), np.uint8))
    np.save(place / "cifar10.1_v6_labels.npy", np.arange(10, dtype=np.int32))
    said(capsys, "evaluate", str(run.path), "--on", "cifar10.1")


def test_a_group_of_commands_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert not shown[0].startswith("error:")
    assert any(line.split()[:1] == ["get"] for line in shown), "a line a command"
