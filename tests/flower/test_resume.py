"""A server or a site that dies anywhere: the run ends with the same bytes, and no round is trained twice."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_tensors
from small import adapters, damage

from flower.test_faults import without_clock
from flower.test_parity import assert_same, simulated
from flower.wire import SITES, MemoryGrid, World, make_world
from perada.client.trainer import Trainer
from perada.config import build
from perada.errors import InputError, RunError
from perada.flower import app
from perada.flower.messages import flat
from perada.flower.records import Diary
from perada.methods.fedavg_ft import FedAvgFT
from perada.methods.perada import PerAda
from perada.runs.folder import RunFolder


class Killed(BaseException):
    """No handler of the code under test may see it."""


Trained = Counter[tuple[str, int]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """How often a site really trained a round."""
    count: Trained = Counter()
    for kind, name in ((PerAda, "client_update"), (FedAvgFT, "client_update"), (FedAvgFT, "finish")):
        real = getattr(kind, name)

        def counted(self: Any, trainer: Trainer, *rest: Any, real: Any = real) -> Any:
            count[trainer.federation.clients[0].name, trainer.round] += 1
            return real(self, trainer, *rest)

        monkeypatch.setattr(kind, name, counted)
    return count


def kept(world: World, path: Path) -> dict[str, Any]:
    run_id = json.loads((path / "flower.json").read_text())["run"]
    found = {s: world.site(s).state.newest(run_id) for s in SITES}
    return {f"{s}/{n}": t for s, state in found.items() if state for n, t in flat(state).items()}


def until_finished(world: World, crashes: Iterator[tuple[str, int]] | list[tuple[str, int]]) -> tuple[Path, int]:
    """A run killed at each of these boundaries in turn, every site's process gone with it, and resumed."""
    left, died = list(crashes), 0

    def step(what: str, round: int) -> None:
        if left and (what, round) == left[0]:
            left.pop(0)
            raise Killed

    while True:
        app._site.cache_clear()
        try:
            return app.serve(MemoryGrid(world), world.settings, "run", resume=True, step=step), died
        except Killed:
            died += 1


def boundaries(world: World) -> tuple[Path, list[tuple[str, int]]]:
    seen: list[tuple[str, int]] = []
    return app.serve(MemoryGrid(world), world.settings, "run", step=lambda *at: seen.append(at)), seen


