"""Is it worth joining: paired intervals against answers that are known, and the sentences on the page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from commands import said, train

import perada
from perada.cli import main as cli
from perada.report.joining import Difference, Site, joining, paired, same_split


def test_a_difference_by_hand() -> None:
    one = np.array([True] * 70 + [False] * 30)
    other = np.array([True] * 60 + [False] * 10 + [True] * 5 + [False] * 25)  # 10 gained, 5 lost
    found = paired(one, other)
    assert found is not None
    assert found.value == pytest.approx(5.0)
    assert found.images == 100
    deviation = 100 * np.sqrt((0.15 - 0.05**2) / 100)
    assert found.low == pytest.approx(5 - 1.96 * deviation, abs=1.1)
    assert found.high == pytest.approx(5 + 1.96 * deviation, abs=1.1)
    assert found.verdict == 0


def test_pairs_tell_more_than_two_separate_samples() -> None:
    """Two models that are right on the same images, but for a few: the pairs see a difference that counts hide."""
    draw = np.random.default_rng(0)
    other = draw.random(400) < 0.6
    one = other | (draw.random(400) < 0.08)
    found = paired(one, other)
    assert found is not None
    assert found.verdict == 1
    assert found.high - found.low < 100 * 2 * 1.96 * np.sqrt(2 * 0.6 * 0.4 / 400) / 2
    back = paired(other, one)
    assert back is not None
    assert (back.value, back.verdict) == (-found.value, -1)


def test_equal_models_and_no_images() -> None:
    same = paired(np.array([True, False]), np.array([True, False]))
    assert same is not None
    assert (same.value, same.low, same.high, same.verdict) == (0, 0, 0, 0)
    assert paired(np.zeros(0, bool), np.zeros(0, bool)) is None


def test_the_interval_holds_as_often_as_it_says() -> None:
    """Models that are right on 70% and 60% of all images, in pairs of images: 95% of the intervals have 10 points."""
    draw, held = np.random.default_rng(3), 0
    for trial in range(200):
        level = draw.random(150)
        one, other = level < 0.7, (level + draw.normal(0, 0.2, 150)) < 0.6
        big = draw.random(200_000)
        truth = 100 * (0.7 - float(np.mean(big + draw.normal(0, 0.2, 200_000) < 0.6)))
        found = paired(one, other, trial)
        assert found is not None
        held += found.low <= truth <= found.high
    assert 180 <= held <= 199


def site(own: float, low: float, high: float, alone: bool = True) -> str:
    other = "alone" if alone else "common"
    return Site("north", {other: Difference(own, low, high, 50)}, {other: Difference(-3.0, -5.0, -1.0, 90)}).sentence


def test_sentences() -> None:
    assert site(4.2, 1.0, 7.4) == (
        "north: joining is worth it: compared with a model trained alone, 4.2 points better (95%: +1.0 to +7.4) on its "
        "own images, and 3.0 points worse (95%: -5.0 to -1.0) on everybody's."
    )
    assert "joining costs accuracy" in site(-4.2, -7.0, -1.0)
    assert "cannot tell whether" in site(0.0, -2.0, 2.0)
    assert "equally good (95%: -2.0 to +2.0)" in site(0.0, -2.0, 2.0)
    assert "right on the same of 50 images" in site(0.0, 0.0, 0.0), "no interval: nothing was resampled"
    assert "its personal model is the one to use at home" in site(4.2, 1.0, 7.4, alone=False)
    assert "the common model is the one to use" in site(-4.2, -7.0, -1.0, alone=False)
    assert Site("x", {"common": None}, {"common": None}).sentence.startswith("x has no test images")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("joining")
    for method in ("perada", "standalone"):
        assert train(home / method, "--method", method, data__test=0.2, data__server_val=0.5) == 0
    assert train(home / "split", "--method", "standalone", data__test=0.2, data__server_val=0.5, data__seed=9) == 0
    return {name: home / name for name in ("perada", "standalone", "split")}


def test_the_differences_are_those_of_the_scores(runs: dict[str, Path]) -> None:
    run, alone, split = (perada.load(runs[name], device="cpu") for name in ("perada", "standalone", "split"))
    assert same_split([split, alone, run], run) is alone
    assert same_split([split, run], run) is None
    assert same_split([alone], alone) is None
    scores, other = run.summary, alone.summary
    for found in joining(run, alone):
        own, everybody, common = found.own["alone"], found.everybody["alone"], found.everybody["common"]
        assert own is not None
        assert everybody is not None
        assert common is not None
        for difference, split_name in ((own, "local_test"), (everybody, "global_test")):
            expected = scores[split_name]["per_client"][found.name] - other[split_name]["per_client"][found.name]
            assert difference.value == pytest.approx(expected, abs=1e-6)
            assert difference.low <= difference.value <= difference.high
        server = scores["global_model"]["global_test"]
        assert common.value == pytest.approx(scores["global_test"]["per_client"][found.name] - server, abs=1e-6)


def test_a_model_trained_alone_sees_images_as_it_was_trained_on_them(runs: dict[str, Path], tmp_path: Path) -> None:
    """Same split, other normalisation: the differences are still those of the two runs' own scores."""
    how = {"data__test": 0.2, "data__server_val": 0.5, "data__normalise": "imagenet"}
    assert train(tmp_path / "alone", "--method", "standalone", **how) == 0
    run, alone = (perada.load(path, device="cpu") for path in (runs["perada"], tmp_path / "alone"))
    assert same_split([alone], run) is alone
    for found in joining(run, alone):
        own, everybody = found.own["alone"], found.everybody["alone"]
        assert own is not None
        assert everybody is not None
        for difference, split_name in ((own, "local_test"), (everybody, "global_test")):
            scores = [of.summary[split_name]["per_client"][found.name] for of in (run, alone)]
            assert difference.value == pytest.approx(scores[0] - scores[1], abs=1e-6)


def test_the_page_has_what_was_asked_for(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, out = [str(runs["perada"]), str(runs["standalone"])], tmp_path / "page.html"
    said(capsys, "report", *paths, "--out", str(out))
    plain = out.read_text("utf8")
    assert "Is it worth joining?" not in plain
    assert "What the theory says" not in plain
    said(capsys, "report", *paths, "--out", str(out), "--sites", "--theory")
    page = out.read_text("utf8")
    names = perada.load(runs["perada"]).clients
    assert all(re.search(rf"<li>{name}: .*(alone|common)", page) for name in names)
    assert "Theorem 1" in page
    assert "Theorem 2" in page
    assert "vacuous" in page
    assert "Not measured: standalone has no global model" in page
    assert "distill.steps" in page or "public images" in page
    again = tmp_path / "again.html"
    assert cli.main(["report", *paths, "--out", str(again), "--sites", "--theory"]) == 0
    assert again.read_bytes() == out.read_bytes(), "the same runs give the same bytes"


def test_one_run_says_what_would_tell_more(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    said(capsys, "report", str(runs["perada"]), "--out", str(out), "--sites")
    assert "Add a Standalone run" in out.read_text("utf8")
    said(capsys, "report", str(runs["standalone"]), "--out", str(out), "--sites")
    assert "Is it worth joining?" not in out.read_text("utf8"), "alone, it can be compared with nothing"
