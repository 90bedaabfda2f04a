"""Methods of other packages: found by place and by entry point, with uploads of their own."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import train
from helpers import assert_close_norm, assert_same_tensors
from methods.tiny import RUN, federation, network, simulation
from other_methods import FedNova, Liar
from small import SMALL, adapters, everything, experiment, small

import perada
from perada.cli import main as cli
from perada.config import build
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State, gather, mean, on_cpu, part
from perada.methods import Method, check_upload, declared_upload, make_method, method_sizes
from perada.runs.folder import RunFolder

PLACE = "other_methods:FedNova"


def tiny(method: Method, **set: Any) -> Experiment:
    return experiment(network(), federation(), small(**{**RUN, **set, "method__name": "fedavg"}), method)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name `fednova`, which an installed package declares for the module that these tests import."""
    home = tmp_path / "site-packages" / "other-1.0.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (home / "entry_points.txt").write_text(f"[perada.methods]\nfednova = {PLACE}\n")
    monkeypatch.syspath_prepend(str(home.parent))
    return "fednova"


def test_a_method_of_another_package_is_found_by_place_and_by_entry_point(installed: str) -> None:
    for name in (PLACE, installed):
        assert make_method(name, {"server_lr": 0.5}) == FedNova(server_lr=0.5)
        sizes = method_sizes(name, "resnet8", 10)
        assert sizes["communicated"] == method_sizes("fedavg", "resnet8", 10)["communicated"] + 1  # the step count
    assert "other_methods" in sys.modules


def test_it_trains_by_both_names_alike_and_as_the_object(tmp_path: Path, installed: str) -> None:
    for name, out in ((PLACE, "place"), (installed, "point")):
        assert train(tmp_path / out, "--method", name, "--set", "method.server_lr=0.8") == 0
    assert adapters(tmp_path / "place") == adapters(tmp_path / "point")
    config = small(train__rounds=2)
    built = build(small(method__name="fedavg"))
    experiment(built.net, built.federation, config, FedNova(0.8)).run(tmp_path / "object")
    assert adapters(tmp_path / "object") == adapters(tmp_path / "place")
    opened = perada.load(tmp_path / "point")
    assert opened.experiment.method == FedNova(0.8)
    summary = json.loads((tmp_path / "place" / "summary.json").read_text())
    assert summary["method"] == PLACE


def test_it_is_compared_with_ours(tmp_path: Path, installed: str) -> None:
    settings = {**SMALL, "train.rounds": 1}
    found = perada.compare(
        "digits", methods=["fedavg", installed], set=settings, out=tmp_path / "both", baseline=False
    ).table()
    assert [row["name"] for row in found] == ["fedavg", installed]
    assert found[1]["communicated"] == found[0]["communicated"] + 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fednov", "did you mean 'fednova'"),
        ("no_such_module:Method", "no module 'no_such_module'"),
        ("other_methods:Missing", "has no 'Missing'"),
        ("other_methods:not_a_method", "lacks a part of perada.methods.Method"),
        ("other_methods.FedNova", "unknown method"),
    ],
)
def test_what_is_not_a_method_is_one_line(
    name: str, says: str, installed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "digits", "--method", name, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# What it uploads.


def test_step_counts_travel_beside_the_model() -> None:
    """Two rounds of normalised averaging, each from the uploads."""
    sim = tiny(FedNova(0.9))
    for round in range(2):
        w, cohort = sim.now.broadcast, sim.sampled(round)
        sent, _ = sim.method.client_update(sim.trainer(cohort), w, gather(sim.now.kept, cohort))
        steps = part(sent, "nova").params["steps"].flatten()
        sim.round()
        for n, p in w.params.items():
            rates = [(sent.params[n][k] - p[0]) / int(s) for k, s in enumerate(steps)]
            wanted = p[0] + 0.9 * float(steps.double().mean()) * torch.stack(rates).mean(0)
            assert_close_norm(sim.now.broadcast.params[n][0], wanted, 1e-9, n)
    assert len(set(steps.tolist())) > 1
    assert sim.now.kept.params["taken"].dtype == torch.int64
    up = 2 * 2 * (w.bytes_per_lane() + 8)  # two clients, two rounds, and one count of eight bytes each
    assert sim.now.counters["bytes_up"] == up
    assert sim.now.counters["bytes_down"] == 2 * 2 * w.bytes_per_lane()


def test_equal_step_counts_make_it_fedavg() -> None:
    sizes = [8] * 4
    even = dataclasses.replace(
        federation(),
        clients=tuple(
            dataclasses.replace(c, train=c.train[:5].repeat(2)[:n])
            for c, n in zip(federation().clients, sizes, strict=True)
        ),
    )
    config = small(**{**RUN, "method__name": "fedavg"})
    found, wanted = (experiment(network(), even, config, m) for m in (FedNova(), None))
    for sim in (found, wanted):
        sim.round()
    for n, t in wanted.now.broadcast.params.items():
        assert_close_norm(found.now.broadcast.params[n], t, 1e-12, n)
    uneven, plain = tiny(FedNova()), simulation("fedavg")
    uneven.round()
    plain.round()
    name = "conv1.weight"
    assert float((uneven.now.broadcast.params[name] - plain.now.broadcast.params[name]).norm()) > 1e-4


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("more", r"Liar uploads what it does not declare: nova/loss"),
        ("fewer", r"Liar declares an upload that lacks: nova/steps"),
        ("shape", r"Liar uploads nova/steps as \[2\], declared \[1\]"),
        ("type", r"Liar uploads nova/steps as torch.float64, declared torch.int64"),
        ("statistics", r"Liar declares an upload that lacks: bn1.running_mean"),
    ],
)
def test_an_upload_that_is_not_the_declared_one_stops_the_round(how: str, says: str) -> None:
    sim = tiny(Liar(how))
    before, held = sim.now, {n: t.clone() for n, t in everything(sim).items()}
    with pytest.raises(ValueError, match=says):
        sim.round()
    assert sim.now is before
    assert_same_tensors(everything(sim), held)


