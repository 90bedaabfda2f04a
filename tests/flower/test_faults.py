"""Sites that die, hang or answer garbage, in one process; tests/network does it with real ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from helpers import assert_same_tensors
from small import adapters

from flower.wire import SITES, MemoryGrid, make_world, raw, run
from perada.client.trainer import Trainer
from perada.errors import InputError, RunError
from perada.flower import cohort
from perada.flower.app import serve
from perada.flower.messages import flat
from perada.lanes import State
from perada.methods.perada import PerAda

EVERYBODY = {"train__cohort": 0, "train__rounds": 3}


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def without_clock(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def values(change: Callable[[np.ndarray], Any], name: str = "params/fc.weight") -> Callable[[Message], None]:
    def meddle(reply: Message) -> None:
        record = reply.content["state"]
        record[name] = Array(np.array(change(record[name].numpy())))

    return meddle


def first(change: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], np.ndarray]:
    def one(values: np.ndarray) -> np.ndarray:
        found = values.copy()
        change(found)
        return found

    return one


def _nan(v: np.ndarray) -> None:
    v.flat[3] = np.nan


def missing(reply: Message) -> None:
    del reply.content["state"]["params/fc.weight"]


def extra(reply: Message) -> None:
    reply.content["state"]["params/more"] = Array(np.zeros((1, 3), np.float32))


def blown_up(reply: Message) -> None:
    record = reply.content["state"]
    for name in list(record):
        record[name] = Array(record[name].numpy() * np.float32(1e6))


def says(**words: Any) -> Callable[[Message], None]:
    return lambda reply: reply.content["about"].update(words)


def bytes_of(data: bytes) -> Callable[[Message], None]:
    return lambda reply: reply.content.update(state=raw(data))


def header(listed: object, data: bytes = b"") -> bytes:
    text = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    return len(text).to_bytes(8, "little") + text + data


def other_type(reply: Message) -> None:
    reply.content["state"] = ArrayRecord({"state": Array("uint8", (2,), "numpy.ndarray", b"{}")})


ONE = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
UNREADABLE = {  # what is not in the safetensors format, and what lies about its size
    "empty": b"",
    "three bytes": b"123",
    "a long header": (2**60).to_bytes(8, "little") + b"{}",
    "two terabytes": header({"a": {**ONE, "shape": [1, 500_000_000_000], "data_offsets": [0, 2_000_000_000_000]}}),
    "another shape": header({"a": {**ONE, "shape": [1, 3]}}, bytes(8)),
    "a cut end": header({"a": ONE}, bytes(7)),
    "more bytes": header({"a": ONE}, bytes(9)),
    "a negative shape": header({"a": {**ONE, "shape": [-1, -2]}}, bytes(8)),
    "an unknown dtype": header({"a": {**ONE, "dtype": "F33"}}, bytes(8)),
    "not JSON": header(b"{'a': ("),
    "open brackets": header(b"[" * 4000),
    "a list": header([1, 2]),
    "pickle": b"\x80\x04K\x01.",
}


GARBAGE: dict[str, tuple[Callable[[Message], None], str]] = {
    "nan": (values(first(_nan)), "params/fc.weight holds values that are not finite"),
    "nan statistics": (values(first(_nan), "buffers/bn1.running_var"), "not finite"),
    "shape": (values(lambda v: v[:, :, :-1]), "has shape (1, 10, "),
    "lanes": (values(lambda v: np.concatenate([v, v])), "has shape (2, 10, "),
    "dtype": (values(lambda v: v.astype(np.float64)), "has dtype float64, not float32"),
    "missing": (missing, "'params/fc.weight' is missing"),
    "extra": (extra, "'params/more' is not shared by this method"),
    "no arrays": (lambda reply: reply.content.pop("state"), "more are missing"),
    "no tensors": (bytes_of(header({})), "more are missing"),
    "another format": (other_type, "not in the safetensors format"),
    "norm": (blown_up, "its parameters are"),
    "norm of statistics": (values(lambda v: v * np.float32(1e6), "buffers/bn1.running_mean"), "its statistics are"),
    "another round": (says(round=0), "late: of run"),
    "another run": (says(run="yesterday"), "late: of run 'yesterday', round 1, 'train'"),
    "another site": (says(site="north"), "the reply says it is 'north'"),
    "another kind": (says(kind="score"), "'score'"),
    "no words": (lambda reply: reply.content.pop("about"), "there is no record 'about' in it"),
    "words of other kinds": (says(round="one"), "round is not int"),
    "many lines": (says(error="a\n\x1b[31mb" + "c" * 999), "train: a \\x1b[31mbccc"),
    "its own error": (says(error="bad input at the site, see its log"), "bad input at the site"),
    **{f"bytes: {name}": (bytes_of(data), "not in the safetensors format") for name, data in UNREADABLE.items()},
    "numbers": (lambda reply: reply.content.update(numbers=ConfigRecord({"loss": "low"})), "numbers are not numbers"),
}


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in which west's upload of round 1 just does not come."""
    world = make_world(tmp_path_factory.mktemp("dropped"), {"deadline_s": 0.3}, **EVERYBODY)
    path, _ = run(world, meddle=lambda s, k, r, reply: None if (s, k, r) == ("west", "train", 1) else reply)
    return path


