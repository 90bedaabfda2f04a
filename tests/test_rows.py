"""Typed rows: what is written is read again, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perada.client.scores import Scores
from perada.errors import Damaged
from perada.runs.folder import RunFolder
from perada.runs.moment import Evaluation

SITES = {"north": 50.0, "south": 75.5, "west": None}
LABELS = {"oedema": 61.25, "fracture": None}
COST = {"bytes_up": 215200, "bytes_down": 860800, "distilled": 2, "accepted": 1, "seconds": 0.5, "train_loss": 0.25}
DISTILL = {"kl_first": 0.5, "guard_steps": [0, 1], "guard_losses": [0.75, None], "guard_chose": 1}

ROWS = {
    "simulation": Evaluation(
        2,
        {split: Scores(SITES) for split in ("local_val", "global_test", "local_test")},
        65.5,
        has_global_model=True,
        distill=DISTILL,
        failed=("south",),
        **COST,
    ),
    "no global model": Evaluation(2, {"local_test": Scores(SITES)}, **COST),
    "a global model without test data": Evaluation(2, {"local_test": Scores(SITES)}, has_global_model=True, **COST),
    "network": Evaluation(
        3,
        {split: Scores(SITES) for split in ("local_test", "local_val", "global_test")},
        absent=("west", "east"),
        refused={"east": "late: of round 2"},
        **{**COST, "train_loss": None},
    ),
    "nothing answered": Evaluation(3, {"local_test": Scores(dict.fromkeys(SITES))}, absent=tuple(SITES), **COST),
    "several labels": Evaluation(4, {"local_test": Scores(SITES, LABELS), "local_val": Scores(SITES, {})}, **COST),
    "validation only": Evaluation(1, {"local_val": Scores(SITES), "server_val": Scores(SITES)}, **COST),
    "summary": Evaluation(5, {"shifted": Scores(SITES)}, 65.5, has_global_model=True, global_shifted=0.0, **COST),
    "first round": Evaluation(0, {}),
}

# metrics.jsonl of a run of PerAda and one of standalone, as the version of 17 November 2026 wrote them.
OLD = (
    '{"round": 2, "local_val": {"mean": 97.57495590828925, "std": 1.7156152079668192, "per_client": {"a": '
    '96.29629629629629, "b": 100.0, "c": 96.42857142857143}}, "global_test": {"mean": 39.25925925925926, "std": '
    '7.715802465185057, "per_client": {"a": 38.88888888888889, "b": 48.888888888888886, "c": 30.0}}, '
    '"local_test": {"mean": 97.85714285714285, "std": 1.5430334996209192, "per_client": {"a": 100.0, "b": '
    '97.14285714285714, "c": 96.42857142857143}}, "global_model": {"global_test": 65.55555555555556}, '
    '"bytes_up": 215200, "bytes_down": 860800, "distilled": 2, "accepted": 0, "seconds": 0.5781847820001076, '
    '"train_loss": 0.6950737535953522, "distill": {"kl_first": 0.03869545832276344, "kl_last": '
    '0.04669802635908127, "guard_steps": [0, 1, 2], "guard_losses": [0.6766430139541626, 0.7001893818378448, '
    '0.7076230347156525], "guard_chose": 0}}',
    '{"round": 2, "local_val": {"mean": 90.14991181657848, "std": 1.7516788234033918, "per_client": {"a": '
    '92.5925925925926, "b": 88.57142857142857, "c": 89.28571428571429}}, "global_test": {"mean": '
    '37.77777777777778, "std": 5.9490290385959295, "per_client": {"a": 38.88888888888889, "b": '
    '44.44444444444444, "c": 30.0}}, "local_test": {"mean": 94.04761904761905, "std": 6.070261325705699, '
    '"per_client": {"a": 100.0, "b": 85.71428571428571, "c": 96.42857142857143}}, "global_model": null, '
    '"bytes_up": 0, "bytes_down": 0, "distilled": 0, "accepted": 0, "seconds": 0.2828036160001375, "train_loss": '
    '0.8994191884994507, "distill": null}',
)


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_row_is_read_as_it_was_written(name: str) -> None:
    row = ROWS[name]
    written = row.as_dict()
    assert Evaluation.read(written) == row
    assert Evaluation.read(json.loads(json.dumps(written))) == row
    assert json.dumps(Evaluation.read(written).as_dict()) == json.dumps(written), "the same bytes, keys in their order"


@pytest.mark.parametrize("line", OLD)
def test_a_row_of_an_older_version_is_written_again_byte_for_byte(line: str) -> None:
    row = Evaluation.read(json.loads(line))
    assert json.dumps(row.as_dict()) == line
    assert Evaluation.read(row.as_dict()) == row
    assert (row.round, row.scores["local_test"].per_client["a"], row.accepted) == (2, 100.0, 0)


def test_a_row_without_newer_keys_has_their_defaults() -> None:
    row = Evaluation.read({"round": 7, "local_test": ROWS["simulation"].scores["local_test"].as_dict()})
    assert row == Evaluation(7, {"local_test": Scores(SITES)})


def test_the_committed_results_are_read() -> None:
    """Their rows keep means only, so there are no scores per client; the last evaluation has them."""
    files = sorted((Path(__file__).parents[1] / "results").rglob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        rows = [Evaluation.read(row) for row in result["rows"]]
        assert [r.round for r in rows] == [r["round"] for r in result["rows"]]
        last = Evaluation.read({"round": result["rounds"], **result["last"]})
        assert last.scores["local_val"].mean == pytest.approx(result["last"]["local_val"]["mean"])
        for row in (*rows, last):
            assert Evaluation.read(row.as_dict()) == row


def test_a_folder_gives_its_rows_and_names_a_damaged_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("simulation", "network"):
        folder.append_metrics(ROWS[name].as_dict())
    assert folder.evaluations() == [ROWS["simulation"], ROWS["network"]]
    for wrong in ({"local_test": 5}, {"local_test": {"per_client": 5}}, {"global_model": 5.0}, {"failed": 5}):
        folder.cut_metrics(3)
        folder.append_metrics({"round": 4, **wrong})
        with pytest.raises(Damaged, match=r"metrics\.jsonl is damaged: remove its line 3$"):
            folder.evaluations()


def test_a_few_words_about_a_row() -> None:
    assert ROWS["simulation"].brief() == "local 62.8 (2 of 3) global 62.8 (2 of 3)"
    assert ROWS["nothing answered"].brief() == "local n/a"
    assert ROWS["validation only"].brief() == "val 62.8 (2 of 3)"
    assert ROWS["first round"].brief() == ""
