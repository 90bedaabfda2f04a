"""Differential privacy over a network: what leaves a site, what its rounds cost it, and when it stops."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from small import damage

from flower.test_faults import values
from flower.wire import SITES, Meddle, World, make_world, run, write_server
from perada.errors import Damaged, InputError
from perada.experiment import PATIENCE
from perada.flower import app
from perada.flower.client import handle
from perada.flower.messages import Reply, Request, flat, message, read_reply
from perada.flower.personal import site_page
from perada.flower.settings import Plan, ServerSettings
from perada.flower.spending import FILE, SiteSpending
from perada.lanes import State, repeat
from perada.privacy import Privacy
from perada.privacy.accountant import Step, epsilon
from perada.privacy.ledger import Ledger
from perada.privacy.mechanism import Mechanism
from perada.privacy.spending import SPENT
from perada.server.checks import Refused
from perada.server.private import ClientPrivacy

pytest.importorskip("dp_accounting")
DP: dict[str, Any] = {
    "privacy__noise": 2.0,
    "distill__guard": "none",
    "train__rounds": 2,
    "train__cohort": 0,
    "train__batch": 4,
}
OF_CLIENTS = {**DP, "privacy__level": "client", "train__aggregate": "mean", "privacy__clip": 0.001}

KINDS = ("hello", "weights", "train", "score", "evaluate", "finish")


@pytest.fixture(autouse=True)
def fresh_sites() -> Iterator[None]:
    """Sites read their settings once per process."""
    app._site.cache_clear()
    yield
    app._site.cache_clear()


def settings(world: World, site: str, **more: Any) -> None:
    """Adds lines to a site.toml."""
    file = world.home / site / "site.toml"
    file.write_text(file.read_text() + "".join(f"{key} = {value}\n" for key, value in more.items()))


def spending(world: World, site: str) -> SiteSpending:
    (work,) = world.site(site)._work.values()
    return work.spending


def steps(world: World, site: str) -> int:
    return sum(spending(world, site).ledger().of(site).values())


def per_round(world: World, site: str) -> int:
    return sum(spending(world, site).spending.bill[site].values())


@pytest.fixture(scope="module")
def world_once(tmp_path_factory: pytest.TempPathFactory) -> World:
    app._site.cache_clear()
    world = make_world(tmp_path_factory.mktemp("once"), **{**DP, "train__rounds": 1})
    run(world)
    return world


def test_every_number_that_leaves_a_site(tmp_path: Path) -> None:
    world = make_world(tmp_path, **DP)
    path, grid = run(world)
    (work,) = world.site("east")._work.values()
    shared = flat(work.experiment.model.initial())
    sent = {(s, r): c["state"] for d, s, k, r, c in grid.log if d == "down" and k == "train"}
    uploads, fixed = 0, 0
    for direction, site, kind, round, content in grid.log:
        if direction == "down":
            continue
        assert set(content) <= {"about", "numbers", "state"}
        words, numbers = content["about"], content["numbers"]
        assert isinstance(words, ConfigRecord)
        assert isinstance(numbers, MetricRecord)
        assert dict(numbers) == {}, (site, kind)  # no loss, no score, no count
        said = {k: v for k, v in words.items() if k not in ("federation", "run", "kind", "site")}
        assert said == {"round": round, "error": "", "needs": "", "failed": False}
        if "state" not in content:
            continue
        assert kind == "train"
        assert isinstance(content["state"], ArrayRecord)
        assert set(content["state"]) == set(shared)
        for name, array in content["state"].items():
            received, upload = sent[site, round][name].numpy(), array.numpy()
            moved = (received != upload) & np.isfinite(upload)
            # Statistics, and what no training moves, are the broadcast's: they say nothing of the site.
            if name.startswith("buffers/") or name.removeprefix("params/") in work.experiment.model.inert:
                fixed += 1
                assert not moved.any(), name
            else:
                uploads += 1
                assert moved.mean() > 0.95, name  # noise is on every number that is trained
    assert uploads > 50 < fixed
    assert {kind for direction, _, kind, _, _ in grid.log if direction == "up"} == {"hello", "train", "evaluate"}
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["train_loss"] is None
    assert row["local_test"]["mean"] is None
    summary = json.loads((path / "summary.json").read_text())
    assert summary["privacy"]["epsilon"]["per_client"] == {}  # each site knows its own
    assert summary["privacy"]["noise"] == 2.0


def ledger_file(world: World, site: str) -> Path:
    return world.site(site).state.path / FILE


def asked(world: World, site: str, kind: str, plan: str, run: str = "asked-0123abcd", round: int = 0) -> RecordDict:
    """The reply to a request that an honest server might not send."""
    work = world.site(site).work(plan)
    lanes = len(work.experiment.distill.judged()) if kind == "score" else 1
    request = Request("digits", run, round, kind, plan, evaluate=True, within=20.0)
    return handle(world.site(site), message(request, repeat(work.experiment.now.broadcast, lanes)))


def plan_of(world: World, **tables: dict[str, Any]) -> str:
    """The plan of a server that changes some settings of it."""
    state = world.site("east").state
    note = json.loads(state.load_broadcast(state.runs()[0])[0])
    note["config"] |= {name: {**note["config"][name], **table} for name, table in tables.items()}
    return json.dumps(note, sort_keys=True)


@pytest.fixture
def noisy_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per noisy step of any lane."""
    steps: list[int] = []
    original = Mechanism.__call__

    def counted(self: Mechanism, gradient: Any, *rest: Any) -> Any:
        steps.extend(gradient.batch.lanes)
        return original(self, gradient, *rest)

    monkeypatch.setattr(Mechanism, "__call__", counted)
    return steps


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("evaluate", ""),
        ("score", "with differential privacy it sends no validation losses"),
        ("finish", "perada has no last stage"),
    ],
)
def test_no_number_leaves_a_site_by_any_request_of_a_private_plan(tmp_path: Path, kind: str, error: str) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 1})
    path, _ = run(world)
    run_id = json.loads((path / "flower.json").read_text())["run"]
    content = asked(world, "east", kind, plan_of(world), run_id, 1)
    assert set(content) == {"about", "numbers"}
    assert dict(content["numbers"]) == {}
    assert read_reply(content) == Reply("digits", run_id, 1, kind, "east", error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "method",
    [{"name": "fedrep", "shared_epochs": 20}, {"name": "fedalt-output"}, {"name": "fedavg-ft"}],
    ids=lambda method: method["name"],
)
def test_a_site_refuses_a_method_that_does_more_than_it_pays_for(
    world_once: World, method: dict[str, Any], kind: str, noisy_steps: list[int]
) -> None:
    plan = plan_of(world_once)
    note = json.loads(plan)
    note["config"]["method"] = method
    before = ledger_file(world_once, "east").read_bytes()
    content = asked(world_once, "east", kind, json.dumps(note, sort_keys=True))
    error = read_reply(content).error
    assert "has no differential privacy: use perada" in error
    assert "\n" not in error
    assert "state" not in content
    assert noisy_steps == []
    assert ledger_file(world_once, "east").read_bytes() == before


