"""What every method must keep to, whoever writes it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small import experiment, small

from perada import adapt, load, train
from perada.callbacks import OnRound
from perada.cli import main as cli
from perada.client.trainer import Trainer
from perada.config import build, resolve
from perada.data.batches import steps_of
from perada.errors import InputError
from perada.lanes import Gradient, State, gather
from perada.methods import REGISTRY, Parts, check_upload, declared_upload, method_sizes
from perada.methods.perada import PerAda
from perada.models import network_of
from perada.report.facts import gather_facts
from perada.sweep.compare import compare


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_uploaded_is_what_is_declared(name: str) -> None:
    """Parameters and buffers counted on the upload itself, against the numbers `perada methods` prints."""
    sim = build(small(method__name=name))
    upload, _ = sim.method.client_update(sim.trainer([0, 1]), sim.now.broadcast, gather(sim.now.kept, [0, 1]))
    declared = declared_upload(sim.method, sim.model)
    assert {n: (t.shape[1:], t.dtype) for n, t in upload.params.items()} == {
        n: (t.shape[1:], t.dtype) for n, t in declared.params.items()
    }
    assert upload.buffers.keys() == declared.buffers.keys()
    sizes = method_sizes(name, "resnet8", 10)
    assert upload.parameters_per_lane() == sizes["communicated"]
    assert upload.bytes_per_lane() == 4 * (sizes["communicated"] + sizes["communicated_buffers"])


def test_the_papers_sizes() -> None:
    """ResNet-18, 10 classes (SPEC, section 5)."""
    wanted = {"perada": (2_826_516, 1_413_258), "standalone": (11_181_642, 0), "fedavg": (11_181_642, 11_181_642)}
    for name, (trained, sent) in wanted.items():
        found = method_sizes(name)
        assert (found["trained"], found["communicated"]) == (trained, sent)


@dataclass(frozen=True)
class Leaky(PerAda):
    """Declares that the head stays and sends it all the same."""

    @property
    def parts(self) -> Parts:
        return dataclasses.replace(PerAda().parts, withholds="output")

    def client_update(self, trainer: Trainer, w: State, v: State) -> tuple[State, State]:
        return PerAda.client_update(self, trainer, w, v)


def test_an_upload_of_what_is_withheld_stops_the_round() -> None:
    built = build(small())
    sim = experiment(built.net, built.federation, built.config, Leaky(), adapter="residual", public=built.public.images)
    before = sim.now
    with pytest.raises(ValueError, match=r"Leaky uploads what it does not declare: fc\.bias, fc\.weight"):
        sim.round()
    assert sim.now is before
    head = sim.model.group("output")
    kept_back = sim.now.broadcast.only(sim.now.broadcast.params.keys() - head.params, sim.now.broadcast.buffers)
    assert check_upload(sim.method, sim.model, kept_back) is kept_back


def test_a_withheld_group_is_not_counted_as_sent() -> None:
    model = adapt(network_of("resnet18", 10).net)
    shared = Leaky().parts.shared(model.groups)
    assert model.initial().only(shared.params, ()).parameters_per_lane() == 1_413_258 - 5_130


def test_a_client_on_its_own_machine_does_what_it_does_in_the_simulation() -> None:
    """There it is client number 0 of a federation of one: only its name says who it is."""
    sim = build(small(method__name="perada-no-kd", run__precision="fp64"))
    m = 2
    upload, kept = sim.method.client_update(sim.trainer([1, m]), sim.now.broadcast, gather(sim.now.kept, [1, m]))
    alone = dataclasses.replace(sim.federation, clients=(sim.federation.clients[m],))
    site = Trainer(sim.model, alone, [0], 0, sim.options.seed, sim.train)
    there, here = sim.method.client_update(site, sim.now.broadcast, gather(sim.now.kept, [m]))
    for a, b in ((upload, there), (kept, here)):
        for name in a.params:
            torch.testing.assert_close(a.params[name][1:], b.params[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lanes", [0, 1])
def test_a_method_may_write_its_own_step(lanes: int) -> None:
    """Plain SGD written as an update, beside the trainer's own; a second state is carried along."""
    sim = build(small(run__precision="fp64", run__lanes=lanes))
    trainer = sim.trainer([0, 3])
    start, rate = sim.model.initial(2), trainer.options.lr

    def update(gradient: Gradient, states: tuple[State, ...]) -> tuple[State, ...]:
        grads, state = gradient(states[0])
        steps = {"steps": states[1].params["steps"] + 1}
        params = {n: p - rate * grads[n] if n in grads else p for n, p in state.params.items()}
        return State(params, state.buffers), State(steps)

    count = State({"steps": torch.zeros(2, 1, dtype=torch.float64)})
    found, counted = trainer.loop((start, count), update)
    wanted = trainer.sgd(start)
    for name, tensor in wanted.params.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=1e-9, atol=1e-12)
    for name, tensor in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], tensor, rtol=1e-9, atol=1e-12)
    sizes = [len(sim.federation.clients[c].train) for c in (0, 3)]
    assert counted.params["steps"].flatten().tolist() == [steps_of(n, 8, 1) for n in sizes]


