"""The embedded assets of the `digits` preset, and the tool that makes them."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from perada.models.resnet import resnet
from perada.models.weights import load_into, read_weights

TOOL = Path(__file__).parents[1] / "tools" / "make_digits_assets.py"
ASSETS = Path(str(resources.files("perada"))) / "data" / "assets"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_digits_assets", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiles() -> np.ndarray:
    with Image.open(ASSETS / "glyphs.png") as image:
        assert image.mode == "L"
        sheet = np.asarray(image)
    return sheet.reshape(64, 8, 64, 8).swapaxes(1, 2).reshape(-1, 8, 8)


def test_weights_fill_the_backbone_and_leave_the_head() -> None:
    net = resnet("resnet8", 10, seed=1)
    before = {k: t.clone() for k, t in net.state_dict().items()}
    report = load_into(net, read_weights("embedded", "resnet8"), "embedded")
    assert report.missing == ()
    assert report.unexpected == ()
    assert report.head == "new (the file has none)"
    assert report.loaded == sum(not k.startswith("fc.") and "num_batches" not in k for k in before)
    after = net.state_dict()
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert not torch.equal(after["bn1.running_var"], before["bn1.running_var"])
    assert all(torch.isfinite(t).all() for t in after.values())


def test_weights_say_where_they_come_from() -> None:
    with safe_open(ASSETS / "resnet8.safetensors", "pt") as file:
        about = file.metadata()
        kinds = {file.get_tensor(k).dtype for k in file.keys()}  # noqa: SIM118  not a dictionary
    assert about["made_by"] == "tools/make_digits_assets.py"
    assert about.keys() >= {"seed", "val_accuracy", "fonts"}
    assert kinds == {torch.float16}


def test_sheet_holds_4096_glyphs_that_look_like_the_digits(tiles: np.ndarray) -> None:
    assert tiles.shape == (4096, 8, 8)
    assert tiles.dtype == np.uint8
    ink = tiles.mean((1, 2)) / 255
    assert ink.min() > 0.1
    assert ink.max() < 0.6
    assert tiles.mean() / 255 == pytest.approx(0.3, abs=0.02)
    assert tiles.std() / 255 == pytest.approx(0.36, abs=0.02)
    assert len(np.unique(tiles.reshape(len(tiles), -1), axis=0)) == len(tiles)


def test_assets_are_small() -> None:
    assert sum((ASSETS / name).stat().st_size for name in ("glyphs.png", "resnet8.safetensors")) < 1_000_000


def test_rendering_follows_the_seed(tool: ModuleType) -> None:
    images, labels = tool.render(124, 3, tool.TRAIN, tool.FONTS[:2])
    again, same = tool.render(124, 3, tool.TRAIN, tool.FONTS[:2])
    assert np.array_equal(images, again)
    assert np.array_equal(labels, same)
    assert np.array_equal(np.bincount(labels), np.full(62, 2))
    for seed, stream in ((4, tool.TRAIN), (3, tool.SHEET)):
        assert not np.array_equal(images, tool.render(124, seed, stream, tool.FONTS[:2])[0])


def test_validation_fonts_are_held_out(tool: ModuleType) -> None:
    assert not set(tool.FONTS) & set(tool.HELD_OUT_FONTS)


def test_tool_writes_the_same_bytes_again(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "SIDE", 2)
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    tiny = ["--out", str(tmp_path), "--images", "124", "--epochs", "2"]
    try:
        assert tool.main(tiny) == 0
        assert tool.main([*tiny, "--check"]) == 0
        assert tool.main([*tiny, "--check", "--seed", "1"]) == 1
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
    assert "DIFFERS" in capsys.readouterr().out
    weights = read_weights(str(tmp_path / "resnet8.safetensors"), "resnet8")
    assert load_into(resnet("resnet8", 62), weights, "file").missing == ()
