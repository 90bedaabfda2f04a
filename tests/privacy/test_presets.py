"""The presets with differential privacy, and what is shown of a run that has it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import perada
from perada.cli import tables
from perada.config import build, resolve
from perada.errors import InputError
from perada.privacy.guarantee import FREE, Guarantee
from perada.report import write_report
from perada.runs.join import join

pytest.importorskip("dp_accounting")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> perada.Run:
    return perada.train("digits-dp", out=tmp_path_factory.mktemp("presets") / "run")


def test_digits_dp_learns_with_a_moderate_epsilon(digits: perada.Run) -> None:
    guarantee = Guarantee.read(digits.summary)
    assert guarantee is not None
    assert 4 < guarantee.mean < 8  # type: ignore[operator]
    assert digits.summary["local_test"]["mean"] > 80
    assert digits.summary["global_test"]["mean"] > 50  # chance is 10
    assert digits.config.train.cohort == 0


def test_the_numbers_of_a_run_agree(digits: perada.Run) -> None:
    rows, guarantee = digits.folder.metrics(), Guarantee.read(digits.summary)
    means = [row["epsilon"]["mean"] for row in rows]
    assert means == sorted(set(means))
    assert means[0] > 0
    assert guarantee is not None
    assert rows[-1]["epsilon"] == {"mean": guarantee.mean, "max": guarantee.most}
    assert guarantee.as_dict() == digits.summary["privacy"]
    assert guarantee.epsilon.keys() == set(digits.clients)


def test_tables_and_pages_say_epsilon(digits: perada.Run) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables.results([digits]))
    text = " ".join(console.export_text().split())
    assert re.search(r"every sample: ε = \d\.\d\d ± \d\.\d\d over clients, at most", text)
    page = (digits.path / "report.html").read_text()
    assert "<h2>Privacy</h2>" in page
    assert FREE in page
    assert "ε per client" in page
    assert "against ε" not in page  # of several runs


def test_a_report_of_several_runs_has_accuracy_against_epsilon(digits: perada.Run, tmp_path: Path) -> None:
    less = perada.train("digits-dp", set={"privacy.noise": 4.0, "train.rounds": 1}, out=tmp_path / "less")
    plain = perada.train(
        "digits-dp", set={"privacy.noise": 0.0, "train.rounds": 1, "run.eval_every": 1}, out=tmp_path / "plain"
    )
    write_report([digits, less, plain], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Local-test against ε" in page
    assert page.count("<title>perada, ε ") == 2


def test_a_damaged_guarantee_is_noticed(digits: perada.Run) -> None:
    for change in ({"level": "nobody"}, {"noise": "1"}, {"epsilon": {"per_client": {"a": None}}}):
        broken = {**digits.summary, "privacy": {**digits.summary["privacy"], **change}}
        with pytest.raises(ValueError, match="another kind"):
            Guarantee.read(broken)


def test_cifar10_dp_has_the_papers_settings() -> None:
    expected: dict[str, Any] = {
        "data.clients": 20,
        "train.rounds": 10,
        "train.epochs": 1,
        "train.cohort": 0,
        "train.lr": 0.2,
        "distill.lr": 0.005,
        "distill.batch": 32,
        "privacy.noise": 1.0,
        "privacy.delta": 1e-5,
        "privacy.level": "sample",
        "model.backbone": "vit_small_patch4",
        "model.adapter": "lora",
    }
    flat = resolve("cifar10-dp").flat()
    assert {key: flat[key] for key in expected} == expected
    rates = {m: resolve("cifar10-dp", {"method.name": m}).train.lr for m in ("perada-no-kd", "ditto")}
    assert rates == {"perada-no-kd": 0.1, "ditto": 0.05}


def test_a_client_cannot_join_a_private_run(digits: perada.Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has differential privacy, which a client that joins later"):
        join(digits, data=str(tmp_path), name="newcomer")


def test_a_comparison_shares_one_noise(tmp_path: Path) -> None:
    """A target is solved for the run's own plan, so each method has its own noise and the same ε at most."""
    noises = {}
    for method in ("perada", "fedavg"):
        settings = {"method.name": method, "privacy.noise": 0.0, "privacy.target": 6.0, "privacy.accountant": "rdp"}
        config = resolve("digits-dp", {**settings, "train.rounds": 2})
        experiment = build(config)
        noises[method] = experiment.privacy.noise
        assert experiment.config == replace(config, privacy=experiment.privacy)
    assert noises["fedavg"] < noises["perada"]  # one copy per client instead of two


def test_rows_of_metrics_are_plain_json(digits: perada.Run) -> None:
    line = (digits.path / "metrics.jsonl").read_text().splitlines()[-1]
    assert set(json.loads(line)["epsilon"]) == {"mean", "max"}
