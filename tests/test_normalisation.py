"""`data.normalise=backbone`: images are divided as the backbone says, in training, resuming and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import plain
from torch import nn

import perada
from perada.errors import InputError
from perada.models import Backbone

MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)


def network(classes: int) -> Backbone:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
    return Backbone(net, "4", mean=MEAN, std=STD)


def train(out: Path, backbone: str, **more: object) -> perada.Run:
    settings = {**plain({"train__rounds": 1}), "model.backbone": backbone, "model.weights": "random"}
    settings |= {"data.normalise": "backbone", **more}
    return perada.train("digits", method="fedavg", set=settings, out=out, resume=bool(more))


def test_a_backbone_brings_its_normalisation(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "test_normalisation:network")
    assert (run.federation.mean, run.federation.std) == (MEAN, STD)
    loaded = perada.load(tmp_path / "run")
    white = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
    wanted = torch.tensor([(1 - m) / s for m, s in zip(MEAN, STD, strict=True)])
    torch.testing.assert_close(loaded.normalise(white)[0, :, 0, 0], wanted)
    assert loaded.evaluate("local") is not None
    more = train(tmp_path / "run", "test_normalisation:network", **{"train.rounds": 2})
    assert more.summary["round"] == 2


def test_a_backbone_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'resnet8' has no normalisation of its own"):
        train(tmp_path / "run", "resnet8")
