"""The script that trains a vision transformer for experiments: what it writes, and what it says it has seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import train_vit
from experiments.plans import experiments
from perada.config import resolve
from perada.models import backbone
from perada.models.vit import SHAPES, Shape


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "vit_tiny", Shape(24, 2, 2))


def trained(out: Path, *words: str) -> dict[str, object]:
    how = ["--name", "digits", "--backbone", "vit_tiny_patch2", "--batch", "50", "--warmup", "1", "--device", "cpu"]
    assert train_vit.main([*how, "--out", str(out), *words]) == 0
    return json.loads(out.with_suffix(".json").read_text())


def test_it_learns_and_says_what_it_has_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = trained(tmp_path / "w.safetensors", "--epochs", "40", "--lr", "5e-3", "--held-out", "0.1", "--most", "1000")
    assert json.loads(capsys.readouterr().out) == about
    assert about["seen"] == "900 training images of digits with their 10 labels, nothing else"
    assert about["held_out"] == 100
    assert about["held_out_accuracy"] > 30, "a tenth by chance"
    made = backbone("vit_tiny_patch2", 10, size=8)
    report = made.load(str(tmp_path / "w.safetensors"))
    assert report is not None
    assert (report.missing, report.unexpected, report.head) == ((), (), "loaded")
    again = trained(tmp_path / "again.safetensors", "--epochs", "1", "--most", "100")
    twice = trained(tmp_path / "twice.safetensors", "--epochs", "1", "--most", "100")
    assert again["weights_sha256"] == twice["weights_sha256"] != about["weights_sha256"]


def test_official_test_images_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(60) % 10
    seen = []
    for value in (0, 255):  # whatever the test images are, the weights are the same
        images[50:] = value
        train, test = {"x_train": images[:50], "y_train": labels[:50]}, {"x_test": images[50:], "y_test": labels[50:]}
        np.savez(tmp_path / "cifar100.npz", **train, **test)
        words = ["--name", "cifar100", "--data", str(tmp_path), "--epochs", "1", "--backbone", "vit_tiny"]
        seen.append(trained(tmp_path / f"{value}.safetensors", *words))
    assert seen[0]["weights_sha256"] == seen[1]["weights_sha256"]
    assert str(seen[0]["seen"]).startswith("49 training images of cifar100")


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        train_vit.main(["--name", "cifar100", "--data", str(tmp_path), "--out", str(tmp_path / "w.safetensors")]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_schedule_warms_up_and_ends_near_zero() -> None:
    rates = [train_vit.schedule(i, 100, 10) for i in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01


def test_the_weights_fit_the_experiment(tmp_path: Path) -> None:
    """The plan's backbone takes the script's file at CIFAR's size, normalised as the script normalises."""
    plan = experiments()["vit"]
    configs = [resolve(plan.preset, {**plan.settings, **t.settings}) for t in plan.trials]
    assert {c.model.backbone for c in configs} == {"vit_small_patch4"}
    assert {c.model.adapter for c in configs} == {"lora"}
    assert {c.data.normalise for c in configs} == {"imagenet"}
    tested = {t.name for t in plan.trials if t.tested}
    assert tested == {"perada", "perada-no-kd", "ditto", "fedavg-ft", "standalone"}
    draw = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    wanted = (0 - torch.tensor(train_vit.MEAN)) / torch.tensor(train_vit.STD)
    torch.testing.assert_close(train_vit.prepared(draw)[0, :, 0, 0], wanted)