@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_is_refused_by_name_and_the_round_completes(kind: str, dropped: Path, tmp_path: Path) -> None:
    change, reason = GARBAGE[kind]
    world = make_world(tmp_path, **EVERYBODY)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind, round) == ("west", "train", 1):
            change(reply)
        return reply

    path, _ = run(world, meddle=meddle)
    refused = [e for e in events(path) if e["event"] == "refused"]
    assert [(e["site"], e["round"]) for e in refused] == [("west", 1)]
    assert reason in refused[0]["detail"]
    assert adapters(path) == adapters(dropped)
    absent = [row.get("absent") for row in without_clock(path)]
    assert absent == [None, ["west"], None]
    told = [row.get("refused", {}).get("west", "") for row in without_clock(path)]
    assert [bool(why) for why in told] == [False, True, False]
    assert told[1] in refused[0]["detail"]


def test_a_silent_site_costs_its_deadline_and_no_more(dropped: Path) -> None:
    assert [(e["site"], e["event"]) for e in events(dropped) if e["event"] not in ("here",)] == [("west", "silent")]
    rows = without_clock(dropped)
    assert rows[-1]["round"] == 3
    assert [r["local_test"]["per_client"]["west"] is None for r in rows] == [True, False, False]  # round 1's rode along
    assert (dropped / "report.html").is_file()


def test_a_hung_site_stops_no_round(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 0.5}, **EVERYBODY)
    start = time.monotonic()
    path, _ = run(world, meddle=lambda s, k, r, reply: None if s == "north" and k != "hello" else reply)
    assert time.monotonic() - start < 60
    silent = [e for e in events(path) if e["event"] == "silent"]
    assert {e["site"] for e in silent} == {"north"}
    assert len(silent) == 4  # three rounds and the last evaluation; it is not asked to judge what it did not send


def test_a_late_upload_is_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 0.4}, **EVERYBODY)
    held: list[Message] = []
    grid = MemoryGrid(world)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message | None:
        if (site, kind, round) == ("west", "train", 1):
            held.append(reply)
            return None
        if held and round == 2:
            late = held.pop()
            grid.ready[late.metadata.reply_to_message_id] = late
        return reply

    grid.meddle = meddle
    path = serve(grid, world.settings, "run")
    assert ("west", "late answer to train of round 1") in [(e["site"], e["detail"]) for e in events(path)]


def test_flowers_own_error_reply_is_a_dropped_site(dropped: Path, tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind, round) == ("west", "train", 1):
            broken = Message(Error(0, "node unavailable"), reply_to=_request(reply))
            broken.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            return broken
        return reply

    path, _ = run(world, meddle=meddle)
    assert ("west", "failed", "train: node unavailable") in [(e["site"], e["event"], e["detail"]) for e in events(path)]
    assert adapters(path) == adapters(dropped)


def _request(reply: Message) -> Message:
    return Message(reply.content, reply.metadata.src_node_id or 1, "train")


