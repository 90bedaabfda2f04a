"""Run folders in pieces: carried elsewhere they go on as if they had never moved."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import adapters, damage

from experiments.__main__ import main as run_experiments
from experiments.pack import needed, pack, unpack
from experiments.running import reproduce
from perada.errors import InputError

from .test_running import Ticking, numbers
from .tiny import place, two

FOUR = two(train__rounds=4)
PIECE = 100_000


def test_personal_states_survive(tmp_path: Path) -> None:
    """PerAda, stopped after two of four rounds: who was not sampled since keeps what it had, too. The folder it was
    packed from is gone, as on a machine that was given back."""
    alone = replace(FOUR, trials=FOUR.trials[:1])
    assert reproduce(alone, place(tmp_path / "here"), Ticking(2)).left == ["perada-0"]
    pack(tmp_path / "here" / "runs" / "digits", tmp_path / "pieces", PIECE)
    shutil.rmtree(tmp_path / "here")
    unpack(tmp_path / "pieces" / "digits.json", tmp_path / "there" / "runs")
    carried = tmp_path / "there" / "runs" / "digits" / "perada-0" / "checkpoints"
    assert [p.name for p in carried.iterdir()] == ["round-0002"]
    assert len(list(carried.glob("round-0002/kept-*.safetensors"))) == 4
    assert reproduce(alone, place(tmp_path / "there")).left == []
    reproduce(alone, place(tmp_path / "whole"))
    assert numbers(tmp_path / "there") == numbers(tmp_path / "whole")
    paths = [tmp_path / home / "runs" / "digits" / "perada-0" for home in ("there", "whole")]
    found, wanted = ({k: v for k, v in adapters(p).items() if k.startswith("round-0004")} for p in paths)
    assert found == wanted
    assert sum("kept" in k for k in wanted) == 4


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PerAda finished, FedAvg after one round of four."""
    home = tmp_path_factory.mktemp("begun")
    assert reproduce(FOUR, place(home), Ticking(5)).left == ["fedavg-0"]
    return home


def test_pieces_carry_a_run_to_another_machine(begun: Path, tmp_path: Path) -> None:
    about = pack(begun / "runs" / "digits", tmp_path / "pieces", PIECE)
    assert len(about["pieces"]) > 2
    files = {p.name: p.stat().st_size for p in (tmp_path / "pieces").iterdir()}
    assert files.pop("digits.json") < 10_000
    assert set(files) == {p["name"] for p in about["pieces"]}
    assert max(files.values()) <= PIECE
    assert unpack(tmp_path / "pieces" / "digits.json", tmp_path / "there" / "runs") == about["files"]
    shutil.copytree(begun / "results", tmp_path / "there" / "results")
    assert reproduce(FOUR, place(tmp_path / "there")).left == []
    reproduce(FOUR, place(tmp_path / "whole"))
    assert numbers(tmp_path / "there") == numbers(tmp_path / "whole")
    paths = [tmp_path / home / "runs" / "digits" / "fedavg-0" for home in ("there", "whole")]
    newest = [{k: v for k, v in adapters(p).items() if k.startswith("round-0004")} for p in paths]
    assert newest[0] == newest[1] != {}


def test_only_what_is_needed_is_carried(begun: Path) -> None:
    home = begun / "runs" / "digits"
    found = [str(p.relative_to(home)) for p in needed(home)]
    assert not any("perada-0/checkpoints" in p or "report" in p for p in found), "that one is finished"
    assert "perada-0/summary.json" in found
    rounds = {p.split("/")[2] for p in found if p.startswith("fedavg-0/checkpoints")}
    assert len(rounds) == 1, "the newest checkpoint"
    assert {"fedavg-0/config.toml", "fedavg-0/metrics.jsonl", "fedavg-0/data.json"} <= set(found)


def test_a_damaged_newest_checkpoint_is_left_and_the_one_before_carried(begun: Path, tmp_path: Path) -> None:
    two_rounds = tmp_path / "runs"
    reproduce(replace(FOUR, trials=FOUR.trials[1:]), place(tmp_path), Ticking(2))
    damage(two_rounds / "digits" / "fedavg-0" / "checkpoints" / "round-0002" / "server.safetensors", "one bit")
    found = {p.parent.name for p in needed(two_rounds / "digits") if "checkpoints" in p.parts}
    assert found == {"round-0001"}


