"""Any network trains from Python objects, as the methods' plain references do, and is loaded again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_tensors
from lanes import oracle
from lanes.networks import NoNorm, Separable, bottleneck
from methods import reference as ref
from methods.tiny import CLASSES, assert_values, federation, prepared
from torch import Tensor, nn

import perada
from perada.adapters import Residual
from perada.data import GIVEN, DataOptions, Federation
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import LaneConv2d
from perada.methods import Ditto, FedAvg, PerAda

NETWORKS = {"no norm": NoNorm, "separable": Separable, "bottleneck": bottleneck}
METHODS = {"fedavg": FedAvg(), "ditto": Ditto(lam=0.4), "perada": PerAda(lam=0.4, distils=False)}
TRAIN = perada.Train(rounds=2, cohort=2, epochs=2, batch=8, lr=0.05)


def network(name: str) -> nn.Module:
    torch.manual_seed(2)
    return NETWORKS[name](CLASSES)


def given() -> Federation:
    return replace(federation(), options=DataOptions(name=GIVEN))


def experiment(net: nn.Module, method: Any, **how: Any) -> Experiment:
    return Experiment(net, given(), method, train=TRAIN, **{"precision": "fp64", "seed": 5, **how})


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_own_networks_train_as_their_papers_say(name: str, method: str) -> None:
    net, made = network(name), METHODS[method]
    exp = experiment(net, made, adapter=Residual(dropout=0.0, std=0.05))
    if made.parts.adapters:
        net = oracle.with_adapters(net, Residual().places(net))
        first = exp.model.module.state_dict()
        net.load_state_dict({n: first[n] for n in net.state_dict() if ".adapter." in n and n in first}, strict=False)
    data = exp.federation
    world = ref.World(
        net=net.double(),
        images=prepared(data.images),
        targets=data.targets,
        clients=[(c.name, c.train) for c in data.clients],
        cohort=exp.sampled,
        public=[],
        seed=5,
        epochs=2,
        batch=8,
        lr=0.05,
        inert=exp.model.inert.__contains__,
    )
    group = exp.model.group(made.parts.trains)
    names = group.params | group.buffers
    rounds = {
        "fedavg": lambda: ref.fedavg(world),
        "ditto": lambda: ref.ditto(world, lam=0.4),
        "perada": lambda: ref.ditto(world, lam=0.4, part=names.__contains__),
    }[method]()
    for _ in range(TRAIN.rounds):
        exp.round()
        held = next(rounds)
        assert_values(exp.now.broadcast, [held.broadcast], f"{method} broadcast")
        assert_values(exp.personal(), held.personal, f"{method} personal model")


def own_head() -> nn.Module:
    """A network whose last linear layer is not its head."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
            self.classifier, self.spare = nn.Linear(4, CLASSES), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.body(x).mean((2, 3)))

    torch.manual_seed(4)
    return Net()


@dataclass(frozen=True)
class Narrow:
    """An adapter kind of one's own: a per-channel bottleneck behind the first convolution."""

    width: int = 2

    def places(self, module: nn.Module) -> list[str]:
        return ["body.0"]

    def insert(self, module: nn.Module, seed: int) -> frozenset[str]:
        conv = LaneConv2d.of(module.body[0])
        torch.manual_seed(seed)
        conv.adapter = nn.Sequential(nn.Conv2d(4, self.width, 1), nn.Tanh(), nn.Conv2d(self.width, 4, 1))
        module.body[0] = conv
        return frozenset()

    def merge(self, module: nn.Module) -> nn.Module:
        return module


@pytest.mark.parametrize("adapter", [Residual(dropout=0.1, std=0.01, where="body.0"), Narrow(), None], ids=repr)
def test_head_and_adapter_of_a_run_are_found_again(adapter: Any, tmp_path: Path) -> None:
    method = PerAda(distils=False)
    exp = experiment(own_head(), method, adapter=adapter, head="classifier")
    run = exp.run(tmp_path / "run")
    params = run.state("site-0").params
    assert {"classifier.weight", "classifier.bias"} <= params.keys()
    assert "spare.weight" not in params
    added = {n for n in params if ".adapter." in n}
    assert bool(added) == (adapter is not None)
    again = perada.load(tmp_path / "run", model=own_head(), federation=given())
    assert_same_tensors(again.model("site-1").state_dict(), run.model("site-1").state_dict())
    assert again.config.model.head == "classifier"
    assert again.config.model.strategy() == adapter


def test_an_adapter_with_settings_that_a_folder_cannot_hold(tmp_path: Path) -> None:
    exp = experiment(own_head(), PerAda(distils=False), adapter=Narrow(width=3), head="classifier")
    exp.round()
    with pytest.raises(InputError, match="a run folder cannot hold the settings of Narrow"):
        exp.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_images_that_a_network_cannot_take_are_one_line() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES))
    with pytest.raises(InputError, match=r"the backbone cannot take images of 3×8×8: RuntimeError: .*channels"):
        experiment(net, FedAvg())
    with pytest.raises(InputError, match=r"must give logits \[2, 3\] for two images, not \[2, 4\]"):
        experiment(bottleneck(4), FedAvg())


def test_the_network_itself_is_not_changed() -> None:
    net = network("separable").train()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    exp = experiment(net, replace(METHODS["ditto"], lam=0.1))
    exp.round()
    assert_same_tensors(net.state_dict(), before)
    assert net.training


def test_a_run_of_own_objects_goes_on(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, **how: Any) -> perada.Run:
        exp = Experiment(network("no norm"), given(), Ditto(), train=replace(TRAIN, rounds=rounds), seed=5)
        return exp.run(tmp_path / folder, **how)

    whole = run("whole", 3)
    run("parts", 1)
    parts = run("parts", 3, resume=True)
    assert_same_tensors(parts.state(parts.clients[0]).params, whole.state(whole.clients[0]).params)
    with pytest.raises(InputError, match="weights are not those of"):
        Experiment(NoNorm(CLASSES), given(), Ditto(), train=replace(TRAIN, rounds=4), seed=5).run(
            tmp_path / "parts", resume=True
        )


@pytest.mark.parametrize("method", [Ditto, "ditto"])
def test_a_method_is_an_object(method: Any) -> None:
    with pytest.raises(InputError, match=r"method must be an object, such as methods\.PerAda\(\), not "):
        Experiment(network("no norm"), given(), method)
