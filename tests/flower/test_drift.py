"""Noticing drift at a site: as in a simulation, and nothing of it is in a message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from PIL import Image

from flower.test_parity import simulated
from flower.wire import SITES, MemoryGrid, make_world, run, write_server
from perada.cli import flower as commands
from perada.cli import main as cli
from perada.data import build_federation
from perada.errors import Damaged, InputError
from perada.flower import app
from perada.flower.personal import personal_predictor
from perada.predict.calibrate import calibrations
from perada.predict.drift import uniform_prior


def test_a_site_is_calibrated_as_in_a_simulation(tmp_path: Path) -> None:
    world = make_world(tmp_path, train__cohort=3, distill__steps=0)
    run(world)
    sim = simulated(world)
    data = build_federation(world.simulated.data)
    everyone = uniform_prior(len(data.classes))
    wanted = calibrations(sim.model, *sim.both_models(), data, world.settings.config.drift, everyone)
    app._site.cache_clear()
    for name in SITES:
        found = personal_predictor(world.site(name).settings)
        assert found.calibration.own == pytest.approx(wanted[name].own)
        assert (found.calibration.mix, found.calibration.images) == (wanted[name].mix, wanted[name].images)
        assert found.calibration.mean == pytest.approx(wanted[name].mean, abs=1e-5)
        images = data.images[:5]
        lanes = sim.now.kept.map(lambda t, m=SITES.index(name): t[m : m + 1])
        seen = sim.model.plain(lanes)(data.prepare(images, torch.float32))
        assert torch.allclose(found.logits(images)[0], seen, atol=1e-5)


def words_of(grid: MemoryGrid) -> list[object]:
    """Everything that crossed the wire, less the run's id and what differs from run to run."""
    content = []
    for direction, site, kind, round, record in grid.log:
        parts = {}
        for name, part in record.items():
            if isinstance(part, ArrayRecord):
                parts[name] = {n: (a.shape, a.numpy().tobytes()) for n, a in part.items()}
            else:
                parts[name] = {k: v for k, v in part.items() if k not in ("run", "within")}
        content.append((direction, site, kind, round, parts))
    return content


def test_messages_are_the_same_whether_or_not_a_site_notices_drift(tmp_path: Path) -> None:
    """Every site calibrates itself after each of its trainings, in the one run, and never in the other."""
    noticed = make_world(tmp_path / "noticed")
    made = []

    def notice(site: str, kind: str, round: int, reply: Message) -> Message:
        if kind == "train":
            made.append(personal_predictor(noticed.site(site).settings).calibration)
        return reply

    path, grid = run(noticed, meddle=notice)
    _, usual = run(make_world(tmp_path / "usual"))
    assert len(made) > 3
    assert len({by.mean for by in made}) > 3  # it follows the models
    assert words_of(grid) == words_of(usual)
    crossed = json.dumps([str(c) for *_, record in grid.log for k, c in RecordDict(record).items() if k != "state"])
    for by in made:
        for number in (by.mean, by.deviation, *by.own):
            assert str(number) not in crossed
    assert not list(path.rglob("drift.json"))  # at the server


def test_a_site_predicts_and_checks_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(tmp_path, train__rounds=1)
    run(world)
    app._site.cache_clear()
    settings = world.site("west").settings
    monkeypatch.setattr(commands, "known_site", lambda folder, site: settings)
    files = []
    for k in range(4):
        pixels = np.random.default_rng(k).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
        files.append(str(tmp_path / f"{k}.png"))
    capsys.readouterr()
    assert cli.main(["flower", "predict", *files, "--drift", "--json"]) == 0
    first = capsys.readouterr().out
    assert all(row["client"] == "west" and "home_share" in row for row in json.loads(first))
    (state,) = Path(settings.state).rglob("drift.json")
    Path(settings.data).rename(tmp_path / "gone.npz")  # from now on the site needs its data no more
    assert cli.main(["flower", "predict", *files, "--drift", "--json"]) == 0
    assert capsys.readouterr().out == first
    code = cli.main(["flower", "drift", *files, "--set", "drift.threshold=0.001", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (3 if found["z"] > 0.001 else 0)
    for prior in ("shared", "public"):
        assert cli.main(["flower", "predict", *files, "--drift", "--set", f"drift.prior={prior}"]) == 2
        assert f"drift.prior={prior} works in simulations only" in capsys.readouterr().err
    state.write_text(state.read_text().replace('"mean"', '"mend"'))
    with pytest.raises(Damaged, match="delete it"):
        personal_predictor(settings)


def test_a_server_may_not_ask_for_label_counts(tmp_path: Path) -> None:
    make_world(tmp_path)
    for prior in ("shared", "public"):
        with pytest.raises(InputError, match=f"Drift.prior={prior} works in simulations only"):
            write_server(tmp_path, drift__prior=prior)
