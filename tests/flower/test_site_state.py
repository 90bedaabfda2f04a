"""A site's own disk: entries are intact or refused, there is one writer, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same_tensors
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import damage, tree

from flower.test_faults import events, without_clock
from flower.wire import SITES, MemoryGrid, make_world, run, write_server
from perada.cli import flower as commands
from perada.cli import main as cli
from perada.client.scores import personal_scores
from perada.data import read_image
from perada.errors import InputError
from perada.flower import app
from perada.flower.messages import flat
from perada.flower.personal import personal_model
from perada.flower.settings import Plan
from perada.flower.site_data import site_federation
from perada.flower.site_state import Entry, SiteState
from perada.lanes import State
from perada.models.resnet import resnet
from perada.server.checks import Refused


def state_of(value: float) -> State:
    return State({"w": torch.full((1, 3), value)}, {"s": torch.full((1, 2), -value)})


def entry(round: int, previous: int | None = None, received: str = "a") -> Entry:
    return Entry(round, previous, received, state_of(round), state_of(10 + round), {"loss": 0.5, "failed": False})


@pytest.fixture
def state(tmp_path: Path) -> SiteState:
    return SiteState(tmp_path, "chest", "north", keep=3)


def test_before_and_after_a_round(state: SiteState) -> None:
    assert state.before("run", 0) is None
    state.save("run", entry(0))
    state.save("run", entry(3, 0))
    for round, wanted in ((1, 0), (3, 0), (4, 3)):
        found = state.before("run", round)
        assert found is not None
        assert_same_tensors(flat(found), flat(state_of(wanted)))
    assert state.before("run", 0) is None
    assert state.before("other", 5) is None


def test_a_round_is_answered_from_the_disk_only_for_the_same_broadcast(state: SiteState) -> None:
    state.save("run", entry(0))
    state.save("run", entry(3, 0, "b"))
    assert state.answered("run", 4, "x") is None
    found = state.answered("run", 3, "b")
    assert found is not None
    assert_same_tensors(flat(found.upload), flat(state_of(13)))
    assert state.answered("run", 3, "other") is None  # from the state before it, once more
    assert state.answered("run", 0, "a") is not None  # the server went back
    with pytest.raises(Refused, match="it is past round 0: it has trained round 3"):
        state.answered("run", 0, "other")  # never undo what is newer
    with pytest.raises(Refused, match="past round 2"):
        state.answered("run", 2, "b")


def test_only_the_newest_entries_stay(state: SiteState) -> None:
    for round in range(6):
        state.save("run", entry(round, round - 1 if round else None))
    assert state.rounds("run") == [3, 4, 5]
    with pytest.raises(Refused, match="its state before round 3 is gone"):
        state.before("run", 3)


@pytest.mark.parametrize("name", ["kept.safetensors", "reply.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["cut", "one bit", "empty"])
def test_a_damaged_entry_is_refused_and_the_older_one_stays(state: SiteState, name: str, how: str) -> None:
    state.save("run", entry(0))
    state.save("run", entry(1, 0))
    before = tree(state.path / "run" / "round-0000")
    damage(state.path / "run" / "round-0001" / name, how)
    with pytest.raises(InputError, match=r"round-0001 is damaged .*: move it away to continue from the round before"):
        state.before("run", 2)
    shutil.move(state.path / "run" / "round-0001", state.path / "aside")
    found = state.before("run", 2)
    assert found is not None
    assert_same_tensors(flat(found), flat(state_of(0)))
    assert tree(state.path / "run" / "round-0000") == before


def test_one_process_at_a_time(state: SiteState) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with state.locked(1):
            held.set()
            done.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(5)
    try:
        start = time.monotonic()
        with pytest.raises(Refused, match="busy with an earlier round"), state.locked(0.2):
            pass
        assert 0.2 <= time.monotonic() - start < 2
    finally:
        done.set()
        thread.join()
    with state.locked(0):
        pass


def test_a_write_that_dies_halfway_leaves_the_old_entry(state: SiteState, monkeypatch: pytest.MonkeyPatch) -> None:
    state.save("run", entry(0))
    monkeypatch.setattr("perada.flower.site_state.write_atomic", _full)
    with pytest.raises(InputError, match="No space left on device; the round before it is intact"):
        state.save("run", entry(1, 0))
    monkeypatch.undo()
    assert state.rounds("run") == [0]
    state.save("run", entry(1, 0))
    assert state.rounds("run") == [0, 1]


def _full(path: Path, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_damaged_state_in_a_run_drops_the_site_and_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path, train__cohort=0, train__rounds=3)

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            (there,) = (tmp_path / "west/state/digits/west").glob("run-*/round-0000")
            damage(there / "kept.safetensors", "one bit")

    path = app.serve(MemoryGrid(world), world.settings, "run", step=step)
    refused = [e for e in events(path) if e["event"] == "refused"]
    assert {(e["site"], e["detail"]) for e in refused} == {
        ("west", "train: bad input at the site, see its log"),
        ("west", "evaluate: bad input at the site, see its log"),
    }
    assert without_clock(path)[-1]["round"] == 3
    assert "error: " in (said := capfd.readouterr().err)
    assert "round-0000 is damaged" in said


def test_the_servers_weights_are_sent_once_and_kept(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__cohort=0, train__rounds=1)
    net = resnet("resnet8", 10, seed=5)
    save_file({k: v for k, v in net.state_dict().items() if "num_batches" not in k}, tmp_path / "mine.safetensors")
    world.settings = write_server(tmp_path, model__weights="mine.safetensors", train__cohort=0, train__rounds=1)
    _, grid = run(world)
    assert sorted(s for d, s, k, _, _ in grid.log if (d, k) == ("down", "weights")) == ["east", "north", "west"]
    (work,) = world.site("east")._work.values()
    assert_same_tensors(
        {k: v for k, v in work.network.net.state_dict().items() if "num_batches" not in k},
        {k: v for k, v in net.state_dict().items() if "num_batches" not in k},
    )
    assert not any(str(tmp_path) in json.dumps(str(c["about"])) for *_, c in grid.log)  # the server's paths stay there
    app._site.cache_clear()
    _, grid = run(world, "again")
    assert not [k for _, _, k, _, _ in grid.log if k == "weights"]


def test_what_a_site_is_told_names_none_of_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path, {"hello_s": 0.2}, train__rounds=1)
    names = np.array([f"patient-{i}" for i in range(10)])
    held = dict(np.load(tmp_path / "west" / "data.npz"))
    np.savez(tmp_path / "west" / "data.npz", **{**held, "classes": names})
    path, _ = run(world)
    refused = [e["detail"] for e in events(path) if e["event"] == "refused"]
    assert refused == ["node 3: west: bad input at the site, see its log"]
    assert "class 'patient-0' is not one of the federation's" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["perada", "fedbn", "apfl", "fedavg", "fedavg-ft"])
def test_a_site_gets_its_model_out_without_the_server(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(tmp_path, method__name=method, train__rounds=2)
    path, _ = run(world)
    capsys.readouterr()
    app._site.cache_clear()
    row = without_clock(path)[-1]
    for name in SITES:
        settings = world.site(name).settings
        found = personal_model(settings)
        data = site_federation(settings, Plan.of(world.settings, ""), torch.device("cpu"))
        shown = personal_scores(found.network, found.state, data, ("local",))
        assert shown["local_test"].per_client[name] == row["local_test"]["per_client"][name]
        found.export(tmp_path / f"{name}.safetensors", merged=True)
        net, pictures = resnet("resnet8", len(data.classes)), torch.rand(3, 3, 8, 8)
        net.load_state_dict(load_file(tmp_path / f"{name}.safetensors"))
        assert torch.allclose(net.eval()(pictures), found.module()(pictures), atol=1e-4)
    personal_model(settings, "run").export(tmp_path / "part.safetensors")
    assert set(load_file(tmp_path / "part.safetensors")) == {*found.state.params, *found.state.buffers}
    with safe_open(tmp_path / "part.safetensors", "pt") as file:
        said = json.loads(file.metadata()["perada"])
    assert said == found.notes()
    assert said["size"] == [8, 8]
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)).save(picture)
    (seen,) = found.predict([picture])
    monkeypatch.setattr(commands, "known_site", lambda folder, site: settings)
    assert cli.main(["flower", "predict", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [seen]
    assert cli.main(["flower", "predict", str(picture)]) == 0
    assert f"{max(seen['probabilities'].values()):.1%}" in capsys.readouterr().out
    pixels = torch.from_numpy(read_image(picture, 8).mean(0, keepdims=True).round())
    grey = data.prepare(pixels[None], torch.float32)
    wanted = dict(zip(data.classes, found.module()(grey).softmax(-1)[0].tolist(), strict=True))
    assert seen["probabilities"] == pytest.approx(wanted, rel=1e-4)
    assert (seen["client"], seen["multilabel"]) == (settings.name, False)
    if method == "perada":  # a program, for a machine without perada
        found.export(tmp_path / "whole.pt2")
        program = torch.export.load(tmp_path / "whole.pt2").module()
        (shares,) = program(torch.from_numpy(np.array(Image.open(picture)))[None]).tolist()
        assert shares == pytest.approx([seen["probabilities"][name] for name in data.classes], abs=1e-5)
    with pytest.raises(InputError, match="unknown run 'walk'"):
        personal_model(settings, "walk")
    with pytest.raises(InputError, match="holds no run of this site yet"):
        personal_model(replace(settings, state=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("what", ["a pipe", "brackets"])
def test_a_plan_that_is_no_plain_file_is_not_read(what: str, state: SiteState) -> None:
    state.save("run", entry(0))
    for file in (state.path / "run" / "plan.json", state.path / "run" / "round-0000" / "state.json"):
        file.unlink(missing_ok=True)
        if what == "a pipe":
            os.mkfifo(file)
        else:
            file.write_text("[" * 100_000)
    assert state.history("run") == []
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        state.load_broadcast("run")
    with pytest.raises(InputError, match="is damaged"):
        state.entry("run", 0)
    assert state.standing("run") == [0]
