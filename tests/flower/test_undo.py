"""Sites that are refused again and again, and runs that go back to a round before somebody poisoned them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from helpers import assert_same_tensors
from small import adapters

from flower.test_faults import events, values, without_clock
from flower.test_resume import Killed, _kill, kept
from flower.test_site_state import entry
from flower.wire import SITES, MemoryGrid, World, make_world, run
from perada.client.trainer import Trainer
from perada.errors import InputError, RunError
from perada.flower import app
from perada.flower.client import handle
from perada.flower.control import Follower
from perada.flower.messages import Request, message, read_reply
from perada.flower.quarantine import PAUSE, Quarantine
from perada.flower.site_state import SiteState
from perada.methods.perada import PerAda
from perada.server.checks import Refused

EVERYBODY = {"train__cohort": 0, "distill__steps": 0, "train__epochs": 1}


# Quarantine.


def test_a_site_is_in_quarantine_after_refused_uploads_in_a_row() -> None:
    q = Quarantine(3)
    assert not any(q.refuse("west", r) for r in (0, 1))
    q.accept("west")
    assert [q.refuse("west", r) for r in (2, 3, 4)] == [False, False, True]
    assert [r for r in range(4, 20) if q.holds("west", r)] == list(range(4, 4 + PAUSE + 1))
    assert q.split(SITES, 5) == (["east", "north"], [])
    assert q.split(["west"], 5)[0] == ["west"]  # nobody else could train the round


def test_a_site_that_comes_back_has_one_try() -> None:
    q = Quarantine(3)
    for r in range(3):
        q.refuse("west", r)
    assert q.split(SITES, PAUSE + 3) == (list(SITES), ["west"])
    assert q.split(SITES, PAUSE + 4) == (list(SITES), [])  # it is said once
    assert q.refuse("west", PAUSE + 4)


def test_a_run_that_goes_back_forgets_what_came_after() -> None:
    q = Quarantine(2)
    q.refuse("west", 3)
    q.refuse("west", 4)
    q.undo(4)
    assert not q.holds("west", 4)
    assert q.refused == {"west": [3]}


def test_no_quarantine_and_a_single_refusal() -> None:
    assert not Quarantine(0).refuse("west", 1)
    q = Quarantine(1)
    assert q.refuse("west", 1)
    assert q.split(SITES, PAUSE + 2) == (list(SITES), ["west"])
    assert not q.holds("west", PAUSE + 3)


def negative(site: str, kind: str, round: int, reply: Message) -> Message:
    """West sends negative variances."""
    if (site, kind) == ("west", "train"):
        values(lambda v: v * np.float32(-30), "buffers/bn1.running_var")(reply)
    return reply


def test_a_hostile_site_is_quarantined_and_stalls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server dies in between. After its quarantine west has one try."""
    monkeypatch.setattr("perada.flower.quarantine.PAUSE", 1)
    limits = {"min_sites": 2, "retries": 1, "quarantine": 2}
    world = make_world(tmp_path, limits, train__rounds=5, **EVERYBODY)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world, negative), world.settings, "run", step=_kill("saved", 0))
    grid = MemoryGrid(world, negative)
    path = app.serve(grid, world.settings, "run", resume=True)
    told = [(e["round"], e["event"]) for e in events(path) if e["site"] == "west" and e["event"] != "here"]
    first = [(0, "refused"), (1, "refused"), (1, "quarantined")]
    assert told == [*first, (3, "returned"), (3, "refused"), (3, "quarantined")]
    assert [r for d, s, k, r, _ in grid.log if (d, s, k) == ("down", "west", "train")] == [1, 3]
    assert {s for d, s, k, r, _ in grid.log if (d, k) == ("up", "evaluate")} == set(SITES)  # its scores are welcome
    assert [row["absent"] for row in without_clock(path)] == [["west"]] * 5
    assert json.loads((path / "flower.json").read_text())["quarantine"] == {"west": [1, 3]}