def test_too_few_sites_try_again_and_then_stop_with_the_line_that_resumes(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 0.3, "min_sites": 3, "retries": 2}, **EVERYBODY)
    lost = {"west": 2}

    def twice(site: str, kind: str, round: int, reply: Message) -> Message | None:
        if kind == "train" and round == 1 and lost.get(site):
            lost[site] -= 1
            return None
        return reply

    path, _ = run(world, meddle=twice)
    short = [e for e in events(path) if e["event"] == "short"]
    assert [e["detail"] for e in short] == ["2 of at least 3 uploads, attempt 1", "2 of at least 3 uploads, attempt 2"]
    assert world.trained() == dict.fromkeys(SITES, 3)  # asked three times, trained once

    with pytest.raises(RunError, match=r"round 0: 2 good uploads, 3 needed .* without one: west; .* resume=true"):
        run(world, "other", meddle=lambda s, k, r, reply: None if s == "west" and k == "train" else reply)
    told = json.loads((tmp_path / "state" / "runs" / "other" / "flower.json").read_text())
    assert told["status"] == "failed"
    assert "resume=true" in told["error"]
    path, _ = run(world, "other", resume=True)
    assert without_clock(path)[-1]["round"] == 3


def test_a_site_that_goes_away_and_comes_back_keeps_what_it_had(tmp_path: Path) -> None:
    """North's node is gone for a round; it comes back as another node."""
    world = make_world(tmp_path, {"deadline_s": 0.5}, **{**EVERYBODY, "train__rounds": 4})
    grid = MemoryGrid(world)
    kept: list[dict[str, Any]] = []
    run_id = ""

    def step(what: str, round: int) -> None:
        nonlocal run_id
        if (what, round) == ("saved", 0):
            del grid.nodes[2]
            run_id = json.loads((tmp_path / "state/runs/run/flower.json").read_text())["run"]
            kept.append(flat(world.site("north").state.newest(run_id)))
        if (what, round) == ("saved", 1):
            kept.append(flat(world.site("north").state.newest(run_id)))
            grid.nodes[77] = "north"

    path = serve(grid, world.settings, "run", step=step)
    assert_same_tensors(kept[0], kept[1])
    assert world.site("north").state.rounds(run_id)[-1] == 3
    assert [r.get("absent") for r in without_clock(path)][1] == ["north"]
    assert [e["event"] for e in events(path) if e["site"] == "north"] == ["here", "gone", "here"]


def test_strangers_and_impostors_are_refused_once(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"hello_s": 0.2, "deadline_s": 1.0}, **EVERYBODY)
    (tmp_path / "spy").mkdir()
    text = (tmp_path / "west" / "site.toml").read_text()
    (tmp_path / "spy" / "site.toml").write_text(
        text.replace('"west"', '"spy"').replace('"data.npz"', '"../west/data.npz"')
    )
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "site.toml").write_text(text.replace('"digits"', '"chest"'))
    grid = MemoryGrid(world)
    grid.nodes |= {8: "spy", 9: "lost"}
    path = serve(grid, world.settings, "run")
    refused = [e["detail"] for e in events(path) if e["event"] == "refused"]
    assert refused == [
        "node 8: 'spy' is not a site of this federation",
        "node 9: west: it belongs to federation 'chest', not 'digits'",
    ]
    assert {s for d, s, k, _, _ in grid.log if k == "train"} == set(SITES)