def test_a_site_s_ledger_has_every_round_of_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path, **DP)
    run(world)
    for site in SITES:
        assert steps(world, site) == 2 * per_round(world, site)
        assert (world.site(site).state.path / FILE).is_file()
    first = spending(world, "east").epsilon
    assert f"ε {first:.2f} so far" in capsys.readouterr().err
    east = world.site("east")
    page = site_page(east.settings)
    page.write(tmp_path / "page.html")
    assert "in all runs of the federation so far" in (tmp_path / "page.html").read_text()
    run(world, "another")
    assert steps(world, "east") == 4 * per_round(world, "east")
    assert spending(world, "east").epsilon > first


def test_an_answer_from_the_disk_costs_nothing_and_an_undone_round_stays_paid(tmp_path: Path) -> None:
    world = make_world(tmp_path, **DP)
    with pytest.raises(Killed):
        run(world, step=kill("gathered", 1))
    assert steps(world, "west") == 2 * per_round(world, "west")
    run(world, resume=True)  # the server asks for the second round again
    assert world.trained()["west"] == 2
    assert steps(world, "west") == 2 * per_round(world, "west")
    run(world, back=1)
    assert world.trained()["west"] == 3
    assert steps(world, "west") == 3 * per_round(world, "west")


def test_a_ledger_is_written_before_the_upload_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 1})
    paid: list[int] = []

    def meddle(site: str, kind: str, round: int, reply: Any) -> Any:
        if kind == "train":
            paid.append(steps(world, site))
        return reply

    run(world, meddle=meddle)
    assert len(paid) == 3
    assert all(paid)


