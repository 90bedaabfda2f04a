"""The protocol of drift, its rivals' rules and the choice of constants, on problems that can be checked."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close_norm
from small import double, plain
from torch import Tensor

import perada
from experiments import drift, drift_constants
from experiments.__main__ import main as run_experiments
from experiments.drift_rules import (
    Known,
    btfl,
    ceiling,
    corrected,
    em,
    features,
    fedthe,
    level_shares,
    quantised,
    rules,
)
from perada.predict.drift import Calibration, Drift
from perada.runs.run import Run

HALF = (0.5, 0.5)


def posterior(prior: tuple[float, float], x: Tensor) -> Tensor:
    return -0.5 * (x.unsqueeze(-1) - torch.tensor([-2.0, 2.0])) ** 2 + torch.tensor(prior, dtype=torch.float64).log()


def images(prior: tuple[float, float], n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=draw) < prior[1]).long()
    return torch.randn(n, generator=draw, dtype=torch.float64) + 4.0 * y - 2.0, y


def known(own: tuple[float, float] = (0.9, 0.1)) -> Known:
    x, y = images(own, 300, 0)
    v, w = posterior(own, x), posterior(HALF, x)
    other, _ = images(HALF, 300, 1)
    everyone, tables = features(posterior(HALF, other)).mean(0), level_shares(posterior(HALF, other))
    by = Calibration(own, HALF, 0.6, 1.0, 0.3, 0.5, 300)
    return Known(by, v, w, corrected(v, y), everyone, tables)


def test_em_finds_the_prior_of_a_window() -> None:
    """Of exact posteriors under 90:10, on windows of 20:80, the predictions are those of the posterior under 20:80."""
    x, y = images((0.2, 0.8), 4000, 2)
    one = replace(known(), corrected=(1.0, double([0.0, 0.0])[0]))
    found = em(one, posterior((0.9, 0.1), x), posterior(HALF, x), 4000)
    assert_close_norm(found / found.sum(-1, keepdim=True), posterior((0.2, 0.8), x).softmax(-1), 0.02)
    alone = (posterior((0.9, 0.1), x).argmax(-1) == y).double().mean()
    assert (found.argmax(-1) == y).double().mean() > alone


def test_bias_corrected_scaling_undoes_a_temperature_and_a_bias() -> None:
    x, y = images((0.5, 0.5), 20_000, 3)
    temperature, bias = corrected(3 * posterior(HALF, x) + torch.tensor([1.5, 0.0]), y)
    assert temperature == pytest.approx(3, rel=0.1)
    assert float(bias[0] - bias[1]) == pytest.approx(-0.5, abs=0.1)
    assert corrected(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))[0] == 1


def test_fedthe_follows_the_features() -> None:
    """Features near everybody's mean ask for the global model, features far from it for the personal one."""
    one = known()
    x, _ = images(HALF, 200, 4)
    v, w = posterior((0.9, 0.1), x), posterior(HALF, x)
    found = fedthe(one, v, w, steps=0)
    assert_close_norm(found, (v + w) / 2, 1e-12)
    near = replace(one, everyone=features(w).mean(0), w=w + torch.tensor([50.0, 0.0]))
    far = replace(one, everyone=features(w).mean(0) + 50, w=w)
    unlike = -w  # so that the alignment counts
    shares = [(fedthe(k, unlike, w) - unlike).norm() / (w - unlike).norm() for k in (near, far)]
    assert shares[0] > 0.6 > 0.4 > shares[1]


def test_btfl_by_hand() -> None:
    """One image: a flat prior, and the posterior of an external image by the ratio of the level tables."""
    one = known()
    v, w = double([2.0, 0.0]), double([0.0, 3.0])
    own, levels = level_shares(one.w), quantised(w)[0]
    ratio = math.prod(float(own[c, levels[c]] / one.tables[c, levels[c]]) for c in range(2))
    grid = np.linspace(0.01, 0.99, 99)
    share = float(np.mean(grid / (grid + (1 - grid) * ratio)))
    expected = share * w.softmax(-1) + (1 - share) * v.softmax(-1)
    assert_close_norm(btfl(one, v, w), expected, 1e-9)


