"""Exported models are used where perada cannot be imported, by the programs of docs/export.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import said, strict
from dicom import write_dicom
from own_images import words
from PIL import Image
from safetensors.torch import load_file

import perada
from perada.cli import main as cli
from perada.models.resnet import resnet

DOCUMENT = Path(__file__).parents[2] / "docs" / "export.md"
PROGRAMS = {"onnx": "with_onnx.py", "pt2": "with_torch.py", "safetensors": "with_torchvision.py"}
TOLERANCE = 1e-5

# torchvision's CUDA build, as it may be beside a CPU torch, imports if these are declared first.
SHIM = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def noise(rng: np.random.Generator, height: int, width: int, most: int) -> np.ndarray:
    """Stains of a brightness that the pictures of a class share."""
    coarse = rng.integers(0, most, (6, 5))
    rows, columns = np.arange(height) * 6 // height, np.arange(width) * 5 // width
    return coarse[rows][:, columns] + rng.integers(0, most // 4, (height, width))


def write_pictures(folder: Path, count: int, seed: int) -> list[Path]:
    """Writes square and portrait pictures in colours, and grey DICOM files of 16 bits, each a third."""
    rng, paths = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        shape = ((48, 48), (70 + i, 41), (64, 52))[i % 3]
        if i % 3 < 2:
            pixels = np.stack([noise(rng, *shape, 200) for _ in range(3)], -1).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:02}.png")
            paths.append(folder / f"{i:02}.png")
        else:
            stored = (noise(rng, *shape, 3000) + 500).astype(np.uint16)
            kind = "MONOCHROME1" if i % 2 else "MONOCHROME2"
            tags: dict[str, Any] = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": 3000}
            paths.append(write_dicom(folder / f"{i:02}.dcm", stored, kind, WindowWidth=4500, **tags))
    return paths


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet-18 with adapters, trained on two sites' pictures."""
    home = tmp_path_factory.mktemp("outside")
    for s, site in enumerate(("north", "south")):
        for c in range(3):
            write_pictures(home / "sites" / site / f"class{c}", 9, 10 * s + c)
    settings = words(model__backbone="resnet18", data__size=32, train__rounds=2, train__batch=8, train__lr=0.05)
    typed = ["train", "folder", "--data", str(home / "sites"), *settings, "--set", "model.pretrain_rounds=1"]
    assert cli.main([*typed, "--set", "model.weights=fedavg", "--out", str(home / "run")]) == 0
    return home / "run"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of the document, and a perada that cannot be imported."""
    home = tmp_path_factory.mktemp("programs")
    for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf8"), re.DOTALL):
        (home / code.split("\n")[0].removeprefix("# ")).write_text(code)
    assert {p.name for p in home.iterdir()} == {"pictures.py", "with_timm.py", *PROGRAMS.values()}
    (home / "perada.py").write_text("raise ImportError('there is no perada here')\n")
    (home / "sitecustomize.py").write_text(SHIM)
    return home


def python(outside: Path, *typed: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(outside)}
    return subprocess.run([sys.executable, *typed], env=env, capture_output=True, text=True, timeout=300)


def test_perada_cannot_be_imported_there(outside: Path) -> None:
    done = python(outside, "-c", "import perada")
    assert done.returncode == 1
    assert "there is no perada here" in done.stderr


@pytest.mark.parametrize("ending", PROGRAMS)
def test_the_programs_of_the_document_say_what_perada_says(
    ending: str, run: Path, outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(run, f"north.{ending}", outside / PROGRAMS[ending], tmp_path, capsys)


def compare(run: Path, name: str, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exports a model, and compares what a program says of 30 pictures with `perada predict`."""
    paths, out = write_pictures(tmp_path / "new", 30, 99), tmp_path / name
    merged = ["--merged"] if out.suffix == ".safetensors" else []
    said(capsys, "export", str(run), "--client", "north", "--out", str(out), *merged)
    wanted = strict(said(capsys, "predict", str(run), "--client", "north", str(tmp_path / "new"), "--json"))
    assert [one["image"] for one in wanted] == [str(p) for p in paths]
    done = python(program.parent, str(program), str(out), *map(str, paths))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["image"] for one in found] == [str(p) for p in paths]
    apart = [
        abs(there["probabilities"][name] - share)
        for here, there in zip(wanted, found, strict=True)
        for name, share in here["probabilities"].items()
    ]
    assert len(apart) == 90
    assert max(apart) <= TOLERANCE, max(apart)
    assert np.std([one["probabilities"]["class0"] for one in wanted]) > 0.01, "the pictures are told apart"
    print(f"{program.name}: largest difference {max(apart):.1e}")


def test_the_folder_presets_merged_network_is_timms_with_an_extra_convolution(
    run: Path, outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = run.parent / "sites"
    settings = ["--set", "train.rounds=1", "--set", "train.batch=8", "--set", "data.size=64"]
    assert cli.main(["train", "folder", "--data", str(sites), *settings, "--out", str(tmp_path / "run")]) == 0
    compare(tmp_path / "run", "north.safetensors", outside / "with_timm.py", tmp_path, capsys)
    out = str(tmp_path / "again.safetensors")
    assert cli.main(["export", str(tmp_path / "run"), "--client", "north", "--merged", "--out", out]) == 0
    assert "became an extra 1×1 convolution, at stage7.0.depthwise_conv; docs/export.md" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "fit"), [("onnx", "pad"), ("pt2", "stretch")])
def test_the_other_fits(ending: str, fit: str, run: Path, outside: Path, tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "new", 6, 98)
    opened = perada.load(run, device="cpu", say=lambda line: None)
    object.__setattr__(opened.config.data, "fit", fit)
    opened.export("south", tmp_path / f"south.{ending}")
    done = python(outside, str(outside / PROGRAMS[ending]), str(tmp_path / f"south.{ending}"), *map(str, paths))
    assert done.returncode == 0, done.stderr
    for line, wanted in zip(done.stdout.splitlines(), opened.predict("south", paths), strict=True):
        assert json.loads(line)["probabilities"] == pytest.approx(wanted["probabilities"], abs=TOLERANCE)


def test_merged_weights_give_equal_logits_in_the_plain_network(run: Path, tmp_path: Path) -> None:
    """The package's ResNet-18 has torchvision's names."""
    import torch

    opened = perada.load(run, say=lambda line: None)
    opened.export("north", tmp_path / "north.safetensors", merged=True)
    net, images = resnet("resnet18", 3, seed=5), torch.randn(8, 3, 32, 32)
    net.load_state_dict(load_file(tmp_path / "north.safetensors"), strict=True)
    with torch.no_grad():
        found, wanted = net.eval()(images), opened.model("north")(images)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