def test_a_site_without_budget_says_so_and_the_training_ends(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 40, "privacy__budget": 2.0})
    path, _ = run(world)
    summary = json.loads((path / "summary.json").read_text())
    assert 1 <= summary["round"] < 40
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    refused = [e["site"] for e in events if e["detail"] == "train: its privacy budget is spent"]
    assert sorted(refused) == list(SITES)  # each is named once
    assert [e["detail"] for e in events if e["event"] == "ended"] == [
        "every site's privacy budget is spent: nothing more is trained"
    ]
    for site in SITES:
        of = spending(world, site)
        assert of.epsilon <= 2.0 < of.ledger().epsilon(site, of.privacy, of.spending.bill[site])


def test_a_round_whose_sites_are_all_spent_has_no_uploads_and_the_others_go_on(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 12, "train__cohort": 1})
    for site in ("east", "north"):
        settings(world, site, budget=0.01)
    path, grid = run(world)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    west = [r for d, s, k, r, _ in grid.log if (d, s, k) == ("down", "west", "train")]
    assert max(b - a for a, b in pairwise([-1, *west, 12])) > PATIENCE  # more rounds in a row than may diverge
    assert rows[-1]["round"] == 12
    assert world.trained() == {"east": 0, "north": 0, "west": len(west)}
    told = [e["site"] for e in map(json.loads, (path / "events.jsonl").read_text().splitlines()) if "spent" in str(e)]
    assert sorted(told) == ["east", "north"]  # each is asked once, and the run does not end early


def test_with_a_sampled_cohort_the_training_ends_when_every_site_is_spent(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 40, "train__cohort": 1, "privacy__budget": 0.01})
    path, _ = run(world)
    assert json.loads((path / "summary.json").read_text())["round"] < 40
    told = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [e["site"] for e in told if "spent" in e["detail"]][-1] == ""
    assert sorted(e["site"] for e in told if e["event"] == "refused") == list(SITES)


def test_a_stricter_budget_of_a_site_counts_with_its_own_delta(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "privacy__delta": 0.01, "train__rounds": 4})
    settings(world, "east", budget=3.0)
    path, _ = run(world)
    assert world.trained()["east"] < world.trained()["north"] == 4
    assert spending(world, "east").privacy.delta == 1e-5
    assert spending(world, "east").epsilon <= 3.0
    assert json.loads((path / "summary.json").read_text())["round"] == 4


BARE: dict[str, dict[str, Any]] = {
    "no noise": {"privacy": {"noise": 0.0}, "distill": {"guard": "clients"}},
    "level client": {"privacy": {"level": "client"}, "train": {"aggregate": "mean"}},
    "last stage": {"privacy": {"noise": 0.0}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bare", BARE)
def test_a_site_with_a_budget_answers_nothing_without_noise_of_its_own(tmp_path: Path, bare: str, kind: str) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 1})
    settings(world, "east", budget=50.0)
    run(world)
    note = json.loads(plan_of(world, **BARE[bare]))
    if bare == "last stage":
        note["config"]["method"] = {"name": "fedavg-ft"}
    before = ledger_file(world, "east").read_bytes()
    content = asked(world, "east", kind, json.dumps(note, sort_keys=True))
    assert read_reply(content).error == (
        "it takes part with differential privacy of its samples only (Privacy.level=sample)"
    )
    assert dict(content["numbers"]) == {}
    assert "state" not in content
    assert world.site("east").trained == 1
    assert ledger_file(world, "east").read_bytes() == before


def test_a_site_with_a_budget_sends_no_number_to_a_server_without_noise(tmp_path: Path) -> None:
    set = {**DP, "privacy__noise": 0.0, "train__rounds": 1, "distill__guard": "clients"}
    world = make_world(tmp_path, {"hello_s": 0.5}, **set)
    settings(world, "east", budget=5.0)
    path, grid = run(world)
    events = (path / "events.jsonl").read_text()
    assert "it takes part with differential privacy of its samples only" in events
    assert world.trained() == {"east": 0, "north": 1, "west": 1}
    sent = [content["numbers"] for direction, site, *_, content in grid.log if (direction, site) == ("up", "east")]
    assert sent
    assert not any(map(dict, sent))


def test_rounds_without_noise_make_a_site_s_epsilon_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(tmp_path, **{**DP, "privacy__noise": 0.0, "train__rounds": 1})
    run(world)
    assert "ε" not in capsys.readouterr().err  # it is of no interest to who never asked for privacy
    world.settings = write_server(world.home, **{**DP, "train__rounds": 1})
    settings(world, "east", budget=50.0)
    app._site.cache_clear()
    path, _ = run(world, "another")
    assert world.trained() == {"east": 0, "north": 1, "west": 1}
    assert "train: its privacy budget is spent" in (path / "events.jsonl").read_text()
    assert "ε ∞: images were used in a run without differential privacy" in capsys.readouterr().err
    assert spending(world, "north").epsilon == math.inf
    north = world.site("north")
    assert north.state.notes(north.state.runs()[-1])[0]["loss"] > 0  # infinity in it would make a row unreadable
    site_page(north.settings).write(tmp_path / "page.html")


