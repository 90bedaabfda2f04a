"""The document: from the results alone, the same bytes each time, and the checked-in one is what they make."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from experiments import drawings, paper, results
from experiments.__main__ import main as run_experiments
from experiments.document import document, write_document
from experiments.plans import experiments
from experiments.running import state_of
from experiments.study import settled, validation_of
from experiments.trials import REPORTED
from perada.config import resolve
from perada.errors import InputError

from .tiny import result

HOME = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_checked_in_document_is_what_the_results_make() -> None:
    """`python -m experiments document` makes it; this is the check that CI runs."""
    made = document(HOME / "results")
    again = "make it again with: python -m experiments document"
    assert (HOME / "docs" / "results.md").read_text("utf8") == made.pop(""), again
    folder = HOME / "docs" / "results"
    there = {p.name: p.read_text("utf8") for p in folder.glob("*.svg")} if folder.is_dir() else {}
    assert there == made, again


def test_the_checked_in_results_are_small_and_hold_no_path() -> None:
    for path in (HOME / "results").rglob("*.json"):
        text = path.read_text("utf8")
        assert len(text) < 100_000, path
        assert not re.search(r'"/(home|root|tmp|work|mnt)/', text), path


def test_the_preset_is_what_the_study_settled() -> None:
    """Once it is settled, nobody has to remember to write it down."""
    study = experiments()["settle"]
    held = state_of(study, HOME / "results").found
    chosen = settled(study, {n: validation_of(r) for n, r in held.items()})
    own = resolve(study.preset, {}).flat()
    for key, value in (chosen or {}).items():
        assert own[key] == (tuple(value) if isinstance(value, list) else value), key


def fill(root: Path, name: str, **values: Any) -> None:
    """Made-up results for every run of an experiment that can be there, until nothing more follows: for a number
    that a run has no say in, `values` by the variant's name."""
    experiment = experiments()[name]
    while (state := state_of(experiment, root)).left:
        for i, run in enumerate(n for n in state.left if n in state.settings):
            trial, config = experiment.trial(run), state.configs[run]
            base = values.get(run.rpartition("-")[0].replace("-", "_"), 50.0) + config.run.seed
            split = {"mean": base, "std": 1.0, "per_client": {"client-00": base}}
            last: dict[str, Any] = {"metric": "accuracy"}
            if trial.tested:
                last |= {"local_test": split, "global_test": {**split, "mean": base / 2}, "shifted": split}
                last |= {"global_model": {"global_test": base + 1}}
            row = {"round": 1, "local_test": {"mean": base, "std": 1.0}, "global_test": {"mean": base / 2, "std": 1.0}}
            row |= {"server_val": {"mean": 40.0 + i, "std": 1.0}, "local_val": {"mean": 60.0, "std": 1.0}}
            row |= {"global_model": {"global_test": base + 1}}
            made = result(name, run, config.method_name, config.run.seed, last, digest=results.digest(config))
            made |= {"rows": [row, {**row, "round": 2}], "settings": state.settings[run]}
            made |= {"validation": {"local_val": 60.0, "server_val": 40.0 + i}}
            made |= {"guard": {"kind": config.distill.guard, "distilled": 200, "accepted": 10}}
            results.write(root, made)


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_with_nothing_run_it_says_so(tmp_path: Path) -> None:
    made = document(tmp_path)
    assert list(made) == [""]
    for name in REPORTED:
        assert "Nothing was run yet." in section(made[""], name)
        assert f"**{name}**, {len(experiments()[name].trials)} of" in section(made[""], "What is missing")
    assert "Tiny-ImageNet-pretrained" in made[""]