STEPS = [(w, r) for r in range(2) for w in ("sending", "gathered", "scoring", "updated", "saved")]
STEPS += [("measured", 1), ("finishing", 2), ("measured", 2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    world = make_world(tmp_path_factory.mktemp("whole"), train__rounds=2)
    path, seen = boundaries(world)
    assert sorted(seen) == sorted(STEPS)  # the tests below kill at every one of them
    return world, path


def assert_same_run(world: World, path: Path, whole: tuple[World, Path]) -> None:
    assert adapters(path) == adapters(whole[1])
    assert_same_tensors(kept(world, path), kept(*whole))
    assert without_clock(path) == without_clock(whole[1])
    assert (path / "summary.json").is_file()
    assert json.loads((path / "flower.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("at", STEPS, ids=lambda at: f"{at[0]}-{at[1]}")
def test_a_server_killed_at_any_boundary(
    at: tuple[str, int], whole: tuple[World, Path], trained: Trained, tmp_path: Path
) -> None:
    world = make_world(tmp_path, train__rounds=2)
    path, died = until_finished(world, [at])
    assert died == 1
    assert_same_run(world, path, whole)
    assert set(trained.values()) == {1}
    assert len(trained) == 4  # two sites in each of two rounds


def test_a_server_killed_at_five_random_places(whole: tuple[World, Path], trained: Trained, tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=2)
    order = sorted(random.Random(7).sample(range(len(STEPS)), 5))
    _, seen = boundaries(make_world(tmp_path / "order", train__rounds=2))
    trained.clear()
    path, died = until_finished(world, [seen[i] for i in order])
    assert died == 5
    assert_same_run(world, path, whole)
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("at", [("finishing", 1), ("finished", 1), ("measured", 1)], ids=lambda at: at[0])
def test_a_server_killed_around_the_last_stage(at: tuple[str, int], trained: Trained, tmp_path: Path) -> None:
    settings = {"method__name": "fedavg-ft", "train__rounds": 1}
    path, _ = boundaries(first := make_world(tmp_path / "whole", **settings))
    wanted = (first, path)
    held = kept(*wanted)
    trained.clear()
    world = make_world(tmp_path / "killed", **settings)
    path, died = until_finished(world, [at])
    assert died == 1
    assert adapters(path) == adapters(wanted[1])
    assert_same_tensors(kept(world, path), held)
    assert without_clock(path) == without_clock(wanted[1])
    assert set(trained.values()) == {1}
    assert len(trained) == 2 + 3  # a cohort of two, then the last stage at everybody


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(
    whole: tuple[World, Path], trained: Trained, tmp_path: Path
) -> None:
    """The server goes back a round that sites have trained, and one that they went beyond."""
    world = make_world(tmp_path, train__rounds=2)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", step=_kill("gathered", 1))
    damage(tmp_path / "state/runs/run/checkpoints/round-0001/broadcast.safetensors", "one bit")
    with pytest.raises(InputError, match="no checkpoint is whole"):
        app.serve(MemoryGrid(world), world.settings, "run", resume=True)
    for rest in (tmp_path / "state/runs/run/checkpoints").iterdir():  # as if it had never been written
        for file in rest.iterdir():
            file.unlink()
        rest.rmdir()
    path, _ = until_finished(world, [])
    assert adapters(path) == adapters(whole[1])
    assert set(trained.values()) == {1}


def test_a_server_that_has_lost_its_scores_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path, train__rounds=3, distill__steps=0)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", step=_kill("sending", 2))
    folder = tmp_path / "state/runs/run"
    (folder / "metrics.jsonl").unlink()
    left = folder / ".summary.json.123456789abc.part"
    left.write_text("")
    app.serve(MemoryGrid(world), world.settings, "run", resume=True)
    assert "metrics.jsonl is missing" in capsys.readouterr().err
    assert [row["round"] for row in without_clock(folder)] == [2, 3]
    assert not left.exists()


def _kill(what: str, round: int) -> Any:
    def step(*at: Any) -> None:
        if at == (what, round):
            raise Killed

    return step


def test_what_may_not_be_resumed(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=1)
    app.serve(MemoryGrid(world), world.settings, "run")
    with pytest.raises(InputError, match="exists: resume=true"):
        app.serve(MemoryGrid(world), world.settings, "run")
    with pytest.raises(InputError, match="is finished"):
        app.serve(MemoryGrid(world), world.settings, "run", resume=True)
    with pytest.raises(InputError, match="run must be letters"):
        app.serve(MemoryGrid(world), world.settings, "../run")
    other = make_world(tmp_path, train__rounds=1, train__lr=0.5)
    with pytest.raises(InputError, match=r"made with another train\.lr"):
        app.serve(MemoryGrid(other), other.settings, "run", resume=True)


def test_a_new_run_begins_anew_and_leaves_the_old_one_alone(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=2, train__cohort=0)
    one = app.serve(MemoryGrid(world), world.settings, "one")
    held = kept(world, one)
    two = app.serve(MemoryGrid(world), world.settings, "two")
    assert adapters(two) == adapters(one)
    assert_same_tensors(kept(world, two), held)
    assert_same_tensors(kept(world, one), held)


def test_a_run_that_continues_from_another_has_its_states(tmp_path: Path) -> None:
    """Global and personal; the rounds' random draws begin anew."""
    world = make_world(tmp_path, train__rounds=2)
    one = app.serve(MemoryGrid(world), world.settings, "one")
    before = kept(world, one)
    with pytest.raises(Killed):  # and it is remembered when the server dies before its first round is saved
        app.serve(MemoryGrid(world), world.settings, "two", start="one", step=_kill("gathered", 0))
    two = app.serve(MemoryGrid(world), world.settings, "two", resume=True)
    first, second = simulated(world), build(world.simulated)
    now = first.now
    second.now = replace(second.now, server=now.server, broadcast=now.broadcast, kept=now.kept)
    for _ in range(2):
        second.round()
    assert_same(world, two, second)
    assert_same_tensors(kept(world, one), before)
    with pytest.raises(InputError, match="there is no run 'zero'"):
        app.serve(MemoryGrid(world), world.settings, "three", start="zero")


def test_a_run_continues_from_what_the_server_has_not_from_what_sites_did_since(tmp_path: Path) -> None:
    """The server of `one` died after the sites had trained a round that it did not save."""
    world = make_world(tmp_path, train__rounds=2, train__cohort=0)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "one", step=_kill("gathered", 1))
    two = app.serve(MemoryGrid(world), world.settings, "two", start="one")
    told = json.loads((two / "flower.json").read_text())
    assert told["start_round"] == 1
    first, second = build(world.simulated), build(world.simulated)
    first.round()
    now = first.now
    second.now = replace(second.now, server=now.server, broadcast=now.broadcast, kept=now.kept)
    for _ in range(2):
        second.round()
    assert_same(world, two, second)


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=1)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "one", step=_kill("gathered", 0))
    for start, line in (("zero", "no run 'zero'"), ("one", "'one' has no finished round"), ("../x", "must be letters")):
        with pytest.raises(InputError, match=line):
            app.serve(MemoryGrid(world), world.settings, "two", start=start)
        assert not (tmp_path / "state/runs/two").exists()
    with pytest.raises(InputError, match="did not begin from 'zero'"):
        app.serve(MemoryGrid(world), world.settings, "one", resume=True, start="zero")


