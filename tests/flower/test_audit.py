"""What crosses the network in a whole PerAda run, array by array."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

from flower.wire import SITES, MemoryGrid, World, make_world, opened, run
from perada.flower.messages import flat, pack, unflat
from perada.methods import method_sizes
from perada.methods.perada import PerAda

REPLY = {"federation", "run", "round", "kind", "site", "error", "needs", "failed"}
REQUEST = {"federation", "run", "round", "kind", "plan", "start", "start_round", "evaluate", "within", "undone"}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, MemoryGrid, Path]:
    world = make_world(tmp_path_factory.mktemp("audit"))
    path, grid = run(world)
    return world, grid, path


def arrays(grid: MemoryGrid) -> list[tuple[str, str, str, str, np.ndarray]]:
    """(direction, site, kind, name, values) of every array of every record of every message."""
    return [
        (direction, site, kind, name, array.numpy())
        for direction, site, kind, _, content in grid.log
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
    ]


def test_messages_hold_only_what_is_declared(audited: tuple[World, MemoryGrid, Path]) -> None:
    world, grid, _ = audited
    (work,) = world.site("east")._work.values()
    shared = PerAda().parts.shared(work.experiment.model.groups)
    first = work.experiment.model.initial()
    names = {f"params/{n}" for n in shared.params} | {f"buffers/{n}" for n in shared.buffers}
    assert names == set(flat(first))
    for direction, site, kind, name, values in arrays(grid):
        assert name in names, (direction, site, kind, name)
        assert values.dtype == np.float32
        lanes = 3 if kind == "score" else 1
        assert values.shape == (lanes, *flat(first)[name].shape[1:])
    kinds = Counter((d, k, "state" in c) for d, _, k, _, c in grid.log)
    assert {k for k in kinds if k[2]} == {
        ("down", "train", True),
        ("up", "train", True),
        ("down", "score", True),
        ("down", "evaluate", True),
    }
    for direction, _, kind, _, content in grid.log:
        assert set(content) <= ({"about", "state"} if direction == "down" else {"about", "state", "numbers"})
        assert set(content["about"]) == (REQUEST if direction == "down" else REPLY)
        if direction == "up":
            wanted = {"hello": [], "train": ["loss"], "score": ["losses"], "evaluate": []}[kind]
            assert set(content["numbers"]) - {"local_test", "local_val"} == set(wanted)


def met(world: World, grid: MemoryGrid, run_id: str) -> tuple[int, set[str]]:
    """How many values of personal parts were looked for, and the names of those that are in some message."""
    sent = {(name, lane.tobytes()) for *_, name, values in arrays(grid) for lane in values}
    looked, found = 0, set()
    for site in SITES:
        state = world.site(site).state
        assert state.rounds(run_id)
        for round in state.rounds(run_id):
            kept = flat(state.entry(run_id, round).kept)
            (work,) = world.site(site)._work.values()
            first = flat(work.experiment.model.initial())
            for name, tensor in kept.items():
                if not tensor.equal(first[name]):  # what training never moves is the same everywhere
                    looked += 1
                    if (name, tensor[0].numpy().tobytes()) in sent:
                        found.add(name)
    return looked, found


def test_no_value_of_a_personal_part_is_in_a_message(audited: tuple[World, MemoryGrid, Path]) -> None:
    world, grid, path = audited
    run_id = json.loads((path / "flower.json").read_text())["run"]
    looked, found = met(world, grid, run_id)
    assert looked > 100
    # The first norm stands before everything that is trained: in both of a site's lanes it sees the same activations,
    # so the shared lane's statistics of it, which are declared shared, are the personal lane's too. Nothing else meets.
    same = {"buffers/bn1.running_mean", "buffers/bn1.running_var"}
    assert found <= same
    state = world.site("north").state
    kept = state.newest(run_id)
    assert kept is not None
    (work,) = world.site("north")._work.values()
    first = flat(work.experiment.model.initial())
    moved = [n for n in flat(kept) if not flat(kept)[n].equal(first[n])]
    assert len(moved) > 20
    for name in moved:  # one planted value of a personal part would be found, whichever it is
        planted = opened(RecordDict({"state": pack(unflat({name: flat(kept)[name]}))}))
        more = replace(grid, log=[*grid.log, ("up", "north", "train", 0, planted)])
        assert name in met(world, more, run_id)[1]


def test_no_image_is_in_a_message(audited: tuple[World, MemoryGrid, Path]) -> None:
    world, grid, _ = audited
    crossed = b"\0".join(data for _, objects in grid.bytes for data in objects.values())
    assert len(crossed) > 100_000
    upload = next(c for d, _, k, _, c in grid.log if (d, k) == ("up", "train"))
    assert upload["state"]["params/fc.weight"].numpy().tobytes() in crossed  # it is not compressed: the search can find
    for site in SITES:
        (work,) = world.site(site)._work.values()
        for image in work.federation.images:
            assert image.numpy().tobytes() not in crossed
            seen = work.federation.prepare(image[None], torch.float32)[0, 0]
            assert seen.numpy().tobytes() not in crossed


def test_bytes_are_those_of_the_declared_parameters(audited: tuple[World, MemoryGrid, Path]) -> None:
    _, grid, path = audited
    sizes = method_sizes("perada", "resnet8", 10)
    each = 4 * (sizes["communicated"] + sizes["communicated_buffers"])
    total = Counter()
    for direction, _, kind, _, content in grid.log:
        held = sum(a.numpy().nbytes for a in content["state"].values()) if "state" in content else 0
        assert held == {"hello": 0, "score": 3 * each if direction == "down" else 0}.get(
            kind, each if direction == "down" or kind == "train" else 0
        )
        total[direction, kind] += held
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["bytes_up"] == total["up", "train"]
    assert row["bytes_down"] == total["down", "train"] + total["down", "score"]


def test_objects_on_the_wire_are_little_more_than_their_arrays(audited: tuple[World, MemoryGrid, Path]) -> None:
    """What deploy.md says about overhead: headers and the plan."""
    _, grid, _ = audited
    sizes = method_sizes("perada", "resnet8", 10)
    each = 4 * (sizes["communicated"] + sizes["communicated_buffers"])
    arrays_of = [sum(a.numpy().nbytes for a in c["state"].values()) if "state" in c else 0 for *_, c in grid.log]
    for held, (_, objects) in zip(arrays_of, grid.bytes, strict=True):
        if held == each:
            assert held < sum(map(len, objects.values())) < held + 60_000


def test_nothing_is_sent_by_a_method_that_shares_nothing(tmp_path: Path) -> None:
    _, grid = run(make_world(tmp_path, method__name="standalone", train__rounds=1))
    assert arrays(grid) == []
