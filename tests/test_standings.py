"""The paper's tables from summaries written by hand, so every mark, mean and character is known."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from perada.cli import tables
from perada.client.scores import Scores
from perada.methods import REGISTRY
from perada.report import standings as st

SIZES = {"standalone": (78_042, 0), "ditto": (156_084, 78_042), "perada": (24_660, 12_330), "fedavg": (78_042, 78_042)}


def scores(mean: float | None, std: float = 0.0) -> dict[str, Any]:
    """Two clients with this mean and standard deviation."""
    return Scores({"a": None, "b": None} if mean is None else {"a": mean - std, "b": mean + std}).as_dict()


def summary(
    method: str,
    local: float | None,
    everybody: float | None = 50.0,
    std: float = 1.0,
    server: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns the part of summary.json that tables read."""
    trained, sent = SIZES.get(method, (1, 1))
    return {
        "data": "digits",
        "metric": "accuracy",
        "method": method,
        "round": 1,
        "local_test": scores(local, std),
        "global_test": scores(everybody, std),
        "global_model": None if server is None else {"global_test": server},
        "parameters": {"trained": trained, "communicated": sent},
        **more,
    }


def example() -> st.Standings:
    """Two seeds of three methods; standalone has no global model, ditto was not tested on shifted images."""
    shifted = {"shifted": scores(20.0, 2.0)}
    return st.standings(
        [
            summary("perada", 90.0, 40.0, std=4.0, server=60.0, **shifted),
            summary("ditto", 80.004, 45.0, std=3.0, server=61.0),
            summary("standalone", 80.0, 30.0, std=1.0, **shifted),
            summary("perada", 92.0, 42.0, std=6.0, server=64.0, **shifted),
            summary("ditto", 80.0, 47.0, std=5.0, server=61.0),
            summary("standalone", 80.0, 30.0, std=2.0, **shifted),
        ]
    )


# Means, deviations, order.


def test_a_row_is_the_mean_over_seeds_with_both_deviations() -> None:
    """Local 90 and 92, deviations over clients 4 and 6: 91, 5, and sqrt(2) between the seeds (n - 1)."""
    rows = {r.method: r for r in example().rows}
    perada = rows["perada"]
    assert perada.seeds == 2
    assert perada.personal["local_test"] == pytest.approx((91.0, 5.0, 2**0.5))
    assert perada.personal["global_test"] == pytest.approx((41.0, 5.0, 2**0.5))
    assert perada.personal["shifted"] == pytest.approx((20.0, 2.0, 0.0))
    assert perada.server["global_test"] == (62.0, None, pytest.approx(8**0.5))
    assert (perada.trained, perada.communicated) == (24_660, 12_330)
    assert rows["standalone"].server == {"global_test": None, "shifted": None}
    assert rows["ditto"].personal["shifted"] is None


def test_three_seeds_by_hand() -> None:
    found = st.standings([summary("fedavg", v, std=s) for v, s in ((1.0, 1.0), (2.0, 2.0), (6.0, 6.0))]).rows[0]
    assert found.personal["local_test"] == pytest.approx((3.0, 3.0, np.sqrt((4 + 1 + 9) / 2)))


def test_a_seed_without_a_value_leaves_none() -> None:
    """A mean over fewer seeds would not compare with the other methods."""
    row = st.standings([summary("fedavg", 70.0), summary("fedavg", None)]).rows[0]
    assert row.personal["local_test"] is None
    assert row.personal["global_test"] is not None


def test_rows_are_in_the_papers_order_however_they_come() -> None:
    names = list(REGISTRY)
    found = st.standings([summary(m, 50.0) for m in [*names[::-2], *names[-2::-2]]])
    assert [r.method for r in found.rows] == names


def test_the_title_says_what_the_numbers_are() -> None:
    one = st.standings([summary("fedavg", 70.0)])
    assert one.about() == "digits: accuracy in %, mean ± std over the clients' personal models"
    assert example().about() == one.about() + ", mean of 2 seeds"
    assert st.standings([summary("fedavg", 70.0, metric="auc")]).about().startswith("digits: AUC in %")
    partial = {"mean": 70.0, "std": 1.0, "per_client": {"a": 69.0, "b": 71.0, "c": None}}
    assert st.standings([summary("fedavg", 70.0) | {"local_test": partial}]).about() == (
        "digits: accuracy in %, mean ± std over the clients' personal models (over 2 of 3 clients)"
    )


# Best and runner-up.


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, 3.0, 2.0], ["", "best", "next"]),
        ([3.0, 1.0], ["best", "next"]),
        ([1.0], [""]),
        ([], []),
        ([None, 1.0, None], ["", "", ""]),
        ([None, None], ["", ""]),
        ([None, 1.0, 2.0], ["", "next", "best"]),
        ([5.0, 5.0, 4.0, 3.0], ["best", "best", "next", ""]),
        ([5.0, 4.0, 4.0], ["best", "next", "next"]),
        ([5.0, 5.0], ["best", "best"]),
        ([0.0, None, 0.0], ["best", "", "best"]),
        ([90.004, 89.996, 80.0], ["best", "best", "next"]),  # both are shown as 90.00
        ([90.006, 90.004], ["best", "next"]),  # 90.01 and 90.00
        ([99.996, 100.0, 99.99], ["best", "best", "next"]),
    ],
)
def test_places_are_of_the_numbers_as_they_are_shown(values: list[float | None], wanted: list[str]) -> None:
    assert st.places(values) == wanted


