"""Event files for TensorBoard say what metrics.jsonl says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from perada import board

ON = {"run__tensorboard": True, "method__name": "perada-no-kd"}


def shown(run: Path) -> dict[str, dict[int, float]]:
    """Tag -> round -> value. Fails if a round was shown twice."""
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found = dict[str, dict[int, float]]()
    for tag in events.Tags()["scalars"]:
        steps = [e.step for e in events.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag
        found[tag] = {e.step: e.value for e in events.Scalars(tag)}
    return found


def test_what_is_shown_is_what_was_measured_and_a_resumed_run_shows_no_round_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, **ON) == 0
    assert train(out, "--resume", **ON, train__rounds=3) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rows] == [1, 2, 3]
    found = shown(out)
    for tag, of in {
        "local_test/mean": lambda r: r["local_test"]["mean"],
        "clients/global_test/client-02": lambda r: r["global_test"]["per_client"]["client-02"],
        "global_model/global_test": lambda r: r["global_model"]["global_test"],
        "train_loss": lambda r: r["train_loss"],
        "bytes_up": lambda r: r["bytes_up"],
    }.items():
        assert found[tag] == pytest.approx({r["round"]: of(r) for r in rows}, rel=1e-6), tag
    assert "round" not in found


def test_it_may_be_asked_for_later_and_a_run_with_it_can_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, method__name="perada-no-kd") == 0
    assert not (out / "tensorboard").exists()
    assert train(out, "--resume", **ON, train__rounds=3) == 0
    assert sorted(shown(out)["train_loss"]) == [1, 2, 3]
    assert train(out, "--overwrite", method__name="perada-no-kd") == 0
    assert not (out / "tensorboard").exists()


def test_without_the_package_one_line_says_what_to_install_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    assert train(tmp_path / "run", **ON) == 2
    assert "pip install 'perada[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_numbers_by_their_place_and_nothing_else() -> None:
    row = {"round": 4, "train_loss": None, "failed": [], "method": "x", "global_model": None}
    row |= {"local_val": {"mean": 50.0, "per_client": {"a": 40.0, "b": None}}, "guard_chose": 2}
    assert board.scalars(row) == {"local_val/mean": 50.0, "clients/local_val/a": 40.0, "guard_chose": 2.0}
