"""Every mean and every byte says over whom: three sites, one of them away for rounds 4 to 10."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from flower.wire import MemoryGrid, make_world
from perada.cli import tables
from perada.cli.console import out
from perada.flower import guards
from perada.flower.app import serve
from perada.report.facts import gather_facts
from perada.runs.run import load

AWAY = range(4, 11)  # north sends nothing in these rounds
ROUNDS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    home = tmp_path_factory.mktemp("world")
    world = make_world(home, {"deadline_s": 0.5}, train__cohort=0, train__rounds=ROUNDS, method__name="perada-no-kd")
    grid = MemoryGrid(world)

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", AWAY[0] - 2):
            del grid.nodes[2]
        if (what, round) == ("saved", AWAY[-1] - 1):
            grid.nodes[2] = "north"

    return serve(grid, world.settings, "run", step=step)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_rows_say_who_is_in_no_mean(path: Path) -> None:
    """The scores of a round ride in the messages of the next one: those of round 3 are asked for in round 4."""
    rows = rows_of(path)
    assert [r["round"] for r in rows if r["local_test"].get("missing") == ["north"]] == [r - 1 for r in AWAY]
    assert [r["round"] for r in rows if r.get("absent") == ["north"]] == list(AWAY)
    for row in rows:
        scores = [v for v in row["local_test"]["per_client"].values() if v is not None]
        assert row["local_test"]["mean"] == pytest.approx(sum(scores) / len(scores))
        assert len(scores) == 3 - len(row["local_test"].get("missing", ()))


def test_bytes_per_client_are_divided_by_the_uploads_that_came(path: Path) -> None:
    row = rows_of(path)[-1]
    assert row["took_part"] == 3 * ROUNDS - len(AWAY)
    (facts,) = gather_facts([load(path)])
    sizes = load(path).summary["parameters"]
    assert facts.upload == 4 * (sizes["communicated"] + sizes["communicated_buffers"]), "one upload is of this size"


def test_the_page_marks_them(path: Path) -> None:
    page = (path / "report.html").read_text("utf8")
    assert "rounds 3 to 9: 2 of 3 clients, without north" in page
    assert page.count('class="hollow k0"') == len(AWAY), "in the figure of Local-test"
    first = page.partition("<figcaption><strong>Local-test")[2].partition("</figure>")[0]
    assert first.count("<polyline") == 3, "no line goes from a mean over three to a mean over two"
    assert f"(over {3 * ROUNDS - len(AWAY)} uploads of {3 * ROUNDS} planned)" in page
    assert "Nothing came from north (in 7) of 12 evaluated rounds." in page


def test_the_table_says_it_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with out.capture() as shown:
        out.print(tables.results([load(path)]))
    assert f"({3 * ROUNDS - len(AWAY)} of {3 * ROUNDS} uploads)" in " ".join(shown.get().split())


def test_a_mean_at_the_end_that_is_not_over_all_has_a_star(tmp_path: Path) -> None:
    """North leaves before the last round and stays away."""
    world = make_world(tmp_path, {"deadline_s": 0.5}, train__cohort=0, train__rounds=2, method__name="fedavg")
    grid = MemoryGrid(world)

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            del grid.nodes[2]

    run = load(serve(grid, world.settings, "run", step=step))
    with out.capture() as shown:
        out.print(tables.results([run]))
    text = " ".join(shown.get().split())
    local = run.summary["local_test"]
    assert f"{local['mean']:.2f}±{local['std']:.2f}*" in text
    assert "* Local-test: a mean over 2 of 3 clients, without north." in text
    page = (run.path / "report.html").read_text("utf8")
    assert re.search(r"± [\d.]+</small> <small class=\"flag\">2 of 3</small></td>", page)


def test_events_name_the_site_that_is_away(path: Path) -> None:
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [(e["site"], e["event"]) for e in events if e["site"] == "north"] == [
        ("north", "here"),
        ("north", "gone"),
        ("north", "here"),
    ]


def test_the_server_names_a_site_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {name: ec.generate_private_key(ec.SECP384R1()).public_key() for name in ("north", "west")}
    for name, key in keys.items():
        (tmp_path / f"{name}.pub").write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    (tmp_path / "broken.pub").write_bytes(b"not a key")
    monkeypatch.setenv("PERADA_FLOWER_KEYS", str(tmp_path))

    def headers(name: str) -> list[tuple[bytes, bytes]]:
        pem = keys[name].public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return [(b"flwr-public-key", b64encode(pem))]

    assert guards._site({"type": "http", "headers": headers("north")}) == "site north"
    (tmp_path / "north.pub").unlink()
    assert guards._site({"type": "http", "headers": headers("north")}) == "a site"
    assert guards._site({"type": "http", "headers": []}) == "a site"
