"""The report's newer parts, each against values known by hand or from another library."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from small import SMALL, damage, plain

import perada
from perada.cli import main as cli
from perada.client.cost import RoundCost
from perada.client.scores import Scores
from perada.errors import InputError
from perada.report import standings as st
from perada.report import write_report
from perada.report.charts import Spot, heat, scatter
from perada.report.choices import choices, chosen_row
from perada.report.costs import read_costs, write_costs
from perada.report.groups import interval, over_seeds
from perada.report.trust import Reliability, label_of, roc, sensitivity_at
from perada.runs.moment import Evaluation
from perada.runs.shifts import Shifts

SETTINGS = {"train.rounds": 1, "data.clients": 3, "run.shifts": True, "run.severities": [1, 4]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> perada.Run:
    """A run with a global model, tested on corrupted images."""
    return perada.train("digits", set=plain(SETTINGS), out=tmp_path_factory.mktemp("run") / "perada-0")


def test_an_interval_over_seeds_is_students() -> None:
    values = [90.0, 92.0, 97.0]
    mean, half = interval(values)
    ends = student.interval(0.95, 2, loc=93.0, scale=np.std(values, ddof=1) / 3**0.5)
    assert (mean, half) == pytest.approx((93.0, (ends[1] - ends[0]) / 2))
    assert interval([90.0]) == (90.0, None)
    assert interval([90.0, None]) == interval([]) == (None, None)


def test_a_line_over_seeds_has_the_rounds_that_all_have() -> None:
    points = over_seeds([[(1, 10.0, 9.0), (2, 20.0, 9.0), (3, 1.0, 0.0)], [(1, 14.0, 9.0), (2, None, None)]])
    assert points == [(1, 12.0, pytest.approx(8**0.5)), (2, None, None)]


# Corruptions


def test_the_summary_has_every_corruption_and_their_mean_is_shifted(run: perada.Run) -> None:
    shifts = Shifts.read(run.summary["shifts"])
    assert shifts.severities == (1, 4)
    assert len(shifts.personal) == len(shifts.server) == 19
    cells = [value for row in shifts.personal.values() for value in row]
    assert np.mean(cells) == pytest.approx(run.summary["shifted"]["mean"], abs=0.005)
    assert np.mean(list(shifts.server.values())) == pytest.approx(run.summary["global_model"]["shifted"], abs=0.005)
    assert shifts.personal["fog"][1] == pytest.approx(run.evaluate("fog:4")["fog:4"].mean, abs=0.005)
    assert len(json.dumps(run.summary["shifts"], indent=1)) < 5000
    assert (run.path / "report.html").read_text().count("kinds of corruption") == 2


def test_an_older_summary_has_no_map_and_a_damaged_one_is_refused(run: perada.Run, tmp_path: Path) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Shifts.read({"severities": [1], "personal": {"fog": [1, 2]}, "global_model": {}})
    with pytest.raises(ValueError, match="a share"):
        Shifts.read({"severities": [1], "personal": {"fog": [101]}, "global_model": {}})
    older = perada.load(run.path)
    without = {key: value for key, value in run.summary.items() if key != "shifts"}
    older.folder.summary = lambda: without  # type: ignore[method-assign]
    write_report([older], tmp_path / "page.html")
    assert "Corruptions" not in (tmp_path / "page.html").read_text()


def test_a_map_has_a_cell_per_score() -> None:
    drawing = ElementTree.fromstring(heat("map", ["1", "5"], {"fog": [80.0, 20.0], "snow": [None, 50.0]}, (20.0, 80.0)))
    shades = [float(one.attrib["style"].partition(":")[2]) for one in drawing.iter("rect")]
    assert shades == pytest.approx([0.6, 0.06, 0, 0.33])
    assert [one.text for one in drawing.iter("text") if one.text in ("80.0", "20.0", "n/a", "50.0")] == [
        "80.0",
        "20.0",
        "n/a",
        "50.0",
    ]


def test_names_of_spots_do_not_overlap() -> None:
    spots = [Spot(f"method-{k}", k, 1000.0, 90.0 + 0.01 * k) for k in range(6)]
    drawing = ElementTree.fromstring(scatter("cost", "bytes", spots, str))
    lines = sorted(float(one.attrib["y"]) for one in drawing.iter("text") if one.text.startswith("method"))
    assert min(np.diff(lines)) >= 11


# Calibration


def test_a_calibration_error_by_hand() -> None:
    """Three of four are right at 0.75: no error. Two of two are right at 0.55: 0.45, with a third of the weight."""
    said, right = np.array([0.75] * 4 + [0.55] * 2), np.array([1, 1, 1, 0, 1, 1.0])
    found = Reliability.of(said, right)
    assert found.error == pytest.approx(0.45 / 3)
    assert (found.counts[7], found.counts[5], sum(found.counts)) == (4, 2, 6)
    assert (found.said[7], found.true[7], found.said[0]) == (pytest.approx(0.75), 0.75, None)
    assert Reliability.of(np.zeros(0), np.zeros(0)).error is None
    assert Reliability.of(np.array([1.0]), np.array([1.0])).error == 0


def test_calibrated_predictions_have_a_small_error() -> None:
    draw = np.random.default_rng(0)
    said = draw.uniform(0, 1, 20_000)
    right = (draw.uniform(0, 1, 20_000) < said).astype(float)
    assert (Reliability.of(said, right).error or 1) < 0.02
    assert (Reliability.of(said**0.25, right).error or 0) > 0.2


def test_a_roc_curve_has_sklearns_area_and_a_sensitivity_by_hand() -> None:
    draw = np.random.default_rng(1)
    truth = draw.integers(0, 2, 300).astype(float)
    said = np.round(truth * 0.3 + draw.uniform(0, 0.7, 300), 2)  # with equal values
    curve = roc(truth, said)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    unknown = np.full(20, np.nan)
    found = label_of("a", np.append(truth, unknown), np.append(said, unknown), np.append(said >= 0.5, unknown))
    assert found.area == pytest.approx(roc_auc_score(truth, said))
    best = max((said[truth == 1] >= c).mean() for c in np.unique(said) if (said[truth == 0] < c).mean() >= 0.95)
    assert found.sensitivity == pytest.approx(best)
    assert found.chosen == pytest.approx(((said[truth == 1] >= 0.5).mean(), (said[truth == 0] < 0.5).mean()))
    assert sensitivity_at([]) is None
    assert roc(np.ones(3), np.ones(3)) == []


# Rounds and sizes


def history(*scores: tuple[float, float, float]) -> list[Evaluation]:
    """Two clients, a with 100 training images and b with 10: validation, and the tests of a and of b."""
    return [
        Evaluation(
            number,
            {"local_val": Scores({"a": val}), **dict.fromkeys(("local_test", "global_test"), Scores({"a": a, "b": b}))},
            global_model=a + b,
            has_global_model=True,
        )
        for number, (val, a, b) in enumerate(scores, 1)
    ]


def fake(method: str, rows: list[Evaluation]) -> Any:
    about = {"clients": {"a": [100, 1, 1], "b": [10, 1, 1]}}
    folder = SimpleNamespace(evaluations=lambda: rows, about=lambda: about)
    return SimpleNamespace(folder=folder, config=SimpleNamespace(method_name=method))


def test_the_chosen_round_is_the_best_on_validation_data_and_the_first_of_equals() -> None:
    rows = history((50.0, 90.0, 10.0), (70.0, 30.0, 20.0), (70.0, 99.0, 99.0))
    assert chosen_row(rows).round == 2
    assert chosen_row([]) is None
    found = choices([fake("perada", rows), fake("perada", history((9.0, 1.0, 1.0), (8.0, 2.0, 4.0)))])
    last, chosen = found.rows
    assert (last.rounds, chosen.rounds) == ((3, 2), (2, 1))
    assert last.every["local_test"] == pytest.approx((99 + 3) / 2)
    assert chosen.every["local_test"] == pytest.approx((25 + 1) / 2)
    assert (found.above, chosen.large["local_test"]) == (55, pytest.approx((30 + 1) / 2))
    assert chosen.server == pytest.approx((50 + 2) / 2)
    head, table = found.part
    assert head == ["method", "round", "Local-test", "≥ 55", "Global-test", "≥ 55", "global model"]
    assert table[1][:4] == ["perada", "chosen (1–2)", "13.00", "15.50"]
    assert list(csv.reader(found.comma_separated().splitlines()))[2][:4] == ["perada", "chosen", "2 1", "55"]
    assert choices([fake("perada", rows)], above=1).above is None


def test_runs_of_unlike_settings_are_not_averaged() -> None:
    runs = [fake("perada", history((9.0, 1.0, 1.0))), fake("perada", history((9.0, 3.0, 3.0)))]
    found = choices(runs, labels=["perada (a)", "perada (b)"]).rows
    assert [(one.method, one.every["local_test"]) for one in found if one.which == "last"] == [
        ("perada (a)", 1.0),
        ("perada (b)", 3.0),
    ]


def test_a_method_without_validation_data_has_its_last_round_alone() -> None:
    rows = [Evaluation(1, {"local_test": Scores({"a": 1.0, "b": 2.0})})]
    (one,) = choices([fake("standalone", rows)]).rows
    assert (one.which, one.server, one.every["global_test"]) == ("last", None, None)


# Costs


def test_tables_have_the_costs_but_files_not_the_seconds(tmp_path: Path) -> None:
    cost = RoundCost(54_000, 108_000, 1.5, 3 << 20, 0.25)
    write_costs(tmp_path, {"perada": cost})
    assert read_costs(tmp_path) == {"perada": cost}
    table = st.Standings("digits", "accuracy", (), costs={"perada": cost})
    ((about, (head, rows)),) = st.further_parts(table)
    assert (head[-1], rows) == ("MiB", [["perada", "54", "108", "1.50", "3"]])
    assert "seconds" not in about
    ((about, (head, rows)),) = st.further_parts(table, seconds=True)
    assert (head[-1], rows[0][-1]) == ("s", "0.25")
    damage(tmp_path / "cost.json", "cut")
    assert read_costs(tmp_path) == read_costs(tmp_path / "none") == {}


def test_a_comparison_has_the_baseline_costs_and_grouped_seeds(tmp_path: Path) -> None:
    said: list[str] = []
    settings = {**SMALL, "train.rounds": 1, "distill.steps": 0}
    made = perada.compare(
        "digits", methods="fedavg", seeds=2, set=settings, out=tmp_path / "c", jobs=1, say=said.append
    )
    assert [row["name"] for row in made.table()] == ["standalone", "fedavg"]
    assert any(line.startswith("standalone is compared, too") for line in said)
    costs = {row["name"]: row["cost"] for row in made.table()}
    assert costs["standalone"]["bytes_up"] == 0 < costs["fedavg"]["bytes_up"]
    assert costs["fedavg"]["gflop"] == pytest.approx(costs["standalone"]["gflop"])
    assert made.table()[1]["rounds"]["last"]["rounds"] == [1, 1]
    page = (made.path / "report.html").read_text()
    for words in ("Single runs", "the mean over seeds", "What a round costs a client", "Cost and score"):
        assert words in page
    mean, half = interval([run.summary["local_test"]["mean"] for run in made.runs if run.path.name.startswith("f")])
    assert f"{mean:.2f}" in page
    assert f"± {half:.2f}" in page
    again = tmp_path / "again.html"
    write_report(made.runs, again)
    assert again.read_bytes() == (made.path / "report.html").read_bytes()


# Figures for papers


def test_figures_are_written_in_three_formats_and_are_the_same_twice(run: perada.Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = ["report", str(run.path), "--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / name)]
        assert cli.main(words) == 0
    files = {p.name: p.read_bytes() for p in sorted((tmp_path / "one").iterdir())}
    assert files == {p.name: p.read_bytes() for p in sorted((tmp_path / "two").iterdir())}
    assert {p.suffix for p in map(Path, files)} == {".svg", ".pdf", ".png"}
    assert len(files) == 3 * (tmp_path / "page.html").read_text().count("<figure>")
    assert all(data.startswith(b"%PDF") for name, data in files.items() if name.endswith(".pdf"))
    image = Image.open(tmp_path / "one" / "over-rounds-local-test.png")
    assert image.size[0] > 1000
    assert (47, 107, 216) in {colour[:3] for _, colour in image.getcolors(10**6)}, "the page's blue"


def test_figures_need_a_folder_that_can_be_written(run: perada.Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to"):
        write_report([run], tmp_path / "page.html", figures=tmp_path / "file")
