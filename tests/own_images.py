"""Small images of one's own, and commands that train on them in a second."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perada.cli import main as cli

TINY = {"model.backbone": "resnet8", "model.weights": "random", "model.adapt_from": "", "data.normalise": "data"}
TINY |= {"data.size": 8, "train.rounds": 1, "train.epochs": 1}


def words(**more: Any) -> list[str]:
    """A training of a second; `data__size=8` is --set data.size=8."""
    both = {**TINY, **{k.replace("__", "."): v for k, v in more.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


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


def table(path: Path, rows: Sequence[Sequence[object]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as f:
        csv.writer(f, delimiter=delimiter).writerows(rows)
    return path