def test_the_main_table_has_both_numbers_and_the_difference_with_its_interval(tmp_path: Path) -> None:
    """PerAda 4 points above, on Local 4, on Global 2, with every seed: an interval of no width."""
    fill(tmp_path, "main", perada=54.0, perada_no_kd=50.0, fedavg_ft=49.0, standalone=48.0, ditto=47.0)
    text = section(document(tmp_path)[""], "main")
    row = next(line for line in text.splitlines() if line.startswith("| perada |"))
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells[:6] == ["perada", "3", "55.00 ± 2.48", "91.82", "27.50 ± 1.24", "59.05"]
    assert cells[-1] == "30 of 600 (5%)"
    lines = [line for line in text.splitlines() if line.startswith(("| perada −", "| the paper's"))]
    assert "| perada − perada-no-kd | +4.00 [+4.00, +4.00] | +2.00 [+2.00, +2.00] |" in lines[0]
    assert "| perada − perada-no-kd, second half | +4.00 [+4.00, +4.00] | +2.00 [+2.00, +2.00] | – |" in lines[1]
    assert "| the paper's | +0.55 | +5.24 | +4.08 | +2.55 |" in lines[2]
    assert "| perada − ditto | +7.00 [+7.00, +7.00] | +3.50 [+3.50, +3.50] |" in lines[3]
    assert "| the paper's | +1.61 | +5.23 | +4.21 | +6.82 |" in lines[4]
    assert [line.partition(" |")[0] for line in lines[5:]] == [
        "| perada − fedavg-ft",
        "| the paper's",
        "| perada − standalone",
        "| the paper's",
    ]
    assert "Global above zero with its whole interval: **yes**; Local not below −0.3: **yes**" in text
    many = len(experiments()["main"].trials)
    assert f"{many} of {many} runs, {many}.0 minutes in all, 2026-11-15, none, torch 0." in text
    order = next(line for line in text.splitlines() if line.startswith("- Global:"))
    assert order.startswith(
        "- Global: perada > perada-no-kd > fedavg-ft > standalone > ditto; the paper: perada > ditto >"
    )
    assert order.endswith("7 of 10 pairs agree.")


def test_seeds_that_are_missing_and_minutes_that_count_twice_are_said(tmp_path: Path) -> None:
    fill(tmp_path, "main")
    for seed in (1, 2):
        (tmp_path / "main" / f"ditto-{seed}.json").unlink()
    results.write(tmp_path, {**results.read(tmp_path, "main")["ditto-0"], "shared_gpu": True})
    text = section(document(tmp_path)[""], "main")
    assert "runs, at most 25.0 minutes in all (1 of the runs shared the GPU with other processes), 2026" in text
    assert "by means alone, also where intervals overlap; ditto: 1 seed.\n" in text
    missing = section(document(tmp_path)[""], "What is missing")
    assert re.search(r"- \*\*main\*\*, 2 of 27 runs, about \d+ minutes of an H200: ditto-1, ditto-2\.\n", missing)
    assert re.search(
        r"\*\*others\*\*, 75 of 75 runs, .* H200: mtl, .*, feddf, scaffold, 58 runs of searches\.", missing
    )


def test_before_its_last_stage_fedavg_ft_has_no_personal_models_to_draw(tmp_path: Path) -> None:
    fill(tmp_path, "main", fedavg_ft=20.0)
    state = state_of(experiments()["main"], tmp_path)
    runs = {v: [state.found[f"{v}-{seed}"] for seed in range(3)] for v in ("ditto", "fedavg-ft")}
    ditto, tuned = drawings.over_rounds(runs, "local_test")
    assert ditto.points == [(1, 51.0, None), (2, 51.0, None)]
    assert tuned.points == [(2, 21.0, None)]
    assert len(drawings.over_rounds(runs, "global_model", "global_test")[1].points) == 2
    text = section(document(tmp_path)[""], "main")
    assert "\nThese have personal models only after their last stage, so they are dots: fedavg-ft.\n" in text


def test_a_long_title_takes_more_lines_and_moves_the_rest_down() -> None:
    drawing = '<svg viewBox="0 0 360 100"></svg>'
    short, long = (drawings.standalone(drawing, t, ["a"]) for t in ("short", "long enough words " * 8))
    texts = [[e.text or "" for e in ElementTree.fromstring(s).iter(f"{SVG}text")] for s in (short, long)]
    assert texts[0] == ["short", "a"]
    assert len(texts[1]) == 4
    assert " ".join(texts[1][:-1]) == ("long enough words " * 8).strip()
    heights = [float(ElementTree.fromstring(s).attrib["viewBox"].split()[3]) for s in (short, long)]
    assert heights[1] - heights[0] == 30


def test_a_target_that_is_missed_is_said_plainly(tmp_path: Path) -> None:
    fill(tmp_path, "main", perada=49.0, perada_no_kd=50.0)
    text = section(document(tmp_path)[""], "main")
    assert "Global above zero with its whole interval: **no**; Local not below −0.3: **no**" in text


