"""Other kinds of data and arithmetic over the wire: folders, several labels, float64, a public test set."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flower.test_faults import events, without_clock
from flower.test_parity import assert_same, simulated
from flower.wire import SITES, MemoryGrid, World, make_world, run, write_server
from perada.cli import main as cli
from perada.client.scores import personal_thresholds
from perada.data.named import DataOptions
from perada.data.one_site import one_site
from perada.errors import InputError
from perada.flower import app
from perada.flower.personal import personal_model
from perada.flower.settings import Plan, ServerSettings
from perada.flower.site_data import site_federation
from perada.models.resnet import resnet


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_float64_is_carried_as_it_is(tmp_path: Path) -> None:
    world = make_world(tmp_path, run__precision="fp64", train__rounds=2)
    path, grid = run(world)
    assert_same(world, path, simulated(world))
    sent = {a.dtype for d, _, k, _, c in grid.log if "state" in c for a in c["state"].values()}
    assert sent == {"float64"}


def test_folders_of_images_without_a_declared_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each site has class/image.png; the simulator site/class/image.png. North has never seen a cat, and names in its
    own log the file that it skips."""
    world = make_world(tmp_path, train__rounds=2, data__size=12, data__fit="pad", distill__steps=0)
    rng = np.random.default_rng(0)
    for site, classes in (("east", ("cat", "dog")), ("north", ("ant", "dog")), ("west", ("ant", "cat", "dog"))):
        for kind in classes:
            for folder in (tmp_path / site / "images" / kind, tmp_path / "all" / site / kind):
                folder.mkdir(parents=True)
            for i in range(9):
                image = Image.fromarray(rng.integers(0, 255, (14, 18, 3), np.uint8))
                image.save(tmp_path / site / "images" / kind / f"{i}.png")
                image.save(tmp_path / "all" / site / kind / f"{i}.png")
        edit(tmp_path / site / "site.toml", ('"data.npz"', '"images"'))
    (bad := tmp_path / "north" / "images" / "ant" / "cut.png").write_bytes(b"")
    edit(tmp_path / "north" / "site.toml", ('"images"', '"images"\nskip_bad = true'))
    edit(tmp_path / "server.toml", ("channels = 1", "channels = 3"), (_digits(), '["ant", "cat", "dog"]'))
    world.settings = ServerSettings.read(tmp_path / "server.toml")
    path, _ = run(world)
    said = capfd.readouterr().err
    assert f"site north: cannot read {bad}: skipped" in said
    assert "at the sides" not in said, "the sites were told to pad"
    config = world.simulated
    world = _Joined(world.home, world.settings, str(tmp_path / "all"))
    assert world.simulated != config
    assert_same(world, path, simulated(world))


def _digits() -> str:
    return json.dumps([str(d) for d in range(10)])


class _Joined(World):
    def __init__(self, home: Path, settings: ServerSettings, root: str) -> None:
        super().__init__(home, settings)
        self.root = root

    @property
    def simulated(self) -> Any:
        return replace(self.settings.config, data=replace(self.settings.config.data, root=self.root))


@pytest.fixture
def labelled(tmp_path: Path) -> World:
    """Three sites with two labels per image: is the digit odd, and is it above 4."""
    world = make_world(tmp_path, train__rounds=2, data__meta_min=1000)
    for site in SITES:
        held = dict(np.load(tmp_path / site / "data.npz"))
        labels = np.stack([held["labels"] % 2, held["labels"] > 4], 1)
        if site == "west":  # its columns stand in another order
            labels = labels[:, ::-1]
        names = ["big", "odd"] if site == "west" else ["odd", "big"]
        np.savez(tmp_path / site / "data.npz", images=held["images"], labels=labels, classes=np.array(names))
    held = dict(np.load(tmp_path / "all.npz"))
    labels = np.stack([held["labels"] % 2, held["labels"] > 4], 1)
    np.savez(tmp_path / "all.npz", **{**held, "labels": labels, "classes": np.array(["odd", "big"])})
    edit(tmp_path / "server.toml", (_digits(), '["odd", "big"]'), ("channels = 1", "channels = 1\nmultilabel = true"))
    world.settings = ServerSettings.read(tmp_path / "server.toml")
    return world


