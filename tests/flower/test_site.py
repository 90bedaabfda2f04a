"""What a site sees of its own model: its log, its notes, its page; and a new site that joins afterwards."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small import tree

from flower.wire import SITES, MemoryGrid, World, make_world, run
from perada.cli import main as cli
from perada.client.interval import wilson
from perada.data.digits import digits
from perada.flower.app import serve
from perada.flower.launch import SiteService, _LogSummary
from perada.flower.personal import known_site, personal_model, site_page
from perada.flower.project import Project
from perada.flower.settings import SiteSettings
from perada.flower.site_data import site_federation
from perada.report.site import confusion, data_uri, examples, labels, over_rounds, spans
from perada.runs.run import load

ROUNDS = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A finished run of three sites."""
    return make_world(tmp_path_factory.mktemp("world"), train__cohort=0, train__rounds=ROUNDS)


@pytest.fixture(scope="module")
def log(world: World) -> str:
    """Returns what the sites wrote to standard error."""
    import contextlib

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run(world)
    for site in SITES:  # as `perada flower site` leaves it
        settings = SiteSettings.read(world.home / site / "site.toml")
        settings.flower.mkdir(parents=True)
        (settings.flower / "site.toml").write_text(settings.toml())
    return said.getvalue()


def site_of(world: World, name: str = "north") -> SiteSettings:
    return known_site(world.home / name, name)


def test_the_log_has_round_loss_and_accuracy_at_the_site(world: World, log: str) -> None:
    mine = [line.removeprefix("site north: ") for line in log.splitlines() if line.startswith("site north: ")]
    trained = [line for line in mine if line.startswith("round ") and "training loss" in line]
    assert [re.match(r"round (\d+) of 3: training loss (\d\.\d{4})$", line)[1] for line in trained] == ["1", "2", "3"]
    scored = [line for line in mine if line.startswith("after round")]
    assert [line.split(":")[0] for line in scored] == [f"after round {r} of 3" for r in (1, 2, 3)]
    value, images, low, high = re.search(
        r"([\d.]+)% of (\d+) own test .*\(95%: ([\d.]+) to ([\d.]+)\)", scored[-1]
    ).groups()
    data = site_federation(site_of(world), world.site("north")._work.popitem()[1].plan, torch.device("cpu"))
    assert int(images) == len(data.clients[0].test)
    ends = wilson(round(float(value) * int(images) / 100), int(images))
    assert (float(low), float(high)) == pytest.approx(ends, abs=0.06)
    assert any(re.match(r"round \d: scored \d candidates", line) for line in mine)


def test_the_service_shows_these_lines_and_not_flowers(world: World) -> None:
    said: list[str] = []
    settings = SiteSettings.read(world.home / "north" / "site.toml")
    show = _LogSummary(SiteService(settings, None, None, None), said.append)  # type: ignore[arg-type]
    for line in (
        "INFO : [RUN 5, ROUND 4]",
        "INFO : Receiving: train message",
        "site north: round 4 of 9: training loss 0.5000",
        "site north: after round 3 of 9: 75.0% of 4 own test images right (95%: 30.1 to 95.4)",
        "site north: before training: n/a (no test images)",
        "site north: something else",
        "site north: error: no data",
        "site north: error: no data",
    ):
        show(line)
    assert said == [
        "round 4 of 9: training loss 0.5000",
        "after round 3 of 9: 75.0% of 4 own test images right (95%: 30.1 to 95.4)",
        "before training: n/a (no test images)",
        "error: no data",
    ]


def test_the_page_says_what_the_model_does_on_the_sites_own_images(world: World, log: str, tmp_path: Path) -> None:
    """Counted again from the model that `flower export` would write."""
    page = site_page(site_of(world))
    page.write(tmp_path / "site.html")
    text = (tmp_path / "site.html").read_text("utf8")
    model = personal_model(site_of(world))
    data = site_federation(site_of(world), world.site("north").work(_plan(world)).plan, torch.device("cpu"))
    test = data.clients[0].test
    with torch.no_grad():
        said = model.module()(data.prepare(data.images[test], torch.float32)).argmax(-1)
    right = int((said == data.targets[test]).sum())
    assert page.own.score == pytest.approx(100 * right / len(test))
    assert page.own.interval == wilson(right, len(test))
    matrix = np.array(page.confusion)
    assert matrix.shape == (10, 10)
    assert matrix.sum() == len(test)
    assert matrix.trace() == right
    assert matrix.sum(1).tolist() == np.bincount(data.targets[test].numpy(), minlength=10).tolist()
    assert f"{page.own.score:.2f}" in text
    assert "{:.1f} to {:.1f}".format(*page.own.interval) in text
    assert page.trained == page.newest == ROUNDS
    assert f"<b>{ROUNDS}</b><span>of {ROUNDS} planned" in text
    assert text.count("<img ") == len(page.examples) == min(12, len(test))
    assert page.shared is not None


