"""Run folders that were moved: a whole one goes on, one that lost something is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small import adapters

from experiments.running import run_experiment
from perada.errors import InputError

from .test_running import Ticking, numbers
from .tiny import place, two


def test_a_moved_run_goes_on_with_the_states_of_all_clients(tmp_path: Path) -> None:
    """PerAda, stopped after two of four rounds: clients that were not sampled since then keep their states too."""
    alone = replace(two(train__rounds=4), trials=two().trials[:1])
    assert run_experiment(alone, place(tmp_path / "here"), Ticking(2)).left == ["perada-0"]
    (tmp_path / "here").rename(tmp_path / "there")
    assert run_experiment(alone, place(tmp_path / "there")).left == []
    run_experiment(alone, place(tmp_path / "whole"))
    assert numbers(tmp_path / "there") == numbers(tmp_path / "whole")
    paths = [tmp_path / home / "runs" / "digits" / "perada-0" for home in ("there", "whole")]
    found, wanted = ({k: v for k, v in adapters(p).items() if k.startswith("round-0004")} for p in paths)
    assert found == wanted
    assert sum("kept" in k for k in wanted) == 4


def test_a_run_that_was_not_all_carried_is_refused_and_nothing_of_it_removed(tmp_path: Path) -> None:
    one = replace(two(train__rounds=3), trials=two().trials[:1])
    assert run_experiment(one, place(tmp_path), Ticking(2)).left == ["perada-0"]
    run = tmp_path / "runs" / "digits" / "perada-0"
    metrics, config = ((run / name).read_bytes() for name in ("metrics.jsonl", "config.toml"))
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"metrics\.jsonl lacks round 1: copy that file again"):
        run_experiment(one, place(tmp_path))
    (run / "metrics.jsonl").write_bytes(metrics)
    (run / "config.toml").unlink()
    with pytest.raises(InputError, match=r"perada-0 has .* but no config\.toml: copy the whole folder"):
        run_experiment(one, place(tmp_path))
    (run / "config.toml").write_bytes(config)
    assert run_experiment(one, place(tmp_path)).left == []
    (tmp_path / "results" / "digits" / "perada-0.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"lacks round 3"):
        run_experiment(one, place(tmp_path))


def test_a_damaged_newest_checkpoint_is_no_lost_measurement(tmp_path: Path) -> None:
    """The run went on from the one before it, and was stopped again before the damaged one's round."""
    one = replace(two(train__rounds=5), trials=two().trials[:1])
    assert run_experiment(one, place(tmp_path), Ticking(3)).left == ["perada-0"]
    run = tmp_path / "runs" / "digits" / "perada-0"
    newest = max((run / "checkpoints").glob("round-*"))
    (run / "checkpoints" / "round-0005").mkdir()  # as if it had been written, and lost
    shutil.copy(newest / "state.json", run / "checkpoints" / "round-0005" / "state.json")
    assert run_experiment(one, place(tmp_path)).left == []


def test_a_folder_that_a_kill_left_empty_is_trained_into(tmp_path: Path) -> None:
    one = replace(two(), trials=two().trials[:1])
    run = tmp_path / "runs" / "digits" / "perada-0"
    run.mkdir(parents=True)
    (run / ".config.toml.7.part").touch()
    assert run_experiment(one, place(tmp_path)).left == []