def test_scaffold_cannot_send_its_model_alone() -> None:
    sim = simulation("scaffold")
    declared = declared_upload(sim.method, sim.model)
    assert check_upload(sim.method, sim.model, declared) is declared
    with pytest.raises(ValueError, match=r"Scaffold declares an upload that lacks: dc/bn1\.bias"):
        check_upload(sim.method, sim.model, sim.model.part_of(declared))


def test_counts_are_kept_whole_over_a_resume(tmp_path: Path) -> None:
    """In the run's precision they would become 32-bit floats, which cannot count beyond 2^24."""
    whole = tiny(FedNova(), run__precision="fp32", train__rounds=3).run(tmp_path / "whole")
    tiny(FedNova(), run__precision="fp32", train__rounds=2).run(tmp_path / "stopped")
    resumed = tiny(FedNova(), run__precision="fp32", train__rounds=3).run(tmp_path / "stopped", resume=True)
    assert adapters(resumed.path) == adapters(whole.path)
    saved, _ = RunFolder.open(whole.path).load()
    assert saved is not None
    assert {c.params["taken"].dtype for c in saved.clients.values()} == {torch.int64}
    assert resumed.experiment.now.kept.params["taken"].dtype == torch.int64


def test_a_copy_of_mixed_types_keeps_them() -> None:
    """As a GPU's checkpoint copies them."""
    state = State({"w": torch.rand(2, 3), "n": torch.tensor([[2**60 + 1], [5]])}, {"b": torch.rand(2, 1).double()})
    assert_same_tensors({**on_cpu(state).params, **on_cpu(state).buffers}, {**state.params, **state.buffers})
    assert mean(state.only(["w"], ())).params["w"].dtype == torch.float32


def test_a_method_that_could_not_be_found_again_is_refused_before_the_training(tmp_path: Path) -> None:
    """It trains in memory; a run folder could not be opened."""

    class Hidden(FedNova):
        pass

    sim = tiny(Hidden(), train__rounds=1)
    with pytest.raises(InputError, match=r"cannot name .*Hidden: define it at the top of a module"):
        sim.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(list(sim.rounds())) == 1


def test_a_bad_setting_of_another_method_is_one_line(installed: str) -> None:
    with pytest.raises(InputError, match=r"unknown key 'method\.server_rate': did you mean 'method\.server_lr'"):
        make_method(installed, {"server_rate": 1.0})