def test_several_labels_an_image(labelled: World, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = run(labelled)
    alone = simulated(labelled)
    assert_same(labelled, path, alone)
    assert json.loads((path / "summary.json").read_text())["metric"] == "auc"
    wanted = personal_thresholds(alone.model, alone.personal(), alone.federation)
    app._site.cache_clear()
    for name in SITES:  # as in the simulation, from the site's own validation data
        settings, lines = labelled.site(name).settings, list[str]()
        found = personal_model(settings, say=lines.append)
        assert found.notes()["thresholds"] == pytest.approx({n: t or 0.5 for n, t in wanted[name].items()}, rel=1e-4)
        data = labelled.home / name / "data.npz"
        data.rename(data.with_suffix(".away"))
        assert personal_model(settings, say=lines.append).thresholds == found.thresholds, "kept"
        assert not lines
        (kept,) = (labelled.home / name).rglob("thresholds.json")
        kept.unlink()
        assert personal_model(settings, say=lines.append).own_thresholds == {"odd": 0.5, "big": 0.5}
        assert lines == [line for line in lines if "all thresholds are 0.5, because its data cannot be read" in line]
        assert len(lines) == 1
        data.with_suffix(".away").rename(data)
    kept.write_text("{}")
    with pytest.raises(InputError, match=r"thresholds.json is damaged: delete it"):
        personal_model(settings)
    assert any(value not in (None, 0.5) for one in wanted.values() for value in one.values())


@pytest.mark.parametrize("column", ["blank", "missing"])
def test_a_site_that_knows_nothing_of_a_label(column: str, labelled: World, capfd: pytest.CaptureFixture[str]) -> None:
    """Its manifest has no such column, or nothing in it. The label is masked there, and the site says so."""
    home = labelled.home / "west"
    held = dict(np.load(home / "data.npz"))
    rows = ["path,note,big,odd" if column == "blank" else "path,note,big"]
    for i, (image, labels) in enumerate(zip(held["images"], held["labels"], strict=True)):
        Image.fromarray(image).save(home / f"{i}.png")
        rows.append(f"{i}.png,seen,{labels[0]:d}" + "," * (column == "blank"))
    (home / "scans.csv").write_text("\n".join(rows) + "\n")
    edit(home / "site.toml", ("data.npz", "scans.csv"))
    app._site.cache_clear()
    path, _ = run(labelled)
    row = without_clock(path)[-1]
    assert row["local_test"]["per_client"]["west"] is not None
    assert "scans.csv: odd: not known for any image, so it is not trained here" in capfd.readouterr().err
    thresholds = personal_model(labelled.site("west").settings).own_thresholds
    assert thresholds["odd"] == 0.5


def test_a_site_that_knows_no_label_is_refused(labelled: World) -> None:
    like = site_federation(labelled.site("east").settings, Plan.of(labelled.settings, ""), torch.device("cpu"))
    table = labelled.home / "none.csv"
    Image.new("L", (8, 8)).save(labelled.home / "0.png")
    for text in ("path,odd,big\n0.png,,\n", "path,other\n0.png,1\n"):
        table.write_text(text)
        options = DataOptions(name="folder", root=str(table), size=8, partition="site")
        with pytest.raises(InputError, match=r"none of the federation's labels \(odd, big\) is known"):
            one_site(options, "new", like, torch.device("cpu"))


def test_a_public_test_set_at_the_server_and_at_a_site(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__rounds=1)
    path, _ = run(world)
    row = without_clock(path)[-1]
    assert row["global_model"] is None
    assert row["global_test"] == {"mean": None, "std": None, "per_client": dict.fromkeys(SITES)}
    edit(tmp_path / "server.toml", ("channels = 1", 'channels = 1\ntest = "all.npz"'))
    edit(tmp_path / "west" / "site.toml", ("device", 'test = "../all.npz"\ndevice'))
    world.settings = ServerSettings.read(tmp_path / "server.toml")
    app._site.cache_clear()
    path, _ = run(world, "tested")
    row = without_clock(path)[-1]
    assert 0 < row["global_model"]["global_test"] < 100
    found = row["global_test"]["per_client"]
    assert found["west"] > 0
    assert (found["east"], found["north"]) == (None, None)


def test_a_site_with_one_training_image_takes_no_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own log says why; untrained, it would only pull the others back."""
    world = make_world(tmp_path, {"hello_s": 0.2}, train__rounds=1)
    held = dict(np.load(tmp_path / "north" / "data.npz"))
    np.savez(tmp_path / "north" / "data.npz", **{k: v if k == "classes" else v[:1] for k, v in held.items()})
    path, grid = run(world)
    assert "site north: error: each site needs 2 training images, but north has 1" in capfd.readouterr().err
    refused = [e["detail"] for e in events(path) if e["event"] == "refused"]
    assert refused == ["node 2: north: bad input at the site, see its log"]
    assert {s for _, s, k, _, _ in grid.log if k == "train"} == {"east", "west"}


def test_a_site_says_what_it_takes_part_in(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"hello_s": 0.2}, train__rounds=1, method__name="mtl")
    edit(tmp_path / "west" / "site.toml", ("device", 'methods = ["perada", "ditto"]\ndevice'))
    path, grid = run(world)
    assert [e["detail"] for e in events(path) if e["event"] == "refused"] == [
        "node 3: west: it does not take part in method 'mtl'"
    ]
    assert "west" not in {s for _, s, k, _, _ in grid.log if k == "train"}


def test_the_run_folder_is_one_that_perada_reports_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path, train__rounds=1)
    path, _ = run(world)
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "north" in page
    assert "Traceback" not in page
    assert cli.main(["evaluate", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert "are at its sites" in said


def test_a_newcomer_gets_the_weights_beside_a_round(tmp_path: Path) -> None:
    """West is not there at first: the others' round does not wait while it is sent the backbone."""
    world = make_world(tmp_path)
    net = resnet("resnet8", 10, seed=5)
    save_file({k: v for k, v in net.state_dict().items() if "num_batches" not in k}, tmp_path / "mine.safetensors")
    limits = {"hello_s": 0.2}
    world.settings = write_server(tmp_path, limits, model__weights="mine.safetensors", train__cohort=0, train__rounds=4)
    grid = MemoryGrid(world)
    del grid.nodes[3]

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            grid.nodes[3] = "west"

    path = app.serve(grid, world.settings, "run", step=step)
    assert [(k, r) for d, s, k, r, _ in grid.log if (d, s) == ("down", "west")][:3] == [
        ("hello", 1),
        ("weights", 1),
        ("train", 2),
    ]
    assert [row.get("absent") for row in without_clock(path)] == [["west"], ["west"], None, None]


def test_a_site_that_lost_its_disk_is_sent_the_weights_again(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    net = resnet("resnet8", 10, seed=5)
    save_file({k: v for k, v in net.state_dict().items() if "num_batches" not in k}, tmp_path / "mine.safetensors")
    world.settings = write_server(tmp_path, model__weights="mine.safetensors", train__cohort=0, train__rounds=4)

    def step(what: str, round: int) -> None:
        if (what, round) == ("saved", 0):
            shutil.rmtree(tmp_path / "west" / "state")
            app._site.cache_clear()

    path = app.serve(MemoryGrid(world), world.settings, "run", step=step)
    refused = [(e["round"], e["site"], e["detail"]) for e in events(path) if e["event"] == "refused"]
    assert refused == [(1, "west", "train: it needs the weights again")]
    assert [row.get("absent") for row in without_clock(path)] == [None, ["west"], ["west"], None]


def test_two_machines_with_one_name_and_no_keys(tmp_path: Path) -> None:
    """The newest is believed, and they do not take turns."""
    world = make_world(tmp_path, train__rounds=3, train__cohort=0)
    grid = MemoryGrid(world)
    grid.nodes[4] = "west"
    path = app.serve(grid, world.settings, "run")
    assert [e["detail"] for e in events(path) if e["site"] == "west"] == ["node 3", "node 4"]
    assert world.trained() == dict.fromkeys(SITES, 3)