def test_equal_files_of_weights_are_stored_once_and_no_others(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.toml").write_text("x")
        (tmp_path / "runs" / run / "metrics.jsonl").write_text("same\n")
        (tmp_path / "runs" / run / "backbone.safetensors").write_bytes(bytes(range(256)) * 400)
    about = pack(tmp_path / "runs", tmp_path / "pieces")
    assert sum(p["bytes"] for p in about["pieces"]) < 150_000 < 2 * 256 * 400
    unpack(tmp_path / "pieces" / "runs.json", tmp_path / "there")
    there = tmp_path / "there" / "runs"
    assert (there / "b" / "backbone.safetensors").read_bytes() == bytes(range(256)) * 400
    with (there / "a" / "metrics.jsonl").open("a") as f:
        f.write("more\n")
    assert (there / "b" / "metrics.jsonl").read_text() == "same\n", "written to: never shared"


@pytest.fixture
def pieces(begun: Path, tmp_path: Path) -> Path:
    pack(begun / "runs" / "digits", tmp_path / "pieces", PIECE)
    return tmp_path / "pieces" / "digits.json"


def test_a_missing_or_damaged_piece_is_named_and_nothing_is_written(pieces: Path, tmp_path: Path) -> None:
    second = pieces.parent / "digits.tar.001"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"digits\.tar\.001 does not match its checksum"):
        unpack(pieces, tmp_path / "there")
    second.unlink()
    with pytest.raises(InputError, match=r"1 of \d+ pieces are not here, digits\.tar\.001 first"):
        unpack(pieces, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": [1, 2]}, "is no list of pieces"),
        ({"pieces": "abc"}, "is no list of pieces"),
        ({"pieces": [{"name": "digits.tar.000"}]}, "is no list of pieces"),
        ({"files": "x"}, "is no list of pieces"),
        ({"name": "../evil"}, "is no list of pieces"),
        ({"name": ""}, "is no list of pieces"),
        ({"name": ".."}, "is no list of pieces"),
        ({"pieces": []}, "does not name all of its pieces"),
        ({"pieces": slice(-1)}, "does not name all of its pieces"),
        ({"pieces": slice(None, None, -1)}, "is no list of pieces"),
        ({"pieces": slice(None, None, 2)}, "is no list of pieces"),
        ({"files": 7}, "does not name all of its pieces"),
    ],
)
def test_a_damaged_list_unpacks_nothing(change: dict[str, Any], message: str, pieces: Path, tmp_path: Path) -> None:
    held = json.loads(pieces.read_text())
    pieces.write_text(json.dumps(held | {k: held[k][v] if isinstance(v, slice) else v for k, v in change.items()}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        unpack(pieces, tmp_path / "there")
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before] in ([], [tmp_path / "there"])
    pieces.write_text(json.dumps(held))
    assert unpack(pieces, tmp_path / "there") == held["files"]


def test_bad_input_is_one_line_each(
    pieces: Path, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text(json.dumps({"kind": "other"}))
    (tmp_path / "taken" / "digits").mkdir(parents=True)
    (tmp_path / "taken" / "digits" / "x").touch()
    run = str(begun / "runs" / "digits")
    for words, message in (
        (["pack", str(tmp_path / "none"), "--out", "x"], "no such folder"),
        (["pack", str(tmp_path / "empty"), "--out", "x"], "holds nothing to carry"),
        (["pack", run, "--out", str(pieces.parent)], "has pieces of digits already"),
        (["unpack", str(tmp_path / "none.json"), "--out", "x"], "cannot read"),
        (["unpack", str(tmp_path / "text.json"), "--out", "x"], "is no list of pieces"),
        (["unpack", str(pieces), "--out", str(tmp_path / "taken")], "exists: move it away"),
    ):
        assert run_experiments([*words]) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error


def test_the_commands(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(begun / "runs" / "digits" / "fedavg-0")
    assert run_experiments(["pack", run, "--out", str(tmp_path / "p"), "--piece", "0.1"]) == 0
    assert "carry them and fedavg-0.json" in capsys.readouterr().out
    assert max(p.stat().st_size for p in (tmp_path / "p").iterdir()) <= 0.1 * 2**20
    assert run_experiments(["unpack", str(tmp_path / "p" / "fedavg-0.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "fedavg-0" / "config.toml").is_file()