def test_a_setting_the_method_does_not_have_is_refused_but_a_presets_own_is_not() -> None:
    assert resolve("digits", {"method.name": "fedavg"}).method == {"name": "fedavg"}
    with pytest.raises(InputError, match=r"unknown key 'method\.lam'"):
        resolve("digits", {"method.name": "fedavg", "method.lam": 3.0})


def test_the_clients_own_images_are_no_public_data() -> None:
    with pytest.raises(InputError, match="clients' own images"):
        build(small(distill__data="digits"))


def test_a_guard_without_a_judge_is_refused() -> None:
    with pytest.raises(InputError, match=r"DataOptions\.val"):
        build(small(data__val=0.0))


def test_pretraining_is_saved_counted_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in pretraining and resumed: the same backbone, bit for bit, as without a stop."""
    settings = {f"{k.replace('__', '.')}": v for k, v in PRETRAINED.items()}
    whole = train("digits", set=settings, out=tmp_path / "whole")
    rounds = []

    def stop(progress: object) -> None:
        rounds.append(progress)
        if len(rounds) == 3:  # before the first round, after it, after the second
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("digits", set=settings, out=tmp_path / "stopped", callbacks=[OnRound(stop)])
    assert not (tmp_path / "stopped" / "backbone.safetensors").exists()
    with (tmp_path / "stopped" / "pretrain" / "metrics.jsonl").open("a") as rows:  # a kill while a row is written
        rows.write('{"round": 3, "bytes')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--out", "stopped", "--resume"]) == 0
    backbones = [(tmp_path / n / "backbone.safetensors").read_bytes() for n in ("whole", "stopped")]
    assert backbones[0] == backbones[1]
    again = load("stopped")
    costs = [{**r.summary["pretrain"], "seconds": 0} for r in (whole, again)]
    assert costs[0] == costs[1]
    assert costs[0]["bytes_up"] > 0
    assert not (tmp_path / "stopped" / "pretrain" / "checkpoints").exists()
    for part in ("params", "buffers"):
        a, b = getattr(whole.state("client-00"), part), getattr(again.state("client-00"), part)
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_runs_that_share_a_pretrained_backbone_all_count_its_pretraining(tmp_path: Path) -> None:
    """Standalone sends nothing in training, but it starts from what FedAvg made of every client's uploads."""
    settings = {k.replace("__", "."): v for k, v in {**PRETRAINED, "train__rounds": 1}.items() if "method" not in k}
    made = compare("digits", methods=["perada-no-kd", "standalone"], set=settings, out=tmp_path / "both", jobs=1)
    first, second = (run.summary for run in made.runs)
    assert {r.summary["method"] for r in made.runs} == {"perada-no-kd", "standalone"}
    assert first["pretrain"] == second["pretrain"]
    alone = next(run for run in made.runs if run.summary["method"] == "standalone")
    assert alone.summary["bytes_up"] == 0
    (facts,) = gather_facts([alone])
    sizes = alone.summary["parameters"]
    assert facts.pretrain is not None
    whole = 4 * sizes["full"]  # and its running statistics
    assert whole * 3 * 2 <= facts.pretrain.up <= 1.05 * whole * 3 * 2, "three rounds of two clients"


PRETRAINED = {
    "data__clients": 3,
    "data__server_val": 0.4,
    "train__cohort": 2,
    "train__rounds": 1,
    "train__epochs": 1,
    "model__weights": "fedavg",
    "model__pretrain_rounds": 3,
    "method__name": "perada-no-kd",
    "run__shifts": False,
}


def test_a_run_of_your_own_images_opens_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    for site in ("a", "b"):
        for label in ("x", "y"):
            for i in range(5):
                path = tmp_path / "images" / site / label / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (9, 9), 40 * i + (100 if label == "x" else 0)).save(path)
    monkeypatch.chdir(tmp_path)
    words = ["train", "--data", "images", "--out", "run", "--set", "data.size=8", "--set", "train.rounds=1"]
    extra = ["--set", "model.backbone=resnet8", "--set", "model.weights=random", "--set", "run.device=cpu"]
    assert cli.main([*words, *extra]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["evaluate", "../run"]) == 0
    (tmp_path / "images").rename(tmp_path / "moved")
    assert cli.main(["evaluate", "../run"]) == 2
    assert cli.main(["evaluate", "../run", "--data", "../moved"]) == 0


def test_a_run_made_on_a_gpu_opens_without_one(tmp_path: Path) -> None:
    settings = {"data.clients": 2, "data.server_val": 0.5, "train.cohort": 1, "train.rounds": 1, "run.shifts": False}
    run = train("digits", method="fedavg", set={**settings, "train.epochs": 1}, out=tmp_path / "run")
    config = (run.path / "config.toml").read_text().replace('device = "auto"', 'device = "cuda"')
    (run.path / "config.toml").write_text(config)
    assert load(run.path).clients == ("client-00", "client-01")