def test_a_round_counts_once_however_often_it_is_tried(tmp_path: Path) -> None:
    """North is silent twice, so that the round is tried three times, and then the server dies and tries it again."""
    world = make_world(tmp_path, {"min_sites": 2, "retries": 2, "deadline_s": 0.3}, train__rounds=1, **EVERYBODY)
    lost = {"north": 2}

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message | None:
        if (site, kind) == ("north", "train") and lost[site]:
            lost[site] -= 1
            return None
        return negative(site, kind, round, reply)

    grid = MemoryGrid(world, meddle)
    with pytest.raises(Killed):
        app.serve(grid, world.settings, "run", step=_kill("gathered", 0))
    asked = [s for d, s, k, _, _ in grid.log if (d, k) == ("down", "train")]
    assert sorted(asked) == ["east", "north", "north", "north", "west"]
    note = tmp_path / "state/runs/run/flower.json"
    assert json.loads(note.read_text())["quarantine"] == {"west": [0]}
    path, _ = run(world, meddle=meddle, resume=True)
    assert json.loads(note.read_text())["quarantine"] == {"west": [0]}
    assert [e["event"] for e in events(path) if e["site"] == "west" and e["event"] != "here"] == ["refused"] * 2


def test_a_run_that_a_refused_site_ends_names_it(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"min_sites": 3, "retries": 5}, train__rounds=1, **EVERYBODY)
    with pytest.raises(RunError, match=r"2 good uploads, 3 needed \(Rounds.min_sites\); refused: west"):
        run(world, meddle=negative)
    told = [e["event"] for e in events(tmp_path / "state/runs/run") if e["event"] != "here"]
    assert told == ["refused", "short"]  # it would send the same bytes again


def test_a_site_that_says_it_cannot_is_not_distrusted(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"quarantine": 1}, train__rounds=2, **EVERYBODY)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind) == ("west", "train"):
            reply.content["about"]["error"] = "bad input at the site, see its log"
        return reply

    path, _ = run(world, meddle=meddle)
    assert [e["event"] for e in events(path) if e["site"] == "west" and e["event"] != "here"] == ["refused"] * 2


@pytest.mark.parametrize("what", [{"quarantine": 3}, {"quarantine": {"west": "often"}}, {"undone": 3}])
def test_a_damaged_diary_is_one_line(what: dict[str, Any], tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=2, **EVERYBODY)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", step=_kill("sending", 0))
    file = tmp_path / "state/runs/run/flower.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **what}))
    with pytest.raises(InputError, match=r"flower\.json is damaged"):
        app.serve(MemoryGrid(world), world.settings, "run", resume=True)


# Going back.


def poison(site: str, kind: str, round: int, reply: Message) -> Message:
    """West's upload of round 1 is far away, and within the norm bound."""
    if (site, kind, round) == ("west", "train", 1):
        values(lambda v: v + np.float32(5))(reply)
    return reply


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    world = make_world(tmp_path_factory.mktemp("clean"), train__rounds=4, **EVERYBODY)
    return world, run(world)[0]


