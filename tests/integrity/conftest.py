from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import train
from PIL import Image
from safetensors.torch import save_file

from perada.models.resnet import resnet


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a backbone file, and an image."""
    path = tmp_path_factory.mktemp("integrity")
    save_file(resnet("resnet8", 10, seed=5).state_dict(), path / "mine.safetensors")
    settings = {"method__name": "perada-no-kd", "model__weights": str(path / "mine.safetensors")}
    assert train(path / "whole", **settings, train__rounds=2) == 0
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(path / "seven.png")
    return path


@pytest.fixture
def run(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(home / "whole", tmp_path / "run")
    capsys.readouterr()
    return tmp_path / "run"