def test_the_ceiling_is_above_every_fixed_mix() -> None:
    one = known()
    x, y = images((0.3, 0.7), 500, 5)
    v, w = posterior((0.9, 0.1), x), posterior(HALF, x)
    top = ceiling(one, v, w, y)
    for name, rule in rules(Drift()).items():
        if name in ("personal", "global") or name.startswith("logits"):
            assert top >= 100 * float((rule(one, v, w).argmax(-1) == y).double().mean())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = plain({"data__server_val": 0.5, "data__val": 0.2, "data__test": 0.15})
    return perada.train("digits", set=settings, out=tmp_path_factory.mktemp("drift") / "small-0", device="cpu")


def test_the_protocol_measures_what_the_package_measures(run: Run, tmp_path: Path) -> None:
    found = drift.protocol(run, tmp_path, kinds=["fog"])
    scores = run.drift_scores(["local", "global", "mixed"])
    for test, split in (("Local", "local_test"), ("Global", "global_test"), ("mixed", "mixed")):
        assert found["tests"][test]["personal"] == pytest.approx(scores.alone[split].per_client)
        assert found["tests"][test]["drift 32"] == pytest.approx(scores.aware[split].per_client)
    fog = run.evaluate(["fog:3"])["fog:3"].per_client
    assert found["tests"]["corrupted"]["personal"] == pytest.approx(fog)
    assert set(found["tests"]) == {"Local", "Global", "corrupted", "others", "mixed", "own corrupted"}
    wanted = {*rules(Drift()), "weights 0.1", "weights 0.2", "weights 0.3", "weights 0.5", "ceiling"}
    assert all(set(of) == wanted for of in found["tests"].values())
    assert drift.read(tmp_path) == [found]
    text = "\n".join(drift.document([found]))
    assert f"| personal | {drift.mean_of(found, 'Local', 'personal'):.2f} |" in text
    sizes = {size: sum(of["Local"][1] for of in [found["alarms"][size]]) for size in ("1", "8", "32")}
    assert sizes["1"] == sum(len(c.test) for c in run.federation.clients)


def test_what_is_measured_already_is_not_measured_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drift, "KINDS", ("fog",))
    assert run_experiments(["drift-protocol", str(run.path), "--results", str(tmp_path), "--device", "cpu"]) == 0
    assert "measuring" in capsys.readouterr().err
    assert run_experiments(["drift-protocol", str(run.path), "--results", str(tmp_path), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "measuring" not in captured.err
    assert "| drift 32 |" in captured.out
    assert run_experiments(["drift-table", "--results", str(tmp_path)]) == 0
    assert run_experiments(["drift-table", "--results", str(tmp_path / "none")]) == 2


def test_constants_are_chosen_without_test_data(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_constants, "GRID", {"threshold": (2.5, 3.0), "mix": (0.6,), "strength": (1.0,)})
    found = drift_constants.constants([run])
    poisoned = perada.load(run.path, device="cpu")
    targets = poisoned.federation.targets.clone()
    targets[poisoned.federation.test] = (targets[poisoned.federation.test] + 1) % 10
    poisoned.__dict__["federation"] = replace(poisoned.federation, targets=targets)
    assert drift_constants.constants([poisoned]) == found
    assert len(found["candidates"]) == 2


def test_the_rule_of_the_constants() -> None:
    def row(home: float, abroad: float, alarms: float) -> dict[str, dict[str, float]]:
        return {"32": {"home": home, "abroad": abroad, "mixed": abroad, "alarms": alarms}}

    pilot, other, third = Drift(threshold=2.5), Drift(threshold=3.0), Drift(threshold=4.0)

    def best(*rows: tuple[Drift, dict[str, dict[str, float]]]) -> Drift:
        return drift_constants.chosen(rows, alone=90.0)

    assert best((pilot, row(90, 60, 0.0)), (other, row(90, 60.1, 0.0))) == pilot  # within 0.2
    assert best((pilot, row(90, 60, 0.0)), (other, row(90, 61, 0.0))) == other
    assert best((pilot, row(90, 60, 0.0)), (other, row(89.6, 61, 0.0))) == pilot  # it costs too much at home
    assert best((pilot, row(90, 70, 0.02)), (other, row(90, 61, 0.01))) == other  # too many alarms
    assert best((pilot, row(90, 70, 0.03)), (other, row(90, 61, 0.02)), (third, row(90, 62, 0.02))) == third