@pytest.mark.parametrize(
    ("key", "value"), [("classes", tuple("1023456789")), ("channels", 3), ("multilabel", True)], ids=str
)
def test_labels_and_images_mean_the_same_in_a_resumed_run(key: str, value: Any, tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=2)
    with pytest.raises(Killed):
        app.serve(MemoryGrid(world), world.settings, "run", step=_kill("saved", 0))
    other = replace(world.settings, federation=replace(world.settings.federation, **{key: value}))
    with pytest.raises(InputError, match=rf"made with another federation\.{key}"):
        app.serve(MemoryGrid(world), other, "run", resume=True)
    with pytest.raises(InputError, match=rf"continue-from: 'run' was made with another federation\.{key}"):
        app.serve(MemoryGrid(world), other, "more", start="run")


def test_a_last_stage_that_nobody_did_is_not_finished(tmp_path: Path) -> None:
    settings = {"method__name": "fedavg-ft", "train__rounds": 1}
    world = make_world(tmp_path, {"deadline_s": 1.0, "min_sites": 2, "retries": 1}, **settings)
    lost = Counter[str]()

    def meddle(site: str, kind: str, round: int, reply: Any) -> Any:
        lost[site] += kind == "finish"
        return None if kind == "finish" and lost[site] <= gone[site] else reply

    gone = dict.fromkeys(SITES, 2)
    with pytest.raises(RunError, match=r"the last stage: 0 good answers, 2 needed .* resume=true"):
        app.serve(MemoryGrid(world, meddle), world.settings, "run")
    assert json.loads((tmp_path / "state/runs/run/flower.json").read_text())["status"] == "failed"
    lost.clear()
    gone = {"east": 0, "north": 1, "west": 2}
    path = app.serve(MemoryGrid(world, meddle), world.settings, "run", resume=True)
    assert json.loads((path / "flower.json").read_text())["status"] == "finished"
    said = without_clock(path)[-1]["local_test"]["per_client"]
    assert [s for s, v in said.items() if v is not None] == ["east", "north"]


@pytest.mark.parametrize("where", ["append_metrics", "save", "tell", "status"])
def test_a_full_disk_ends_the_run_with_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, train__rounds=2)

    def full(self: Any, *words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Diary if where in ("tell", "status") else RunFolder, where, full)
    with pytest.raises(RunError, match=r"No space left on device; .* resume=true|cannot write to .*No space"):
        app.serve(MemoryGrid(world), world.settings, "run")
    monkeypatch.undo()
    if where != "status":
        told = json.loads((tmp_path / "state/runs/run/flower.json").read_text())
        assert (told["status"], "No space left" in told["error"]) == ("failed", True)
    path = app.serve(MemoryGrid(world), world.settings, "run", resume=True)
    assert without_clock(path)[-1]["round"] == 2


def test_a_site_that_lost_the_weights_before_the_last_stage_gets_them_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"min_sites": 3, "retries": 1}, method__name="fedavg-ft", train__rounds=1)
    asked = Counter[tuple[str, str]]()

    def meddle(site: str, kind: str, round: int, reply: Any) -> Any:
        asked[site, kind] += 1
        if (site, kind, asked[site, kind]) == ("west", "finish", 1):
            reply.content["about"]["needs"] = "weights"
        return reply

    path = app.serve(MemoryGrid(world, meddle), world.settings, "run")
    assert asked["west", "weights"] == 1
    assert (asked["west", "finish"], asked["east", "finish"]) == (2, 1)
    assert all(v is not None for v in without_clock(path)[-1]["local_test"]["per_client"].values())