def test_a_site_cannot_speak_with_anothers_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are checked, a node's key says who it is: here west's machine says it is north."""
    world = make_world(tmp_path, {"hello_s": 0.2, "deadline_s": 1.0}, **EVERYBODY)
    text = (tmp_path / "north" / "site.toml").read_text()
    (tmp_path / "west" / "site.toml").write_text(text)
    nodes = tmp_path / "nodes.json"
    monkeypatch.setenv("PERADA_FLOWER_NODES", str(nodes))
    with pytest.raises(RunError, match="0 good uploads"):  # a file that is not there vouches for nobody
        run(world, "none")
    nodes.write_text(json.dumps({"1": "east", "2": "north", "3": "west"}))
    path, grid = run(world)
    refused = [e["detail"] for e in events(path) if e["event"] == "refused"]
    assert refused == ["node 3: it says it is 'north', but its key belongs to 'west'"]
    assert {s for d, s, k, _, _ in grid.log if k == "train"} == {"east", "north"}


WILD = {**EVERYBODY, "train__lr": 1e30, "train__epochs": 3, "train__rounds": 1, "distill__steps": 0}


def test_a_run_in_which_everybody_diverges_ends_and_names_them(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"norm_bound": 1e36, "retries": 5}, **WILD)
    line = r"0 good uploads, 1 needed \(Rounds.min_sites\); their training diverged: east, north, west"
    with pytest.raises(RunError, match=line):
        run(world)
    told = [(e["site"], e["event"]) for e in events(tmp_path / "state/runs/run") if e["event"] != "here"]
    assert told == [*((s, "diverged") for s in SITES), ("", "short")]  # asked once: they would say the same again


@pytest.mark.parametrize("old", [False, True], ids=["as it is", "an older site that sends its state"])
def test_a_diverged_upload_is_not_used(
    old: bool, dropped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """West's lane explodes in round 1 only: it is left out of the mean, and keeps what it had."""
    world = make_world(tmp_path, {"norm_bound": 1e36}, **EVERYBODY)
    real = PerAda.client_update

    def explodes(self: PerAda, trainer: Trainer, received: State, kept: State) -> tuple[State, State]:
        upload, after = real(self, trainer, received, kept)
        if (trainer.federation.clients[0].name, trainer.round) == ("west", 1):
            trainer._done.append(replace(trainer._done[-1], finite=torch.tensor([False])))
            return upload.map(lambda t: t + 1e20), after.map(lambda t: t + 1e20)
        return upload, after

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind, round) == ("west", "train", 1):
            assert reply.content["about"]["failed"] is True
            assert "state" not in reply.content
            if old:
                reply.content["state"] = ArrayRecord(
                    {"params/fc.weight": Array(np.full((1, 10, 64), 1e20, np.float32))}
                )
        return reply

    monkeypatch.setattr(PerAda, "client_update", explodes)
    path, _ = run(world, meddle=meddle)
    assert [row.get("failed") for row in without_clock(path)] == [None, ["west"], None]
    assert ("west", "diverged") in [(e["site"], e["event"]) for e in events(path)]
    assert adapters(path) == adapters(dropped)
    state, run_id = world.site("west").state, json.loads((path / "flower.json").read_text())["run"]
    entries = {r: state.entry(run_id, r) for r in state.rounds(run_id)}
    assert_same_tensors(flat(entries[1].kept), flat(entries[0].kept))
    assert not entries[1].upload.lanes


def test_a_dead_superlink_ends_the_run_with_one_line(tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY)
    grid = MemoryGrid(world)

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            grid.push_messages = _broken

    def _broken(messages: Any) -> Any:
        raise ConnectionError("connection refused\nand more")

    with pytest.raises(
        RunError, match=r"SuperLink does not answer \(ConnectionError connection refused\); .*resume=true"
    ):
        serve(grid, world.settings, "run", step=step)
    path, _ = run(world, resume=True)
    whole, _ = run(make_world(tmp_path / "whole", **EVERYBODY))
    assert adapters(path) == adapters(whole)


def test_a_reply_that_breaks_flowers_own_reading_is_the_sites_fault(dropped: Path, tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY)
    broken: list[str] = []

    class Grid(MemoryGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            if set(broken) & set(message_ids):
                raise ValueError("Unexpected set of `children`.")
            return super().pull_messages(message_ids)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if (site, kind, round) == ("west", "train", 1):
            broken.append(reply.metadata.reply_to_message_id)
        return reply

    path = serve(Grid(world, meddle), world.settings, "run")
    refused = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert refused == [("west", "train: its reply cannot be read (ValueError)")]
    assert adapters(path) == adapters(dropped)


@pytest.mark.parametrize(("kind", "reader"), [("train", "checked_upload"), ("score", "guard_losses")])
def test_whatever_a_reply_breaks_in_the_server_is_the_sites_fault(
    kind: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """North's, which is read second: an upload, and an answer to the guard."""
    world = make_world(tmp_path, **{**EVERYBODY, "train__rounds": 1})
    real, calls = getattr(cohort, reader), []

    def broken(*words: Any) -> Any:
        calls.append(reader)
        if len(calls) == 2:
            raise IndexError("list index out of range")
        return real(*words)

    monkeypatch.setattr(cohort, reader, broken)
    path, _ = run(world)
    refused = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert refused == [("north", f"{kind}: it cannot be read (IndexError)")]


def test_two_servers_cannot_work_on_one_run(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**EVERYBODY, "train__rounds": 1})
    said = []

    def step(what: str, round: int) -> None:
        with pytest.raises(InputError, match="another process is at work"):
            run(world, resume=True)
        said.append(what)

    serve(MemoryGrid(world), world.settings, "run", step=step)
    assert said
