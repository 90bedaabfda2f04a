"""What the server believes of an upload's values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from flower.test_faults import events, values, without_clock
from flower.wire import make_world, run
from perada.flower import cohort
from perada.flower.checks import MAX_LOSS, mean_loss
from perada.flower.cohort import FlowerCohort
from perada.lanes import State, stack
from perada.server.checks import Refused, check_upload_values, unlike_others


def state_of(mean: list[float], var: list[float], weight: float = 1.0) -> State:
    buffers = {"bn.running_mean": torch.tensor([mean]), "bn.running_var": torch.tensor([var])}
    return State({"w": torch.full((1, 4), weight)}, buffers)


REFERENCE = state_of([0.0, 1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("upload", "line"),
    [
        (state_of([0.0, 1.0], [1.0, float("nan")]), "buffers/bn.running_var holds values that are not finite"),
        (state_of([0.0, 1.0], [-30.0, 2.0]), "its statistics bn.running_var hold a negative variance"),
        (state_of([0.0, 1.0], [1.0, 2.0], weight=300.0), "its parameters are 598 from their reference"),
        (state_of([500.0, 1.0], [1.0, 2.0]), "its statistics are 500 from their reference"),
    ],
)
def test_values_that_make_no_sense_are_refused(upload: State, line: str) -> None:
    with pytest.raises(Refused, match=line):
        check_upload_values(upload, REFERENCE, 100.0)


def test_values_that_an_honest_site_may_send() -> None:
    """A variance that has decayed to zero in a dead channel, and a negative mean."""
    check_upload_values(state_of([-3.0, 1.0], [0.0, 2.0]), REFERENCE, 100.0)


LIKE = [state_of([0.1 * k, 1.0], [1.0 + k, 2.0]) for k in range(3)]


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        (state_of([0.0, 1.0], [900.0, 2.0]), "its statistics bn.running_var are 450 times the sites' median"),
        (state_of([-40.0, 1.0], [1.0, 2.0]), "its statistics bn.running_mean are 32.7 deviations from the sites' "),
        (state_of([0.0, 1.0], [0.0, 2.0]), ""),
        (state_of([4.0, -4.0], [88.0, 88.0]), ""),  # twice what was seen of honest sites
    ],
)
def test_statistics_are_compared_with_those_of_the_others(odd: State, line: str) -> None:
    found = unlike_others(stack(*LIKE, odd), REFERENCE)
    assert list(found) == ([3] if line else [])
    assert line in found.get(3, "")


def test_few_sites_are_compared_with_the_broadcast() -> None:
    assert unlike_others(stack(LIKE[0], state_of([0.0, 1.0], [900.0, 2.0])), REFERENCE) == {}
    found = unlike_others(stack(LIKE[0], state_of([0.0, 1.0], [9000.0, 2.0])), REFERENCE)
    assert found == {1: "its statistics bn.running_var are 6e+03 times the broadcast's"}


def test_a_channel_that_is_dead_at_most_sites_may_live_at_one() -> None:
    dead = [state_of([0.0, 1.0], [0.0, 2.0]) for _ in range(3)]
    assert unlike_others(stack(*dead, state_of([0.5, 1.0], [3.0, 2.0])), REFERENCE) == {}


def test_a_refused_upload_is_left_out_of_the_round(tmp_path: Path) -> None:
    """A variance of -30 times itself, and one of 900 times the others'; each was accepted once."""
    world = make_world(tmp_path, {"norm_bound": 1e4}, train__cohort=0, train__rounds=2, distill__steps=0)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind) == ("west", "train"):
            values(lambda v: v * np.float32(900 if round else -30), "buffers/bn1.running_var")(reply)
        return reply

    path, _ = run(world, meddle=meddle)
    told = [e["detail"] for e in events(path) if (e["site"], e["event"]) == ("west", "refused")]
    assert told[0] == "train: its statistics bn1.running_var hold a negative variance"
    assert told[1].startswith("train: its statistics bn1.running_var are ")
    assert [row.get("absent") for row in without_clock(path)] == [["west"], ["west"]]


def test_a_loss_that_no_model_has_is_no_opinion(tmp_path: Path) -> None:
    """It made rows and checkpoints unreadable: no number above 1e18 is read from them."""
    assert mean_loss([1.0, 3.0, 1e200, -1e200, float("nan"), None, [1.0]]) == 2.0
    assert mean_loss([2 * MAX_LOSS]) is None
    world = make_world(tmp_path, train__cohort=0, train__rounds=1, distill__steps=0)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind) == ("west", "train"):
            reply.content["numbers"]["loss"] = 1e200
        return reply

    path, _ = run(world, meddle=meddle)
    assert 0 < without_clock(path)[-1]["train_loss"] < 10


def test_an_upload_that_breaks_the_comparison_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, train__cohort=0, train__rounds=1, distill__steps=0)
    real, lanes = cohort.unlike_others, list[Any]()

    def breaks(uploads: State, reference: State) -> dict[int, str]:
        weights = uploads.params["fc.weight"]
        lanes[:] = lanes or [weights[-1]]
        if any(torch.equal(one, lanes[0]) for one in weights):
            raise KeyError("bn.running_mean")
        return real(uploads, reference)

    monkeypatch.setattr(cohort, "unlike_others", breaks)
    path, _ = run(world)
    refused = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert refused == [("west", "train: it cannot be read (KeyError)")]


def test_an_upload_that_the_rule_leaves_out_is_reported_and_judges_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=1)
    told: list[Any] = []
    behind = FlowerCohort.__new__(FlowerCohort)
    behind.diary = SimpleNamespace(tell=lambda *words: told.append(words), settings=world.settings)  # type: ignore[assignment]
    behind.uploaded = ["east", "north", "west"]
    behind.left_out({"north": "its update is 4 times as long as the median"})
    assert told == [("north", "left out", "its update is 4 times as long as the median")]
    assert behind.uploaded == ["east", "west"]