def test_a_last_stage_without_noise_is_written_down_too(tmp_path: Path) -> None:
    world = make_world(tmp_path, method__name="fedavg-ft", train__rounds=1, train__cohort=0)
    counts: dict[str, int] = {}

    def meddle(site: str, kind: str, round: int, reply: Any) -> Any:
        counts[kind] = steps(world, site) if kind != "hello" else 0
        return reply

    run(world, meddle=meddle)
    assert counts["finish"] == 2 * counts["train"] > 0


def test_a_site_without_privacy_needs_no_library_for_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    world = make_world(tmp_path, train__rounds=1)
    run(world)
    assert sum(world.trained().values()) > 1


def test_at_level_client_the_server_knows_epsilon_and_that_of_a_site_s_uploads_is_infinite(tmp_path: Path) -> None:
    world = make_world(tmp_path, **OF_CLIENTS)
    path, _ = run(world)
    epsilons = json.loads((path / "summary.json").read_text())["privacy"]["epsilon"]["per_client"]
    assert set(epsilons) == set(SITES)
    assert len(set(epsilons.values())) == 1
    assert min(epsilons.values()) > 0
    assert {spending(world, site).epsilon for site in SITES} == {math.inf}
    assert world.trained() == dict.fromkeys(SITES, 2)  # the plan's own promise is another one, and goes on


def test_a_missing_ledger_stops_a_site_that_has_trained(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 1})
    run(world)
    ledger_file(world, "east").unlink()
    with pytest.raises(Damaged, match=r"privacy.json is missing: restore it from a backup"):
        spending(world, "east").check()
    path, _ = run(world, "another")
    assert world.trained()["east"] == 1
    assert "train: bad input at the site, see its log" in (path / "events.jsonl").read_text()


def test_a_missing_ledger_of_runs_without_privacy_is_infinite(tmp_path: Path) -> None:
    """Versions before this one wrote none."""
    world = make_world(tmp_path, **{**DP, "privacy__noise": 0.0, "train__rounds": 1})
    run(world)
    ledger_file(world, "east").unlink()
    assert spending(world, "east").epsilon == math.inf


def odd_statistics(site: str, kind: str, round: int, reply: Message) -> Message:
    """West's variances are those of other images."""
    if (site, kind) == ("west", "train") and "state" in reply.content:
        values(lambda v: v * np.float32(1000), "buffers/bn1.running_var")(reply)
    return reply


def odd_parameters(site: str, kind: str, round: int, reply: Message) -> Message:
    """West's parameters are too far from the broadcast."""
    if (site, kind) == ("west", "train") and "state" in reply.content:
        values(lambda v: v + np.float32(1e6))(reply)
    return reply


@pytest.mark.parametrize(("odd", "used"), [(odd_statistics, 3), (odd_parameters, 2)])
def test_at_level_client_no_upload_decides_about_another(
    odd: Meddle, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one site would move the sum by more than the clip. Sites' statistics are wild under real noise."""
    lanes: list[int] = []
    real = ClientPrivacy.mean

    def seen(self: ClientPrivacy, uploads: State, *rest: Any) -> State:
        lanes.append(uploads.lanes)
        return real(self, uploads, *rest)

    monkeypatch.setattr(ClientPrivacy, "mean", seen)
    limits = {"min_sites": 3, "retries": 2, "quarantine": 1}
    world = make_world(tmp_path, limits, **{**OF_CLIENTS, "privacy__clip": 1.0, "train__rounds": 4})
    path, grid = run(world, meddle=odd)
    assert json.loads((path / "summary.json").read_text())["round"] == 4
    assert (len(lanes), lanes[0]) == (4, used)
    asked = [(s, r) for d, s, k, r, _ in grid.log if (d, k) == ("down", "train")]
    assert sorted(asked) == [(s, r) for s in SITES for r in range(4)]  # each once: no retry, and no quarantine
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert not [e for e in events if "statistics" in e["detail"] or e["event"] in ("quarantined", "short")]


class Killed(BaseException):
    """No handler of the code under test may see it."""


def kill(what: str, round: int) -> Callable[[str, int], None]:
    def step(*at: Any) -> None:
        if at == (what, round):
            raise Killed

    return step


def rounds_paid(path: Path) -> int:
    """The rounds in the ledger of the newest checkpoint; every site has the same, and the summary's ε is of it."""
    newest = max((path / "checkpoints").glob("round-*"))
    spent = Ledger.read(json.loads((newest / "state.json").read_text())["note"]["memory"][SPENT])
    (count,) = {sum(spent.of(site).values()) for site in SITES}
    if (path / "summary.json").exists():
        told = json.loads((path / "summary.json").read_text())["privacy"]["epsilon"]["per_client"]
        assert told == {s: pytest.approx(spent.epsilon(s, Privacy("client", 2.0))) for s in SITES}
    return count


def test_at_level_client_undone_rounds_stay_paid(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**OF_CLIENTS, "train__rounds": 3})
    path, _ = run(world)
    assert rounds_paid(path) == 3
    with pytest.raises(Killed):  # before another checkpoint is written
        run(world, back=1, step=kill("gathered", 1))
    run(world, resume=True)
    assert rounds_paid(path) == 5
    run(world, back=0)
    assert rounds_paid(path) == 8
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[0])
    steps = {Step(3, 1.0, 3, 2.0): 6}
    assert row["round"] == 1
    assert row["epsilon"]["max"] == pytest.approx(epsilon(steps, 1e-5))


