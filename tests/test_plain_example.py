"""examples/perada_plain.py computes what the package computes: it is documentation that cannot go stale."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import assert_close_norm
from small import small

from perada.config import build
from perada.data.batches import sample_stream, steps_of
from perada.experiment import Experiment
from perada.lanes import State

EXAMPLE = Path(__file__).parents[1] / "examples" / "perada_plain.py"
ROUNDS = 3
SETTINGS = {
    "run__precision": "fp64",
    "model__dropout": 0.0,
    "train__cohort": 3,
    "train__epochs": 2,
    "method__lam": 0.7,
    "distill__guard": "none",
    "distill__pull": 0.0,
    "distill__schedule": "constant",
    "distill__steps": 3,
}


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perada_plain", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network(plain: ModuleType, exp: Experiment) -> torch.nn.Module:
    """The example's own network with the values of the package's: same names, same shapes."""
    net = plain.ResNet8(dropout=0.0).double()
    first = lane(exp.model.initial())
    values = {**exp.model.module.state_dict(), **first}
    counters = {n for n in net.state_dict() if n.endswith("num_batches_tracked")}
    net.load_state_dict({n: values[n] for n in net.state_dict().keys() - counters}, strict=False)
    return net


def lane(state: State, k: int = 0) -> dict[str, torch.Tensor]:
    return {n: t[k] for n, t in {**state.params, **state.buffers}.items()}


def assert_same(found: State, k: int, wanted: dict[str, torch.Tensor], what: str) -> None:
    values = lane(found, k)
    inert = {n for n in values if n.endswith(".adapter.norm.bias")}  # nothing trains it: the example leaves it out
    assert values.keys() - inert == wanted.keys()
    for name, tensor in wanted.items():
        assert_close_norm(tensor, values[name], 1e-9, f"{what}: {name}")
    assert not any(values[n].any() for n in inert)


def test_three_rounds_equal_the_package(plain: ModuleType) -> None:
    """In float64, from the same initial values and on the same batches: every parameter and running statistic."""
    exp = build(small(**SETTINGS))
    fed, options, seed = exp.federation, exp.train, exp.options.seed

    def data(t: int, m: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        client = fed.clients[m]
        steps = steps_of(len(client.train), options.batch, options.epochs)
        stream = torch.from_numpy(sample_stream(client.train, steps * options.batch, seed, t, client.name))
        return [(fed.prepare(fed.images[i], torch.float64), fed.targets[i]) for i in stream.split(options.batch)]

    def public(t: int) -> list[torch.Tensor]:
        steps = exp.distill.steps
        return [exp.public[step % len(exp.public)] for step in range(steps)]

    net = network(plain, exp)
    settings = {"lam": exp.method.lam, "lr": options.lr, "server_lr": exp.distill.lr}
    rounds = plain.perada(net, len(fed.clients), exp.sampled, data, public, **settings)
    for number in range(1, ROUNDS + 1):
        exp.round()
        w, v = next(rounds)
        assert_same(exp.now.broadcast, 0, w, f"round {number}, w")
        for m, own in enumerate(v):
            assert_same(exp.now.kept, m, own, f"round {number}, v of client {m}")


def test_the_example_predicts_as_the_package_does(plain: ModuleType) -> None:
    exp = build(small(**SETTINGS))
    net = network(plain, exp).eval()
    images = exp.federation.prepare(exp.federation.images[:8], torch.float64)
    wanted = exp.model(exp.model.initial(), images, "running")[0]
    assert_close_norm(net(images), wanted, 1e-12, "logits")


def test_the_example_runs_and_imports_nothing_of_the_package() -> None:
    assert not re.search(r"^\s*(from|import) perada", EXAMPLE.read_text(), re.MULTILINE)
    calm = {**os.environ, "OMP_NUM_THREADS": "1"}  # two busy-waiting threads stand still on a loaded machine
    done = subprocess.run([sys.executable, str(EXAMPLE), "1"], capture_output=True, text=True, timeout=120, env=calm)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"round 1: personal models [\d.]+% .* global model [\d.]+%\n", done.stdout)
