"""Other kinds of data and arithmetic over the wire: folders, several labels, float64, a public test set."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from flower.test_faults import events, without_clock
from flower.test_parity import assert_same, simulated
from flower.wire import SITES, MemoryGrid, World, make_world, run, write_server
from perada.cli import main as cli
from perada.flower import app
from perada.flower.settings import ServerSettings
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


def test_several_labels_an_image(tmp_path: Path) -> None:
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
    path, _ = run(world)
    assert_same(world, path, simulated(world))
    assert json.loads((path / "summary.json").read_text())["metric"] == "auc"


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
