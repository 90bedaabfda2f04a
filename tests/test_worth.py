"""What a score is worth: intervals by the number of test images, and the most frequent class."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from small import plain

import perada
from perada.cli.tables import results
from perada.client.interval import wilson
from perada.client.scores import majority_scores
from perada.data import Federation
from perada.report.facts import gather_facts
from perada.report.worth import Worth, margin


@pytest.mark.parametrize(("right", "images"), [(0, 5), (36, 36), (20, 36), (499, 500)])
def test_an_interval_is_wilsons(right: int, images: int) -> None:
    oracle = binomtest(right, images).proportion_ci(method="wilson")
    assert wilson(right, images) == pytest.approx((100 * oracle.low, 100 * oracle.high), abs=1e-4)


def test_the_margin_of_a_mean_covers_it() -> None:
    """95 of 100 times: means of three clients' accuracies, drawn from known chances."""
    draw, chances, images = np.random.default_rng(0), np.array([0.95, 0.7, 0.5]), np.array([36, 20, 50])
    found = draw.binomial(images, chances, (4000, 3))
    hit = [
        abs(np.mean(one / images) - chances.mean()) * 100
        <= (margin([(100 * k / n, int(n)) for k, n in zip(one, images, strict=True)]) or 0)
        for one in found
    ]
    assert 0.93 <= np.mean(hit) <= 0.98
    assert margin([]) is None


def test_the_most_frequent_class_is_that_of_the_clients_training_data() -> None:
    x = np.zeros((10, 8, 8), np.uint8)
    fed = Federation.from_arrays(
        {"a": (x, np.array([0] * 7 + [1] * 3)), "b": (x, np.array([1] * 10))},
        classes=("cat", "dog"),
        val=0.0,
        test={"a": (x[:4], np.array([0, 1, 1, 1])), "b": (x[:4], np.array([1, 1, 0, 1]))},
    )
    scores = majority_scores(fed)
    assert scores["local_test"].per_client == {"a": 25.0, "b": 75.0}
    assert scores["global_test"].per_client == {"a": 25.0, "b": 75.0}  # 2 of 8 are cats


def test_a_run_says_what_its_scores_are_worth(tmp_path: Path) -> None:
    run = perada.train("digits", set=plain({"train.rounds": 1, "distill.steps": 0}), out=tmp_path / "run")
    fed, (facts,) = run.federation, gather_facts([run])
    client = fed.clients[0]
    labels = fed.targets.numpy()
    common = np.bincount(labels[client.train], minlength=10).argmax()
    assert facts.worth.constant[client.name] == pytest.approx(100 * (labels[client.test] == common).mean())
    score = run.summary["local_test"]["per_client"][client.name]
    low, high = wilson(round(score * len(client.test) / 100), len(client.test)) or (0, 0)
    assert facts.worth.interval(client.name) == f"{low:.0f} to {high:.0f}"
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert all(line in page for line in facts.worth.lines)
    assert len(facts.worth.lines) == 2
    assert f"<td>{low:.0f} to {high:.0f}</td>" in page
    assert all(line in str(results([run]).caption) for line in facts.worth.lines)


def test_an_older_run_and_odd_values_have_no_lines() -> None:
    sizes = {"a": [1, 1, 5]}
    one = {"per_client": {"a": 50.0}}
    assert len(Worth({"local_test": one, "majority": {"local_test": one}}, sizes).lines) == 2
    for summary in ({}, {"local_test": one}, {"local_test": one, "majority": [1]}, {"majority": {"local_test": one}}):
        assert Worth(summary, sizes).lines == []
    odd = {"local_test": {"per_client": {"a": None, "b": "x"}}, "majority": {"local_test": one}}
    assert Worth(odd, sizes).lines == []
    assert Worth({"local_test": one, "majority": {"local_test": one}}, {}).lines == []