@pytest.mark.parametrize("seed", range(5))
def test_equal_text_has_equal_marks(seed: int) -> None:
    """Values that print the same two decimals have the same mark, also at exact halves."""
    draw = np.random.default_rng(seed)
    values = [float(v) for v in np.concatenate([draw.integers(0, 40, 60) * 0.005 + 33, 33 + draw.random(60) * 0.2])]
    marks: dict[str, set[str]] = {}
    for value, place in zip(values, st.places(values), strict=True):
        marks.setdefault(f"{value:.2f}", set()).add(place)
    assert all(len(found) == 1 for found in marks.values())
    order = sorted(marks, key=float, reverse=True)
    assert [marks[o] for o in order[:3]] == [{"best"}, {"next"}, {""}]


# The texts, to the character.


def test_markdown() -> None:
    """Ditto's and standalone's Local-test are both shown as 80.00: both are runners-up."""
    assert st.markdown(example()) == (
        "digits: accuracy in %, mean ± std over the clients' personal models, mean of 2 seeds."
        " Best in bold, runner-up underlined.\n"
        "\n"
        "| method | trained | sent | Local-test | Global-test | shifted |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| standalone | 78,042 | 0 | <u>80.00</u> ± 1.50 | 30.00 ± 1.50 | **20.00** ± 2.00 |\n"
        "| ditto | 0.16M | 78,042 | <u>80.00</u> ± 4.00 | **46.00** ± 4.00 | n/a |\n"
        "| perada | 24,660 | 12,330 | **91.00** ± 5.00 | <u>41.00</u> ± 5.00 | **20.00** ± 2.00 |\n"
        "\n"
        "| global model of | Global-test |\n"
        "| --- | ---: |\n"
        "| ditto | <u>61.00</u> ± 0.00 |\n"
        "| perada | **62.00** ± 2.83 |\n"
    )


LATEX = r"""% digits: accuracy in %, mean ± std over the clients' personal models, mean of 2 seeds; needs booktabs
\begin{tabular}{lrrrrr}
\toprule
method & trained & sent & Local-test & Global-test & shifted \\
\midrule
standalone & 78,042 & 0 & \underline{80.00} $\pm$ 1.50 & 30.00 $\pm$ 1.50 & \textbf{20.00} $\pm$ 2.00 \\
ditto & 0.16M & 78,042 & \underline{80.00} $\pm$ 4.00 & \textbf{46.00} $\pm$ 4.00 & n/a \\
perada & 24,660 & 12,330 & \textbf{91.00} $\pm$ 5.00 & \underline{41.00} $\pm$ 5.00 & \textbf{20.00} $\pm$ 2.00 \\
\bottomrule
\end{tabular}

\begin{tabular}{lr}
\toprule
global model of & Global-test \\
\midrule
ditto & \underline{61.00} $\pm$ 0.00 \\
perada & \textbf{62.00} $\pm$ 2.83 \\
\bottomrule
\end{tabular}
"""


def test_latex() -> None:
    assert st.latex(example()) == LATEX


@pytest.mark.parametrize("data", ["digits", "my_50%_data"])
def test_latex_compiles_in_principle(data: str) -> None:
    """Outside comments: ASCII only, special characters escaped, braces and environments in pairs, equal columns."""
    found = st.standings([summary(m, 50.0 + i, server=1.0, data=data) for i, m in enumerate(("ditto", "fedavg"))])
    lines = st.latex(found).splitlines()
    assert [line for line in lines[1:] if line.startswith("%")] == [], "the one comment is the first line"
    body = [line for line in lines if line and not line.startswith("%")]
    assert body
    width = 0
    for line in body:
        assert line.isascii()
        assert line.count("{") == line.count("}")
        assert not set(line.replace(r"\_", "").replace(r"\%", "")) & set("_%#^~")
        if line.startswith(r"\begin{tabular}"):
            width = len(line.removeprefix(r"\begin{tabular}").strip("{}"))
        if line.endswith(r"\\"):
            assert line.count("&") == width - 1
            assert line.count("$") % 2 == 0
    text = "\n".join(body)
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2


