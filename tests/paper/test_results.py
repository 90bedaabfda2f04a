"""What is kept of a run, and the statistics over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import results
from perada.errors import InputError

from .tiny import result


def test_an_interval_is_students_t() -> None:
    draws = [3.0, 5.0, 4.5, 7.25]
    found = results.interval(draws)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(draws), scale=stats.sem(draws))
    assert found is not None
    assert found.half is not None
    assert found.low == pytest.approx(low)
    assert found.mean + found.half == pytest.approx(high)


def test_three_seeds_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.3027: 2 ± 4.3027/√3 = 2.4841."""
    found = results.paired({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert found is not None
    assert found.text(sign=True) == "+2.00 [-0.48, +4.48]"
    assert found.seeds == 3


def test_pairs_are_of_the_same_seed() -> None:
    """What only one of them has is left out; unpaired the spread of the seeds would drown the difference."""
    found = results.paired({0: 1.0, 1: 51.0, 7: 3.0, 3: None}, {1: 50.0, 0: 0.0, 3: 2.0})
    assert found == results.Interval(1.0, 0.0, 2)
    assert results.paired({0: 1.0}, {0: 0.0}) == results.Interval(1.0, None, 1)
    assert results.paired({0: 1.0}, {1: 0.0}) is None
    one = results.interval([1.5])
    assert one is not None
    assert one.text() == "1.50"


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for text in ("{", "[]", json.dumps({"experiment": "main"})):
        (tmp_path / "main" / "x.json").write_text(text)
        with pytest.raises(InputError, match=r"x\.json"):
            results.read(tmp_path, "main")
    assert results.read(tmp_path, "nothing") == {}


@pytest.mark.parametrize(
    "other",
    [
        {"method": "x"},
        {"method": {}},
        {"seed": None},
        {"rounds": "3"},
        {"rows": "x"},
        {"rows": [3]},
        {"rows": [{"round": 1, "local_test": 3}]},
        {"validation": {}},
        {"validation": {"local_val": "x", "server_val": None}},
        {"guard": {}},
        {"last": None},
        {"last": {"local_test": {"mean": "x"}}},
        {"last": {"global_model": []}},
        {"seconds": None},
        {"together": 0},
        {"date": None},
        {"versions": {}},
        {"last": {"global_model": {"global_test": 1.0, "shifted": "x"}}},
        {"weights": []},
        {"weights": {"file": 3}},
    ],
)
def test_a_result_of_other_kinds_is_one_line(other: dict[str, object], tmp_path: Path) -> None:
    results.write(tmp_path, {**result("main", "ditto-0", "ditto", 0, {}), **other})
    with pytest.raises(InputError, match=r"ditto-0\.json is damaged: remove it"):
        results.read(tmp_path, "main")


@pytest.mark.parametrize("word", ["NaN", "Infinity"])
def test_what_is_no_number_is_none_of_a_result(word: str, tmp_path: Path) -> None:
    path = results.write(tmp_path, result("main", "ditto-0", "ditto", 0, {}, seconds=12.5))
    path.write_text(path.read_text().replace("12.5", word))
    with pytest.raises(InputError, match=r"ditto-0\.json is damaged"):
        results.read(tmp_path, "main")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    one = result("main", "ditto-0", "ditto", 0, {"local_test": {"mean": float("nan")}})
    path = results.write(tmp_path, one)
    assert path == tmp_path / "main" / "ditto-0.json"
    found = results.read(tmp_path, "main")["ditto-0"]
    assert found["last"]["local_test"]["mean"] is None, "JSON has no NaN"
    assert results.value(found, "Local") is None
    assert {**found, "last": {}} == {**one, "last": {}}


def test_the_second_half_is_the_mean_of_its_evaluations() -> None:
    """Of 40 rounds those of 20, 30 and 40 count; a number that one of them has not is none of the mean's."""
    none = {"global_test": None}
    rows = [{"round": n, "local_test": {"mean": float(n)}, "global_model": none} for n in (10, 20, 30, 40)]
    held = result("main", "ditto-0", "ditto", 0, {}, rows=rows, rounds=40)
    assert results.later(held, "local_test") == 30.0
    assert results.later(held, "global_model", "global_test") is None
    assert results.later(held, "shifted") is None
