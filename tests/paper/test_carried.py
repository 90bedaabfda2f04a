"""Run folders that did not arrive whole: refused where something is lost, gone on with where nothing is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.running import reproduce
from perada.errors import InputError

from .test_running import Ticking
from .tiny import place, two


def test_a_run_that_was_not_all_carried_is_refused_and_nothing_of_it_removed(tmp_path: Path) -> None:
    one = replace(two(train__rounds=3), trials=two().trials[:1])
    assert reproduce(one, place(tmp_path), Ticking(2)).left == ["perada-0"]
    run = tmp_path / "runs" / "digits" / "perada-0"
    metrics, config = ((run / name).read_bytes() for name in ("metrics.jsonl", "config.toml"))
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"metrics\.jsonl lacks round 1: carry that file again"):
        reproduce(one, place(tmp_path))
    (run / "metrics.jsonl").write_bytes(metrics)
    (run / "config.toml").unlink()
    with pytest.raises(InputError, match=r"perada-0 has .* but no config\.toml: carry all of that folder"):
        reproduce(one, place(tmp_path))
    (run / "config.toml").write_bytes(config)
    assert reproduce(one, place(tmp_path)).left == []
    (tmp_path / "results" / "digits" / "perada-0.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"lacks round 3"):
        reproduce(one, place(tmp_path))


def test_a_damaged_newest_checkpoint_is_no_lost_measurement(tmp_path: Path) -> None:
    """The run went on from the one before it, and was stopped again before the damaged one's round."""
    one = replace(two(train__rounds=5), trials=two().trials[:1])
    assert reproduce(one, place(tmp_path), Ticking(3)).left == ["perada-0"]
    run = tmp_path / "runs" / "digits" / "perada-0"
    newest = max((run / "checkpoints").glob("round-*"))
    (run / "checkpoints" / "round-0005").mkdir()  # as if it had been written, and lost
    shutil.copy(newest / "state.json", run / "checkpoints" / "round-0005" / "state.json")
    assert reproduce(one, place(tmp_path)).left == []


def test_a_folder_that_a_kill_left_empty_is_trained_into(tmp_path: Path) -> None:
    one = replace(two(), trials=two().trials[:1])
    run = tmp_path / "runs" / "digits" / "perada-0"
    run.mkdir(parents=True)
    (run / ".config.toml.7.part").touch()
    assert reproduce(one, place(tmp_path)).left == []