def test_latex_escapes_what_a_cell_may_hold() -> None:
    assert st._tabular(["a_b", "c%"], [["d_e", "1 ± 2%"]]) == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & c\% \\",
        r"\midrule",
        r"d\_e & 1 $\pm$ 2\% \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_comma_separated_has_every_number_unrounded() -> None:
    lines = st.comma_separated(example()).splitlines()
    columns = ("local_test", "global_test", "shifted", "global_model_global_test", "global_model_shifted")
    names = [f"{c}_{part}" for c in columns for part in ("mean", "std_clients", "std_seeds")]
    assert lines[0] == ",".join(["method", "seeds", "trained", "communicated", *names])
    assert lines[1] == "standalone,2,78042,0,80.0,1.5,0.0,30.0,1.5,0.0,20.0,2.0,0.0,,,,,,"
    rows = {r["method"]: r for r in csv.DictReader(io.StringIO("\n".join(lines)))}
    assert float(rows["ditto"]["local_test_mean"]) == (80.004 + 80.0) / 2
    assert float(rows["perada"]["global_model_global_test_std_seeds"]) == pytest.approx(8**0.5, abs=1e-15)
    assert rows["ditto"]["shifted_mean"] == ""
    assert rows["perada"]["global_model_global_test_std_clients"] == "", "one model has no spread"


def test_one_seed_has_no_deviation_over_seeds() -> None:
    """That also holds in a table where other methods have two seeds."""
    one, *two = (summary(m, 70.0, server=s) for m, s in (("fedavg", 50.0), ("ditto", 50.0), ("ditto", 52.0)))
    found = st.standings([one, *two])
    rows = {m["name"]: m for m in st.as_json(found)["methods"]}
    assert rows["fedavg"]["local_test"]["std_seeds"] is None
    assert rows["fedavg"]["global_model"]["global_test"] == {"mean": 50.0, "std_clients": None, "std_seeds": None}
    assert rows["ditto"]["global_model"]["global_test"]["std_seeds"] == pytest.approx(2**0.5)
    text = st.markdown(found)
    assert "| fedavg | <u>50.00</u> |" in text
    assert "| ditto | **51.00** ± 1.41 |" in text


def test_one_row_has_no_marks_in_any_format() -> None:
    """A single row has nothing to be compared with, so it must not be bold."""
    found = st.standings([summary("fedavg", 70.123, 50.5, std=1.0, server=50.5)])
    assert "| fedavg | 78,042 | 78,042 | 70.12 ± 1.00 | 50.50 ± 1.00 |" in st.markdown(found)
    assert "| fedavg | 50.50 |" in st.markdown(found), "one seed: nothing behind the global model's number"
    for mark in ("textbf", "underline"):
        assert mark not in st.latex(found)


@pytest.mark.parametrize("made", [st.markdown, st.latex])
def test_without_a_global_model_there_is_one_table(made: Any) -> None:
    found = st.standings([summary("standalone", 70.0)])
    assert "global model" not in made(found)
    assert len(tables.standings(found)) == 1


def test_a_global_model_that_scores_nothing_is_still_one() -> None:
    found = st.standings([summary("fedavg", 70.0, server=0.0), summary("standalone", 70.0)])
    assert "| fedavg | 0.00 |" in st.markdown(found)
    assert "| standalone | 0.00" not in st.markdown(found)


def test_the_global_models_shifted_column() -> None:
    ones = [summary(m, 70.0, server=50.0) for m in ("fedavg", "ditto")]
    for one, value in zip(ones, (30.0, 33.0), strict=True):
        one["global_model"]["shifted"] = value
    text = st.markdown(st.standings(ones))
    assert "| ditto | **50.00** | **33.00** |" in text
    assert "| fedavg | **50.00** | <u>30.00</u> |" in text


def test_json_has_nulls_where_there_is_nothing() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(json.dumps(st.as_json(example())), parse_constant=refuse)
    assert (found["data"], found["metric"]) == ("digits", "accuracy")
    rows = {m["name"]: m for m in found["methods"]}
    assert list(rows) == ["standalone", "ditto", "perada"]
    assert rows["standalone"]["global_model"] is None
    assert rows["ditto"]["shifted"] is None
    assert rows["perada"]["global_model"]["global_test"]["mean"] == 62.0
    assert rows["perada"]["local_test"] == {"mean": 91.0, "std_clients": 5.0, "std_seeds": pytest.approx(2**0.5)}
    assert rows["perada"]["communicated"] == 12_330


def test_the_terminal_shows_the_same_marks() -> None:
    """Escape code 1 is bold, 4 is underlined; all 21 methods with long numbers fit 80 columns."""
    console = Console(force_terminal=True, color_system="standard", width=80, record=True, file=io.StringIO())
    for table in tables.standings(example()):
        console.print(table)
    text = console.export_text(styles=True)
    assert "\x1b[1m91.00\x1b[0m ± 5.00" in text
    assert "\x1b[4m80.00\x1b[0m ± 4.00" in text
    plain = Console(width=80, record=True, file=io.StringIO())
    found = st.standings(
        [summary(m, 100.0, 100.0, std=50.0, server=9.0, shifted=scores(100.0, 50.0)) for m in REGISTRY]
    )
    for table in tables.standings(found):
        plain.print(table)
    lines = plain.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for method in REGISTRY:
        row = next(line for line in lines if line.startswith(f"{method} "))
        assert row.count("100.00 ± 50.00") == 3