def test_a_damaged_checkpoint_forgets_no_round_that_was_sent(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**OF_CLIENTS, "train__rounds": 3})
    with pytest.raises(Killed):
        run(world, step=kill("gathered", 2))
    path = tmp_path / "state/runs/run"
    damage(path / "checkpoints/round-0002/broadcast.safetensors", "one bit")
    run(world, resume=True)
    assert rounds_paid(path) == 4  # round 2 is trained again, from other noise


def test_at_level_client_a_run_goes_on_with_the_ledger_of_the_one_before(tmp_path: Path) -> None:
    world = make_world(tmp_path, **OF_CLIENTS)
    run(world)
    with pytest.raises(Killed):
        run(world, back=1, step=kill("gathered", 1))
    more, _ = run(world, "more", start="run")
    assert rounds_paid(more) == 2 + 2
    again, _ = run(world, "again", start="more")
    assert rounds_paid(again) == 4 + 2


@pytest.mark.parametrize("level", ["none", "sample"])
def test_at_level_client_no_run_goes_on_from_uploads_without_noise(level: str, tmp_path: Path) -> None:
    plain = {**DP, "privacy__noise": 0.0 if level == "none" else 2.0, "train__rounds": 1}
    run(make_world(tmp_path, **plain), "plain")
    app._site.cache_clear()
    world = make_world(tmp_path, **OF_CLIENTS)
    with pytest.raises(InputError, match=r"continue-from: 'plain' was trained without Privacy.level=client"):
        run(world, "more", start="plain")
    assert not (tmp_path / "state/runs/more").exists()


def test_a_damaged_ledger_of_the_server_is_one_line(tmp_path: Path) -> None:
    world = make_world(tmp_path, **OF_CLIENTS)
    with pytest.raises(Killed):
        run(world, step=kill("gathered", 1))
    file = tmp_path / "state/runs/run/flower.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "spent": {"east": 3}}))
    with pytest.raises(InputError, match=r"flower\.json is damaged: spent is not a ledger"):
        run(world, resume=True)


def test_a_damaged_ledger_stops_the_site(tmp_path: Path) -> None:
    world = make_world(tmp_path, **{**DP, "train__rounds": 1})
    run(world)
    file = world.site("east").state.path / FILE
    file.write_text(file.read_text().replace("2.0", "9.0"))
    with pytest.raises(Damaged, match="restore it from a backup"):
        spending(world, "east").check()


@pytest.mark.parametrize(
    ("set", "why"),
    [
        ({"privacy__deterministic": True}, "Privacy.deterministic works in simulations only"),
        ({"privacy__noise": 0.0, "privacy__target": 4.0}, "Privacy.target works in simulations only"),
    ],
)
def test_a_server_refuses_what_only_a_simulation_may_have(tmp_path: Path, set: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        make_world(tmp_path, **{**DP, **set})


def test_a_site_refuses_noise_that_a_server_could_remove(tmp_path: Path) -> None:
    world = make_world(tmp_path, **DP)
    config = world.settings.config
    config = replace(config, privacy=replace(config.privacy, deterministic=True))
    plan = Plan.of(ServerSettings(world.settings.federation, world.settings.rounds, config), "0" * 64)
    with pytest.raises(Refused, match="its noise is not one that a site may add"):
        world.site("east").work(plan.text())
