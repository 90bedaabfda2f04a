"""What a site does not do though its server asks, and what a server does not believe though a site says so."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from small import adapters, tree

from flower.test_faults import events, without_clock
from flower.wire import SITES, MemoryGrid, World, closed, make_world, run
from perada.errors import InputError, RunError
from perada.flower import app, link
from perada.flower.checks import MAX_LOSS, checked_upload, guard_losses, mean_loss, sample_count
from perada.flower.client import handle
from perada.flower.link import MIN_WAIT_S, Clock
from perada.flower.messages import pack, read_reply, read_request
from perada.flower.settings import MAX_ROUND, Plan
from perada.lanes import State
from perada.methods.perada import PerAda
from perada.server.checks import Refused

EVERYBODY = {"train__cohort": 0, "train__rounds": 1}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, MemoryGrid]:
    """A world in which a round was trained, and what was asked in it."""
    world = make_world(tmp_path_factory.mktemp("asked"), **EVERYBODY)
    return world, run(world)[1]


def request_of(grid: MemoryGrid, kind: str, **words: Any) -> RecordDict:
    """What east was asked, with other words."""
    content = next(c for d, s, k, _, c in grid.log if (d, s, k) == ("down", "east", kind))
    return closed(RecordDict({**content, "about": ConfigRecord({**content["about"], **words})}))


OUTSIDE = [
    "",
    ".",
    "..",
    "../../../away-00000000",
    "/tmp/perada-away-00000000",
    "a/b-00000000",
    "run",
    "x" * 65 + "-00000000",
]


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate", "score"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(({"run": name}, "run is not the id of a run") for name in OUTSIDE),
        *(({"start": name}, "start is not the id of a run") for name in OUTSIDE[1:]),
        *(({"round": n}, "round must be from 0") for n in (-1, MAX_ROUND)),
        *(({"start_round": n}, "start_round must be from 0") for n in (-1, MAX_ROUND)),
        *(({"within": x}, "within is not a number of seconds") for x in (-1.0, math.inf, math.nan)),
    ],
    ids=str,
)
def test_no_word_of_the_server_leads_out_of_the_sites_folder(
    kind: str, words: dict[str, Any], line: str, asked: tuple[World, MemoryGrid]
) -> None:
    world, grid = asked
    before = tree(world.home)
    reply = read_reply(handle(world.site("east"), request_of(grid, kind, **words)))
    assert line in reply.error
    assert tree(world.home) == before
    assert not Path("/tmp/perada-away-00000000").exists()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "weights", "/etc/hostname"),
        ("model", "weights", "torchvision"),
        ("model", "weights", "fedavg"),
        ("distill", "data", "/etc"),
        ("data", "root", "/etc"),
    ],
)
def test_a_plan_names_no_file_and_no_download(
    section: str, key: str, value: str, asked: tuple[World, MemoryGrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, grid = asked
    found = json.loads(Plan.of(world.settings, "ab" * 32).text())
    found["config"][section][key] = value
    with pytest.raises(InputError, match="names files or downloads"):
        Plan.parse(json.dumps(found))
    monkeypatch.setattr("perada.flower.client.backbone", None)  # it gets nowhere near
    reply = read_reply(handle(world.site("east"), request_of(grid, "hello", plan=json.dumps(found))))
    assert "names files or downloads" in reply.error


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        ("model", "backbone", "os:abort"),
        ("model", "backbone", "torchvision.models:resnet18"),
        ("model", "adapter", "os:abort"),
        ("model", "adapter", "timm:list_models"),  # of these packages a plan may name networks only
        ("method", "name", "os:abort"),
        ("method", "name", "torchvision:get_image_backend"),
        ("data", "name", "timm:list_models"),
    ],
)
def test_a_plan_names_no_module_to_import(section: str, key: str, name: str, asked: tuple[World, MemoryGrid]) -> None:
    world, _ = asked
    found = json.loads(Plan.of(world.settings, "ab" * 32).text())
    found["config"][section][key] = name
    with pytest.raises(InputError, match=f"{section}.{key} names a module to import"):
        Plan.parse(json.dumps(found))


@pytest.mark.parametrize("backbone", ["", "/../../../away", "AB" * 32, "ab" * 32 + "\n"])
def test_a_plans_backbone_is_a_digest(backbone: str, asked: tuple[World, MemoryGrid]) -> None:
    with pytest.raises(InputError, match="backbone is not a sha256"):
        Plan.parse(Plan.of(asked[0].settings, backbone).text())


def scores(path: Path) -> list[float]:
    row = without_clock(path)[-1]
    return [x for key in ("local_test", "local_val") for x in row[key]["per_client"].values()]


def test_scores_are_rounded_unless_a_site_says_otherwise(tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY)  # its sites say 15 digits
    exact = scores(run(world, "exact")[0])
    for site in SITES:
        file = tmp_path / site / "site.toml"
        file.write_text(file.read_text().replace("score_digits = 15\n", ""))
    app._site.cache_clear()
    path, grid = run(world, "rounded")
    assert scores(path) == [round(x, 1) for x in exact]
    assert scores(path) != exact
    told = [v for d, _, _, _, c in grid.log if d == "up" for k, v in c["numbers"].items() if k.startswith("local")]
    assert len(told) == 6
    assert all(x == round(x, 1) for x in told)


# At the server


@pytest.mark.parametrize(
    ("upload", "line"),
    [
        ({"w": 5000.0, "dc/w": 90.0}, ""),
        ({"w": 5000.0, "dc/w": 110.0}, "its parameters dc are 110 from their reference, whose norm is 1 "),
        ({"w": 20_000.0, "dc/w": 0.0}, "its parameters are 1.99e+04 from their reference, whose norm is 100 "),
    ],
)
def test_each_declared_part_of_an_upload_has_its_own_bound(upload: dict[str, float], line: str) -> None:
    """A large model does not widen the bound of control variates, which the broadcast does not have."""
    reference = State({"w": torch.tensor([[100.0]]), "dc/w": torch.zeros(1, 1)}, {"mean": torch.zeros(1, 1)})
    state = State({name: torch.tensor([[value]]) for name, value in upload.items()}, {"mean": torch.zeros(1, 1)})
    content = RecordDict({"state": pack(state)})
    if line:
        with pytest.raises(Refused, match=re.escape(line)):
            checked_upload(content, reference, bound=100.0)
    else:
        checked_upload(content, reference, bound=100.0)


def test_a_scaffold_upload_with_absurd_control_variates_is_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path, method__name="scaffold", **EVERYBODY)
    norms: list[float] = []

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if kind == "train":
            record = reply.content["state"]
            control = {name: array.numpy() for name, array in record.items() if name.startswith("params/dc/")}
            norms.append(math.sqrt(sum(float((v**2).sum()) for v in control.values())))
            factor = 110 / norms[-1]  # just above the bound, and far below 100 times the model's norm
            for name, values in control.items() if site == "west" else ():
                record[name] = Array((factor * values).astype(values.dtype))
        return reply

    path, _ = run(world, meddle=meddle)
    assert max(norms) < 50  # honest ones are far below
    told = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert told == [
        ("west", "train: its parameters dc are 110 from their reference, whose norm is 1 (rounds.norm_bound)")
    ]


def test_one_clock_for_all_that_a_round_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """West's upload and then everybody's scores do not come: that costs one deadline and a quarter, not two.

    The clock goes on only while the server waits, so that a loaded machine makes no difference.
    """
    limit, now, at = 2.0, [0.0], dict[str, float]()

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    world = make_world(tmp_path, {"deadline_s": limit}, **EVERYBODY)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message | None:
        return None if (site, kind) == ("west", "train") or kind == "score" else reply

    grid = MemoryGrid(world, meddle)
    app.serve(grid, world.settings, "run", step=lambda what, round: at.setdefault(what, now[0]) and None)
    within = {k: read_request(c).within for d, _, k, _, c in grid.log if d == "down"}
    assert within["train"] <= 0.8 * limit  # a fifth is the guard's
    assert within["score"] <= limit / 4
    assert limit <= at["updated"] - at["sending"] < 1.26 * limit


def test_waiting_for_sites_is_part_of_the_round(tmp_path: Path) -> None:
    settings = {**EVERYBODY, "train__rounds": 2}
    world = make_world(tmp_path, {"deadline_s": 1.0, "hello_s": 30.0, "min_sites": 3}, **settings)
    grid, at = MemoryGrid(world), [0.0]

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            del grid.nodes[3]
            at[0] = time.monotonic()

    with pytest.raises(RunError, match="2 good uploads, 3 needed"):
        app.serve(grid, world.settings, "run", step=step)
    assert time.monotonic() - at[0] < 10


def test_a_clock_leaves_something_to_whoever_comes_last() -> None:
    assert Clock.start(1000.0).left(0.2) == pytest.approx(800, abs=1)
    assert Clock(1000.0, time.monotonic() - 5).left() == MIN_WAIT_S
    assert Clock(1.0, time.monotonic() - 5).left() == 0.25


def meddled(kind: str, numbers: dict[str, Any] | None) -> Callable[[str, str, int, Message], Message | None]:
    """West says these numbers, or (None) nothing."""

    def meddle(site: str, what: str, round: int, reply: Message) -> Message | None:
        if (site, what) == ("west", kind):
            if numbers is None:
                return None
            reply.content["numbers"] = MetricRecord({**reply.content["numbers"], **numbers})
        return reply

    return meddle


@pytest.mark.parametrize("bad", [[0.5, -1e9, 0.5], [0.5, 0.5, math.inf], [-math.inf] * 3, [0.5, 0.5]])
def test_the_guard_does_not_believe_any_number(bad: list[float], tmp_path: Path) -> None:
    world = make_world(tmp_path, {"deadline_s": 1.0}, **EVERYBODY)
    path, _ = run(world, meddle=meddled("score", {"losses": bad}))
    told = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    line = "score: a loss is negative or infinite" if len(bad) == 3 else "score: 3 losses were asked for"
    assert told == [("west", line)]
    silent, _ = run(make_world(tmp_path / "silent", {"deadline_s": 1.0}, **EVERYBODY), meddle=meddled("score", None))
    assert without_clock(path)[-1]["distill"] == without_clock(silent)[-1]["distill"]
    assert adapters(path) == adapters(silent)


def test_a_site_says_a_number_where_its_loss_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = torch.tensor([[1.0], [torch.inf], [torch.nan]], dtype=torch.float64)
    monkeypatch.setattr(PerAda, "client_score", lambda self, trainer, candidates: losses)
    path, grid = run(make_world(tmp_path, **EVERYBODY))
    said = [c["numbers"]["losses"] for d, _, k, _, c in grid.log if (d, k) == ("up", "score")]
    assert said == [[1.0, MAX_LOSS, MAX_LOSS]] * 3
    assert not [e for e in events(path) if e["event"] == "refused"]
    assert without_clock(path)[-1]["distill"]["guard_chose"] == 0


def test_a_training_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY)
    path, grid = run(world, meddle=meddled("train", {"loss": math.inf}))
    known = [c["numbers"]["loss"] for d, s, k, _, c in grid.log if (d, k) == ("up", "train") and s != "west"]
    assert without_clock(path)[-1]["train_loss"] == pytest.approx(sum(known) / 2)
    assert mean_loss([math.nan, None, [1.0]]) is None


@pytest.mark.parametrize("count", [2.0**52, 1_000_001.0])
def test_a_site_cannot_outweigh_everybody_by_saying_so(count: float, tmp_path: Path) -> None:
    world = make_world(tmp_path, **EVERYBODY, train__weighting="samples")
    path, _ = run(world, meddle=meddled("train", {"samples": count}))
    told = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert [s for s, _ in told] == ["west"]
    assert "more than 1000000 (rounds.max_samples)" in told[0][1]
    assert without_clock(path)[-1]["absent"] == ["west"]


def test_what_is_believed() -> None:
    assert sample_count(7.0, 10) == 7
    assert sample_count(10.0, 10) == 10
    for bad in (None, 0.0, -1.0, 1.5, math.nan, math.inf, [7.0]):
        with pytest.raises(Refused, match="how many samples"):
            sample_count(bad, 10)
    assert guard_losses([0.0, 2.0], 2) == [0.0, 2.0]


def test_a_judge_has_an_opinion_on_all_candidates_or_on_none() -> None:
    assert all(math.isnan(x) for x in guard_losses([0.0, math.nan, 1.0], 3))
    assert guard_losses([0.5, 1e308, 0.4], 3) == [0.5, MAX_LOSS, 0.4]


def test_a_site_that_claims_too_many_samples_is_named_and_weighs_less(tmp_path: Path) -> None:
    """A million is within rounds.max_samples, and once outweighed everybody."""
    world = make_world(tmp_path, **{**EVERYBODY, "train__rounds": 2}, train__weighting="samples", distill__steps=0)
    path, grid = run(world, meddle=meddled("train", {"samples": 1_000_000.0}))
    told = [(e["site"], e["detail"]) for e in events(path) if e["event"] == "cut"]
    honest = {s: c["numbers"]["samples"] for d, s, k, _, c in grid.log if (d, k) == ("up", "train")}
    most = 2 * max(honest["east"], honest["north"])
    assert told == [("west", f"it says it has 1e+06 samples: counted as {most:.6g}")]  # once, not in every round
    same, _ = run(
        make_world(
            tmp_path / "same", **{**EVERYBODY, "train__rounds": 2}, train__weighting="samples", distill__steps=0
        ),
        meddle=meddled("train", {"samples": most}),
    )
    assert adapters(path) == adapters(same)


HOSTILE = "\x1b[31mred\r\x07 \u202egnp.exe\n\x9b2J"


def test_a_sites_words_reach_no_terminal_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its error, Flower's error about it, its name and the names of its tensors; and the server's words at a site."""
    world = make_world(tmp_path, {"quarantine": 0, "hello_s": 0.2}, train__cohort=0, train__rounds=2, distill__steps=0)

    def meddle(site: str, kind: str, round: int, reply: Message) -> Message:
        if site == "north" and kind == "hello":
            reply.content["about"]["site"] = HOSTILE
        if (site, kind, round) == ("west", "train", 0):
            reply.content["about"]["error"] = HOSTILE
        if (site, kind, round) == ("west", "train", 1):
            reply.content["state"][f"params/{HOSTILE}"] = Array(np.zeros((1, 2), np.float32))
        return reply

    path, grid = run(world, meddle=meddle)
    reply = read_reply(handle(world.site("east"), request_of(grid, "hello", plan=f'{{"{HOSTILE}": 1}}')))
    said = [*capfd.readouterr().err.split("\n"), reply.error]
    assert [e["site"] for e in events(path) if e["event"] == "refused"] == ["", "west", "west"]
    assert all(e["detail"].isprintable() for e in events(path))
    assert [line for line in said if not line.isprintable()] == []
    world.site("east").log(HOSTILE)
    assert all(line.isprintable() for line in capfd.readouterr().err.split("\n"))