def test_every_section_and_figure_of_a_complete_set(tmp_path: Path) -> None:
    for name in REPORTED:
        fill(tmp_path, name)
    (tmp_path / "reading.md").write_text("A person's words.\n")
    made = document(tmp_path)
    assert made == document(tmp_path), "the same bytes"
    text = made.pop("")
    assert section(text, "Reading").strip() == "A person's words."
    assert set(re.findall(r"\(results/([\w-]+\.svg)\)", text)) == set(made)
    assert {
        "distill-study-norms-server_val.svg",
        "distill-study-hold-local_val.svg",
        "main-global_test.svg",
        "ablations-steps.svg",
        "ablations-lam.svg",
        "pacs-local_test.svg",
    } <= set(made)
    for name, drawing in made.items():
        root = ElementTree.fromstring(drawing)
        assert root.tag == f"{SVG}svg", name
        assert "nothing measured" not in drawing, name
    study = section(text, "distill-study")
    assert "| no-kd | norms | no distillation |" in study
    assert "Chosen for the preset `cifar10`: `distill.candidates" in study
    assert "| 10 of 200 (5%) |" in study
    settle = section(text, "settle")
    assert "Noise, the standard deviation between equal runs: server " in settle
    assert "| wide | adapter_std 0.006 | 2 | 60.00 |" in settle
    assert settle.count("No candidate counts") + settle.count("Chosen: ") == 4
    assert section(text, "others").count("\n| fed") >= 10
    left = section(text, "What is missing")
    assert not any(f"**{name}**" in left for name in REPORTED)


def test_accuracy_stands_beside_epsilon_and_what_is_missing_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "dp-lite0", perada=54.0, ditto=50.0)
    path = results.path_of(tmp_path, "dp-lite0", "perada-0.8")
    made = json.loads(path.read_text())
    made["last"]["privacy"] = {"epsilon": {"mean": 5.0, "std": 1.25}}
    path.write_text(json.dumps(made))
    results.path_of(tmp_path, "dp-lite0", "ditto-1.5").unlink()
    text = section(document(tmp_path)[""], "dp-lite0")
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows["| none"].startswith("| none | ∞ | 50.00 | 25.00 | 97.69 | 54.00 | 27.00 | 98.08 | 50.00 |")
    assert rows["| 0.8"].startswith("| 0.8 | 5.00 ± 1.25 | 50.00 | 25.00 | 77.49 | 54.00 |")
    assert rows["| 1.5"].endswith("| – | – | 76.67 |")
    assert "Not run yet: ditto at noise 1.5." in text
    assert "perada-noisy: train.lr 0.05, distill.lr 0.005" in text, "the first of equals"


def test_the_first_screen_says_whether_perada_beats_the_others(tmp_path: Path) -> None:
    fill(tmp_path, "main", perada=54.0, perada_no_kd=50.0, ditto=56.0)
    text = document(tmp_path)[""]
    first = text[: text.index("The commands need these files")]
    assert text.startswith("# Results\n\n**Does PerAda beat Ditto, FedAvg+FT, Standalone")
    rows = [line for line in first.splitlines() if line.startswith(("| perada-no-kd |", "| ditto", "| fedavg-ft"))]
    ahead, behind = "+4.00 [+4.00, +4.00] ahead", "-2.00 [-2.00, -2.00] behind"
    assert [row.split(" | ")[1] for row in rows] == [ahead, behind, ahead]
    assert [row.split(" | ")[4] for row in rows] == ["+5.24", "+5.23", "+15.06"], "the paper's"
    assert "PerAda is behind ditto on Local and Global and corruptions." in first


def test_the_control_decides_what_the_winners_gain_is_owed_to(tmp_path: Path) -> None:
    """The same winner, once above the control and once not, and the runs that another choice lacks."""
    told = []
    for wide in (70.0, 80.0):
        root = tmp_path / str(wide)
        fill(root, "settle")
        servers = {"once": 80.0, "wide": wide}
        for name, held in results.read(root, "settle").items():
            score = {"mean": servers.get(name.rpartition("-")[0], 40.0) + name.endswith("b"), "std": 1.0}
            results.write(root, {**held, "rows": [{**row, "server_val": score} for row in held["rows"]]})
        for run in ("ditto-slow-0", "ditto-slow-1"):
            (root / "settle" / f"{run}.json").unlink()
        text = section(document(root)[""], "settle")
        assert "Chosen: `once`." in text
        assert "The preset `cifar10` does not have it yet" in text
        assert "Not settled yet. Missing: ditto-slow-0, ditto-slow-1 (about 4 minutes)." in text
        told += [line for line in text.splitlines() if "minus that of the control `wide`" in line]
    assert "more than twice the noise, so the gain is not owed to the size of the weights alone" in told[0]
    assert "not more than twice the noise, so the gain is owed to the size of the weights." in told[1]


