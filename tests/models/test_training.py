"""Any network trains by name: without norms, with grouped convolutions, with bottlenecks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import plain

import perada
from perada.errors import InputError
from perada.lanes import default_groups
from perada.models import count_groups, network_of

OWN = ["lanes.networks:NoNorm", "lanes.networks:Separable", "lanes.networks:bottleneck"]


def settings(backbone: str, **more: Any) -> dict[str, Any]:
    return plain({"model.backbone": backbone, "model.weights": "random", "train.rounds": 1, "train.cohort": 0, **more})


@pytest.mark.parametrize("method", ["perada", "ditto", "fedavg"])
@pytest.mark.parametrize("backbone", OWN)
def test_a_network_of_ones_own_trains_by_name(backbone: str, method: str, tmp_path: Path) -> None:
    run = perada.train("digits", method=method, set=settings(backbone), out=tmp_path / "run")
    assert run.summary["parameters"]["full"] == count_groups(backbone, 10)["full"]["parameters"]
    again = perada.load(tmp_path / "run")
    images = torch.randn(3, 3, 8, 8)
    for client in again.clients:
        assert torch.equal(again.model(client)(images), run.model(client)(images))
    start = network_of(backbone, 10)
    end = run.model(run.clients[0]).state_dict()
    changed = {n for n, t in start.net.named_parameters() if not torch.equal(end[n], t)}
    group = default_groups(start.net, start.head)["adapter" if method == "perada" else "full"]
    assert changed == {n for n in group.params if ".adapter." not in n}


def test_the_network_of_the_document_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mynets.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = perada.train("digits", set=settings("mynets:separable"), out="run")
    model, kind = run.model("client-03"), perada.adapters.Residual()
    images = torch.randn(3, 3, 8, 8)
    merged = kind.merge(model)
    assert torch.allclose(merged(images), model(images), atol=1e-4)
    assert not [n for n in merged.state_dict() if ".adapter." in n]


def test_resnet50_trains(tmp_path: Path) -> None:
    run = perada.train("digits", set=settings("resnet50", **{"train.cohort": 1}), out=tmp_path / "run")
    assert run.summary["parameters"]["trained"] == 2 * count_groups("resnet50", 10)["adapter"]["parameters"]


def test_a_method_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    for method, backbone, message in (
        ("fedalt-input", OWN[0], "this network has no parameter group 'input'"),
        ("perada", "models.test_training:dense", "no convolution of this network takes an adapter"),
    ):
        with pytest.raises(InputError, match=message):
            perada.train("digits", method=method, set=settings(backbone), out=tmp_path / "run")


def dense(classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, classes))