def _plan(world: World) -> str:
    state = world.site("north").state
    return state.load_broadcast(state.runs()[-1])[0]


def test_the_page_is_one_file_that_asks_for_nothing(world: World, log: str, tmp_path: Path) -> None:
    site_page(site_of(world)).write(tmp_path / "site.html")
    text = (tmp_path / "site.html").read_text("utf8")
    outside = [
        u for u in re.findall(r"""(?:src|href)=["']([^"']*)""", text) if not u.startswith("data:image/png;base64,")
    ]
    assert outside == []
    assert not re.search(r"https?:|url\(|@import|<script .|<link", text)
    assert "default-src 'none'" in text


def test_its_images_are_the_sites(world: World, log: str) -> None:
    page, (work,) = site_page(site_of(world)), [world.site("north").work(_plan(world))]
    images = work.federation.images[work.federation.clients[0].test]
    for one in page.examples:
        png = base64.b64decode(one.image.partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), images[one.number][0].numpy())


def test_the_command_needs_no_server_and_keeps_the_page_private(
    world: World, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: object) -> None:
        raise AssertionError("it opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    out = tmp_path / "page.html"
    words = ["flower", "report", "--name", "north", "--dir", str(world.home / "north"), "--out", str(out)]
    assert cli.main(words) == 0
    assert "keep it there" in capsys.readouterr().out
    assert out.stat().st_mode & 0o077 == 0
    assert cli.main([*words, "--run", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown run 'nothing'")


def test_notes_follow_a_run_that_goes_back(world: World, log: str) -> None:
    state = world.site("west").state
    run_id = "back-1"
    for row in ({"round": 1, "loss": 3.0}, {"round": 2, "loss": 2.0}, {"round": 3, "loss": 1.0}):
        state.note(run_id, {**row, "undone": ""})
    assert [r["loss"] for r in state.notes(run_id)] == [3.0, 2.0, 1.0]
    (state.path / run_id / "plan.json").write_text(json.dumps({"undone": "1"}))
    assert [r["loss"] for r in state.notes(run_id)] == [3.0]
    state.note(run_id, {"round": 2, "loss": 1.5, "undone": "1"})
    with (state.path / run_id / "notes.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')  # a kill
    assert [r["loss"] for r in state.notes(run_id)] == [3.0, 1.5]
    assert state.notes("never") == []
    damaged = (
        '{"round": 3, "loss": "x"}',
        '{"round": 3, "loss": NaN}',
        '{"round": 1e999}',
        '{"round": 3, "undone": 5}',
    )
    with (state.path / run_id / "notes.jsonl").open("a") as file:
        file.write("\n".join(["", *damaged, ""]))
    assert [r["loss"] for r in state.notes(run_id)] == [3.0, 1.5], "what cannot have been written is left out"


def test_nothing_of_the_notes_is_sent(tmp_path: Path) -> None:
    """The score in the note has all its digits; the one that is sent is rounded."""
    world = make_world(tmp_path, train__cohort=0, train__rounds=1)
    text = (tmp_path / "north" / "site.toml").read_text()
    (tmp_path / "north" / "site.toml").write_text(text.replace("score_digits = 15", "score_digits = 0"))
    _, grid = run(world)
    state = world.site("north").state
    (note,) = [r for r in state.notes(state.runs()[-1]) if r.get("local_test") is not None]
    sent = [
        c["numbers"]["local_test"]
        for d, s, _, _, c in grid.log
        if d == "up" and s == "north" and "local_test" in c.get("numbers", {})
    ]
    assert sent == [float(round(note["local_test"]))]


# A site that joins


@pytest.fixture(scope="module")
def collected(world: World, log: str) -> Path:
    Project.open(world.home).collect(None, world.home / "collected")
    return world.home / "collected"


@pytest.fixture
def south(world: World, tmp_path: Path) -> Path:
    """The folder of a site that was not there."""
    data = digits()
    at = np.flatnonzero(np.isin(data.targets, [2, 4, 7]))[:50]
    np.savez(tmp_path / "data.npz", images=data.images[at, 0], labels=data.targets[at], classes=np.array(data.classes))
    (tmp_path / "site.toml").write_text(
        '[site]\nfederation = "digits"\nname = "south"\ndata = "data.npz"\ndevice = "cpu"\n'
    )
    return tmp_path


def test_a_new_site_joins_with_what_was_collected(
    world: World, collected: Path, south: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {site: tree(world.home / site / "state") for site in SITES} | {"server": tree(collected)}
    assert cli.main(["flower", "join", str(collected), "--dir", str(south), "--rounds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["client"] == "south"
    assert told["rounds"] == 2
    assert {kind for kind in ("personal", "standalone", "global") if told[kind]["score"] is not None} == {
        "personal",
        "standalone",
        "global",
    }
    assert before == {site: tree(world.home / site / "state") for site in SITES} | {"server": tree(collected)}
    made = Path(told["run"])
    assert made == south / "state" / "joined" / "collected-south"
    assert not [p for p in made.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    again = load(made)
    sent = load(collected).folder.load()[0].broadcast
    assert all(torch.equal(again.experiment.now.broadcast.params[n], t) for n, t in sent.params.items())
    assert again.evaluate("local")["local_test"].per_client == {"south": told["personal"]["score"]}
    assert cli.main(["report", str(made), "--out", str(south / "page.html")]) == 0


def test_joining_is_refused_in_one_line(
    world: World, collected: Path, south: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert cli.main([*words]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        return error

    here = ["--dir", str(south)]
    assert "'north' is a client of" in refused("flower", "join", str(collected), *here, "--name", "north")
    assert "use `perada flower join`" in refused(
        "join", str(collected), "--data", str(south / "data.npz"), "--name", "x"
    )
    site = south / "site.toml"
    site.write_text(site.read_text().replace('"digits"', '"others"'))
    assert "is of federation 'digits'" in refused("flower", "join", str(collected), *here)
    site.write_text(site.read_text().replace('"others"', '"digits"') + 'methods = ["ditto"]\n')
    assert "does not allow the method" in refused("flower", "join", str(collected), *here)


def test_a_backbone_that_is_a_file_comes_with_the_collected_run(tmp_path: Path, south: Path) -> None:
    from perada.models import backbone

    made = backbone("resnet8", 10, 3)
    from safetensors.torch import save_file

    home = tmp_path / "world"
    home.mkdir()
    save_file({n: t.contiguous() for n, t in made.net.state_dict().items()}, home / "mine.safetensors")
    world = make_world(home, train__cohort=0, train__rounds=1, model__weights="mine.safetensors")
    serve(MemoryGrid(world), world.settings, "run")
    Project.open(home).collect(None, home / "collected")
    (home / "mine.safetensors").unlink()  # it is not at the new site
    words = [
        "flower",
        "join",
        str(home / "collected"),
        "--dir",
        str(south),
        "--rounds",
        "1",
        "--out",
        str(home / "new"),
    ]
    assert cli.main(words) == 0
    assert load(home / "new").model("south") is not None
    assert os.path.lexists(home / "new" / "backbone.safetensors")


# The pieces of the page


def test_confusion_by_hand() -> None:
    found = confusion(np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 0, 2]), 3)
    assert found.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_rounds_in_words() -> None:
    assert [spans(r) for r in ([], [3], [2, 4, 5, 6], [1, 2, 8, 9, 12])] == ["", "3", "2, 4 to 6", "1 to 2, 8 to 9, 12"]


def test_labels_by_hand() -> None:
    truth = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    shares = np.array([[0.9, 0.6], [0.2, 0.1], [0.7, 0.4]])
    one, two = labels(("a", "b"), truth, shares, [0.5, None], [0.1, 0.5])
    assert (one.auc, one.positive, one.found, one.wrong, one.least) == (50.0, 2, 2, 1, 0.1)
    assert (two.auc, two.positive, two.found, two.wrong) == (None, 0, 0, 1)


def test_a_label_that_is_not_known_is_neither_right_nor_wrong() -> None:
    truth = np.array([[1.0], [np.nan], [0.0], [np.nan]])
    (one,) = labels(("a",), truth, np.array([[0.9], [0.8], [0.7], [0.1]]), [None], [0.5])
    assert (one.positive, one.found, one.wrong) == (1, 1, 1)


def test_examples_show_the_surest_mistakes_first() -> None:
    truth = np.array([0, 1, 1, 0])
    shares = np.array([[0.6, 0.4], [0.7, 0.3], [0.9, 0.1], [0.8, 0.2]])
    found = examples(np.zeros((4, 1, 2, 2), np.uint8), truth, shares, ("a", "b"))
    assert [(e.number, e.right) for e in found] == [(2, False), (1, False), (0, True), (3, True)]
    assert [e.probability for e in found] == [0.9, 0.7, 0.6, 0.8]


def test_rounds_without_the_site_are_a_gap() -> None:
    """Scored in rounds 2, 4, 10 and 12 of a run that is evaluated every second round."""
    notes = [{"round": r, "local_test": 50.0 + r, "local_val": None} for r in (2, 4, 10, 12)]
    (figure,) = over_rounds(notes, "accuracy", every=2)
    assert figure.drawing.count("<polyline") == 2
    assert figure.drawing.count("<circle") == 4
    assert over_rounds([], "accuracy") == []
    losses, _ = over_rounds([*notes, {"round": 3, "loss": 0.5}, {"round": 5, "loss": 0.4}], "accuracy", every=8)
    assert losses.drawing.count("<polyline") == 2


def test_a_colour_image_keeps_its_colours() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    png = base64.b64decode(data_uri(pixels).partition(",")[2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), pixels.transpose(1, 2, 0))