def test_a_run_that_stayed_because_nobody_qualified_is_no_winner(tmp_path: Path) -> None:
    """Without distillation Local is far above everybody's: nothing is elected, and the table says so."""
    fill(tmp_path, "distill-study")
    held = results.read(tmp_path, "distill-study")["no-kd"]
    results.write(tmp_path, {**held, "validation": {"local_val": 90.0, "server_val": 40.0}})
    fill(tmp_path, "distill-study")
    study = section(document(tmp_path)[""], "distill-study")
    rows = [line for line in study.splitlines() if "(stayed)" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| default"]
    assert rows[0].endswith("| norms (stayed), guard (stayed), rate (stayed), hold (stayed) |")


def test_a_result_of_other_settings_is_not_shown_and_named_as_such(tmp_path: Path) -> None:
    fill(tmp_path, "pacs")
    held = results.read(tmp_path, "pacs")["ditto-1"]
    results.write(tmp_path, {**held, "digest": "another"})
    text = document(tmp_path)[""]
    assert "| ditto | 2 |" in section(text, "pacs")
    assert "have other settings than the plan: ditto-1" in section(text, "What is missing")


def test_the_command_writes_it_and_takes_old_figures_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "results", "ablations")
    out = tmp_path / "docs" / "results.md"
    assert run_experiments(["document", "--results", str(tmp_path / "results"), "--out", str(out)]) == 0
    assert "and 7 figures" in capsys.readouterr().out
    assert len(list((tmp_path / "docs" / "results").iterdir())) == 7
    mine = tmp_path / "docs" / "results" / "mine.svg"
    mine.touch()
    shutil.rmtree(tmp_path / "results")
    assert write_document(tmp_path / "results", out) == [out]
    assert list((tmp_path / "docs" / "results").iterdir()) == [mine], "it is not ours to remove"


def test_elsewhere_its_links_lead_to_its_figures_too(tmp_path: Path) -> None:
    fill(tmp_path / "results", "ablations")
    files = write_document(tmp_path / "results", tmp_path / "my report.md")
    links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", files[0].read_text("utf8"))
    assert {tmp_path / unquote(link) for link in links} == set(files[1:])
    (tmp_path / "results" / "reading.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"reading\.md: it has to be text in UTF-8"):
        document(tmp_path / "results")


def test_an_experiment_ends_with_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of seeds the mean with its interval; of a study validation data."""

    def shown(name: str, start: str) -> list[str]:
        assert run_experiments([name, "--results", str(tmp_path), "--out", str(tmp_path / "runs")]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(start)).split()

    fill(tmp_path, "main", perada=54.0)
    wanted = ["perada", "3", "55.00", "±", "2.48", "27.50", "±", "1.24", "55.00", "±", "2.48", "56.00", "±", "2.48"]
    assert shown("main", "perada ") == wanted
    fill(tmp_path, "distill-study")
    assert shown("distill-study", "no-kd ") == ["no-kd", "60.00", "40.00"]


def test_the_papers_numbers_are_its_own() -> None:
    assert paper.of("main", "Global", "perada") == 59.05
    assert paper.of("main", "corruptions", "ditto") == 44.32
    assert paper.of("main", "global model", "perada-no-kd") == 74.22
    assert paper.of("main", "global model, corruptions", "perada") == 64.47
    assert paper.of("pacs", "Local", "fedavg-ft") == 79.42
    assert paper.of("xrays", "Global", "perada") == 77.88
    assert paper.of("pacs", "corruptions", "perada") is None
    assert paper.of("main", "Local", "perada-unguarded") is None
    assert {len(row) for row in paper.TABLE_1.values()} == {8}
    assert len(paper.TABLE_1) == 17
