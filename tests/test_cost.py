"""What a round costs a client: counted operations and bytes against a plain loop and against the declarations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from commands import said, strict
from torch.utils.flop_counter import FlopCounterMode

from perada.cli import main as cli
from perada.client.cost import Peak, RoundCost, round_cost
from perada.methods import REGISTRY, make_method, method_sizes
from perada.models import backbone, network_of

CLASSES = 10


@pytest.fixture(scope="module")
def costs() -> dict[str, RoundCost]:
    made = network_of("resnet8", CLASSES)
    names = ("standalone", "fedavg", "fedprox", "pfedme", "perada", "perada-no-kd", "scaffold")
    return {name: round_cost(make_method(name, {}), made, CLASSES, images=16, batch=8) for name in names}


def test_operations_are_those_of_a_plain_loop(costs: dict[str, RoundCost]) -> None:
    """FedAvg's client is SGD on the whole network: two mini-batches here."""
    net = network_of("resnet8", CLASSES).net.train().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            loss = F.cross_entropy(net(torch.randn(8, 3, 32, 32)), torch.zeros(8, dtype=torch.int64))
            torch.autograd.grad(loss, list(net.parameters()))
    assert costs["fedavg"].gflop == pytest.approx(counter.get_total_flops() / 1e9, rel=0.02)
    assert costs["pfedme"].gflop == pytest.approx(3 * costs["fedavg"].gflop, rel=0.02), "three inner steps"
    assert costs["fedprox"].gflop == costs["standalone"].gflop == costs["fedavg"].gflop


def test_bytes_are_the_declared_ones(costs: dict[str, RoundCost]) -> None:
    for name, cost in costs.items():
        sizes = method_sizes(name, "resnet8", CLASSES)
        assert cost.bytes_up == 4 * (sizes["communicated"] + sizes["communicated_buffers"]), name
    assert costs["standalone"].bytes_up == costs["standalone"].bytes_down == 0
    assert costs["perada"].bytes_up < 0.2 * costs["fedavg"].bytes_up


def test_distillation_costs_the_client_nothing(costs: dict[str, RoundCost]) -> None:
    one, other = costs["perada"], costs["perada-no-kd"]
    assert (one.bytes_up, one.bytes_down, one.gflop) == (other.bytes_up, other.bytes_down, other.gflop)
    assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)
    assert all(cost.seconds > 0 for cost in costs.values())


def test_a_transformer_is_measured_with_the_adapters_that_fit_it() -> None:
    """Rank 8 adds little to the frozen network, and the bytes are those that `perada methods` lists."""
    made = backbone("vit_tiny_patch4", CLASSES, size=8)
    cost = round_cost(make_method("perada", {}), replace(made, size=8), CLASSES, images=4, batch=2)
    lora = method_sizes("perada", "vit_tiny_patch4", CLASSES, 8)
    assert cost.bytes_up == 4 * (lora["communicated"] + lora["communicated_buffers"])


def test_memory_is_of_what_is_alive_at_once() -> None:
    kilobyte = 256  # floats
    with Peak() as memory:
        one = torch.ones(kilobyte)
        two = one * 2  # 2 kB
        view = two.view(16, 16)  # nothing
        one.add_(1)  # nothing
        del one
        three = view + 1  # 2 kB again
        four = three.exp()  # 3 kB
        del two, view, three, four
        torch.ones(kilobyte)
    assert memory.peak == 3 * 1024
    assert memory.now == 0


def test_memory_counts_what_the_backward_pass_keeps() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with Peak() as memory:
        x = torch.ones(128, 64)
        for _ in range(10):
            x = torch.tanh(x @ w)  # each tanh is kept
        loss = x.sum()
        held = memory.now
        loss.backward()
        del x, loss
    assert held >= 11 * 128 * 64 * 4
    assert memory.peak >= held
    assert memory.now <= 64 * 64 * 4, "only w's gradient is left"


def test_the_command_adds_columns_only_if_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: REGISTRY[name] for name in ("fedavg", "perada")}
    monkeypatch.setattr("perada.cli.main.REGISTRY", few)
    plain = strict(said(capsys, "methods", "--backbone", "resnet8", "--json"))
    assert [row.keys() for row in plain] == [{"name", "trained", "communicated", "communicated_buffers"}] * 2
    rows = strict(said(capsys, "methods", "--backbone", "resnet8", "--cost", "--json"))
    assert rows[1]["cost"].keys() >= {"bytes_up", "bytes_down", "gflop", "peak_bytes", "seconds", "images", "batch"}
    assert json.dumps(rows)
    table = said(capsys, "methods", "--backbone", "resnet8", "--cost")
    assert "GFLOP" in table
    assert "GFLOP" not in said(capsys, "methods", "--backbone", "resnet8")


def test_the_command_counts_what_is_adapted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default from the stage that the backbone names."""
    monkeypatch.setattr("perada.cli.main.REGISTRY", {"perada": REGISTRY["perada"]})
    typed = ["methods", "--backbone", "efficientnet_lite0", "--json"]
    (auto,), (seven,), (six,), (all_,) = (
        strict(said(capsys, *typed, *more))
        for more in ([], ["--adapt-from", "stage7"], ["--adapt-from", "stage6"], ["--adapt-from", ""])
    )
    assert auto == seven
    assert auto["communicated"] == method_sizes("perada", "efficientnet_lite0", adapt_from="auto")["communicated"]
    assert auto["communicated"] < six["communicated"] < all_["communicated"]
    assert cli.main([*typed, "--adapt-from", "stage9"]) == 2
    assert "unknown stage 'stage9'" in capsys.readouterr().err
    measured = round_cost(make_method("perada", {}), network_of("efficientnet_lite0", 3), 3, 4, 2, adapt_from="stage7")
    sizes = method_sizes("perada", "efficientnet_lite0", 3, adapt_from="auto")
    assert measured.bytes_up == 4 * (sizes["communicated"] + sizes["communicated_buffers"])