def test_a_poisoned_run_goes_back_and_ends_as_if_nothing_had_been(
    clean: tuple[World, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was finished; and the server dies once more on the way."""
    world = make_world(tmp_path, train__rounds=4, **EVERYBODY)
    path, _ = run(world, meddle=poison)
    assert adapters(path) != adapters(clean[1])
    trained: list[tuple[str, int]] = []
    real = PerAda.client_update

    def counted(self: PerAda, trainer: Trainer, *rest: Any) -> Any:
        trained.append((trainer.federation.clients[0].name, trainer.round))
        return real(self, trainer, *rest)

    monkeypatch.setattr(PerAda, "client_update", counted)
    said: list[str] = []
    follower = Follower(path, said.append, back=1)
    assert follower.look() == {}  # that it is finished is old news
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", back=1, step=_kill("gathered", 2))
    assert [row["round"] for row in without_clock(path)] == [1]
    assert not (path / "summary.json").exists()
    app._site.cache_clear()
    run(world, resume=True)
    assert adapters(path) == adapters(clean[1])
    assert_same_tensors(kept(world, path), kept(*clean))
    assert without_clock(path) == without_clock(clean[1])
    assert sorted(trained) == [(s, r) for s in SITES for r in (1, 2, 3)]  # each once: round 2 from its disk
    assert follower.look()["status"] == "finished"
    assert [line.partition(":")[0] for line in said if "local" in line] == ["round 2", "round 3", "round 4"]
    assert ("", "undone", "the run continues from round 1") in [
        (e["site"], e["event"], e["detail"]) for e in events(path)
    ]


def test_a_run_goes_back_to_its_beginning(clean: tuple[World, Path], tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=2, **EVERYBODY)
    path, _ = run(world)
    before = adapters(path)
    run(world, back=0)
    assert adapters(path) == before
    assert json.loads((path / "flower.json").read_text())["undone"] == [0]


def test_what_cannot_be_undone(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"keep": 2}, train__rounds=3, **EVERYBODY)
    path, _ = run(world)
    before, told = adapters(path), (path / "flower.json").read_bytes()
    changed = make_world(tmp_path, {"keep": 2}, train__rounds=3, train__aggregate="median", **EVERYBODY)
    with pytest.raises(InputError, match=r"no checkpoint after round 1 \(it has: 2, 3\)"):
        run(changed, back=1)
    with pytest.raises(InputError, match="there is no run 'other' to go back in"):
        run(world, "other", back=1)
    assert adapters(path) == before
    assert (path / "flower.json").read_bytes() == told  # it is finished, and nothing has failed
    assert "median" not in (path / "config.toml").read_text()
    assert "changed" not in [e["event"] for e in events(path)]


def test_a_site_forgets_nothing_before_it_has_trained_instead(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "chest", "north")
    for r in range(5):
        state.save("run", entry(r, r - 1 if r else None))
    said(state, "2")
    assert state.standing("run") == [0, 1]
    assert state.rounds("run") == [0, 1, 2, 3, 4]
    assert state.base("run", 4) == state.base("run", 2) == 1
    assert state.answered("run", 2, "a") is None  # the same broadcast, and yet it is trained again
    state.save("run", again(entry(2, 1), "2"))
    assert state.rounds("run") == state.standing("run") == [0, 1, 2]
    with pytest.raises(Refused, match="the run has gone back to round 2 since"):
        state.check_history("run", "")
    state.check_history("run", "2,1")
    said(state, "2,1,2")
    assert state.standing("run") == [0]  # round 1 was undone, and round 2 before it was trained again


def test_a_site_whose_older_states_are_gone_goes_on_from_its_oldest(tmp_path: Path) -> None:
    """Its oldest has the fewest of the undone rounds in it; that it has none left must not stop the run."""
    state = SiteState(tmp_path, "chest", "north", keep=3)
    for r in range(6):
        state.save("run", entry(r, r - 1 if r else None))
    said(state, "1")
    assert state.standing("run") == []
    assert state.base("run", 1) == 3
    state.save("run", again(entry(1, 3), "1"))
    assert state.rounds("run") == [1]
    shutil.rmtree(tmp_path)
    state.save("run", entry(4))
    said(state, "1")
    assert state.base("run", 1) is None  # its first round is undone: from the method's first state


def again(one: Any, undone: str) -> Any:
    return type(one)(**{**vars(one), "undone": undone})


def said(state: SiteState, undone: str) -> None:
    state.save_broadcast("run", "", "", 0, undone, entry(0).kept)


@pytest.mark.parametrize("undone", ["1,", "x", "-1", "9999999", "1 2", "../1"])
def test_a_history_is_a_list_of_rounds(undone: str, clean: tuple[World, Path]) -> None:
    world, _ = clean
    request = message(Request("digits", "run-00000000", 0, "train", undone=undone))
    assert "undone is not a list of rounds" in read_reply(handle(world.site("east"), request)).error


def test_a_federation_of_an_older_version_is_resumed_and_says_what_changed(tmp_path: Path) -> None:
    """It has no `aggregate` in its config, no quarantine in its diary and nothing about undone rounds at its sites."""
    world = make_world(tmp_path, train__rounds=2, **EVERYBODY)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", step=_kill("gathered", 1))
    path = tmp_path / "state/runs/run"
    config = path / "config.toml"
    config.write_text("".join(x for x in config.read_text().splitlines(True) if not x.startswith("aggregate")))
    for file in (path / "flower.json", *tmp_path.glob("*/state/digits/*/run-*/plan.json")):
        note = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in note.items() if k not in ("undone", "quarantine")}))
    for file in tmp_path.glob("*/state/digits/*/run-*/round-*/state.json"):
        note = json.loads(file.read_text())
        del note["undone"]
        file.write_text(json.dumps(note))
    run(world, resume=True)
    told = [e["detail"] for e in events(path) if e["event"] == "changed"]
    assert told == ["train.aggregate is norm_clip now, it was mean"]
    assert 'aggregate = "norm_clip"' in config.read_text()
