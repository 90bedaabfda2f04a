"""Any network: folded lanes against a plain loop over one client after another, in float64."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
import torch
from helpers import assert_close_norm
from torch import Tensor, nn

from perada import adapt
from perada.adapters import Residual
from perada.errors import InputError
from perada.lanes import Batch, LaneModel, State, gather, ops, ops_for, sgd

from . import oracle
from .networks import NETWORKS, network
from .problems import cross_entropy, noisy

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

K, B, STEPS = 3, 5, (4, 2, 3)

PLACES = {
    "no norm": ["conv1", "conv2"],
    "separable": ["features.0.0", "features.1.0", "features.2.0"],
    "padded": ["body.0", "body.2", "body.4", "body.6", "body.8"],
    "group norm": ["conv1", "conv2"],
    "bottleneck": ["layer1.0.conv2", "layer2.0.conv2"],
}


def batches(step: int, lanes: Tensor) -> Batch:
    draw = torch.Generator().manual_seed(7)
    images = torch.randn(K, max(STEPS), B, 3, 8, 8, generator=draw, dtype=torch.float64)[lanes, step]
    targets = (torch.arange(B) + lanes[:, None] + step) % 4
    weights = 0.5 + torch.rand(K, max(STEPS), B, generator=draw, dtype=torch.float64)[lanes, step]
    return Batch(images.flatten(0, 1), targets, weights, lanes + 10 * step)


def of_lane(k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    made = [batches(step, torch.tensor([k])) for step in range(STEPS[k])]
    return [(b.images, b.targets[0], b.weights[0]) for b in made]


def problem(name: str, trained: str) -> tuple[nn.Module, LaneModel]:
    """A plain network and its lanes."""
    net = network(name)
    if trained != "adapter":
        return net, adapt(net, adapter=None, trained=trained).to("cpu", torch.float64)
    plain = oracle.with_adapters(net, PLACES[name]).double()
    return plain, adapt(net, adapter=Residual(dropout=0.0)).to("cpu", torch.float64)


def assert_lane(found: State, k: int, wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in {**found.params, **found.buffers}.items():
        assert_close_norm(tensor[k], wanted[name], 1e-9, what=name)


@pytest.mark.parametrize("trained", ["full", "adapter", "output"])
@pytest.mark.parametrize("name", NETWORKS)
def test_folded_lanes_train_like_a_plain_loop(name: str, trained: str) -> None:
    plain, model = problem(name, trained)
    start = noisy(model.initial(K))
    end = sgd(model, start, batches, cross_entropy, [0.1] * K, STEPS).state
    moved = [n for n in end.params if n not in model.inert and torch.equal(end.params[n], start.params[n])]
    assert moved == [], "not trained"
    for k in range(K):
        lane = {n: t[k] for n, t in {**start.params, **start.buffers}.items()}
        wanted, _ = oracle.train(plain, lane, start.params.keys() - model.inert, of_lane(k), oracle.Sgd(0.1))
        assert_lane(end, k, wanted)


@pytest.mark.parametrize("trained", ["full", "adapter"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_lane_does_not_depend_on_the_others(name: str, trained: str) -> None:
    _, model = problem(name, trained)
    start = noisy(model.initial(K))
    together = sgd(model, start, batches, cross_entropy, [0.1] * K, STEPS).state
    for k in range(K):
        alone = sgd(
            model,
            gather(start, [k]),
            lambda step, lanes, k=k: batches(step, lanes + k),
            cross_entropy,
            [0.1],
            [STEPS[k]],
        ).state
        assert_lane(together, k, {n: t[0] for n, t in {**alone.params, **alone.buffers}.items()})


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a Linux package")
@pytest.mark.parametrize(
    ("name", "trained"),
    [("separable", "full"), ("separable", "adapter"), ("padded", "adapter"), ("bottleneck", "full")],
)
def test_the_fast_path_computes_the_same(name: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter; activations in place follow norms that its kernels compute."""
    _, model = problem(name, trained)
    start = noisy(model.initial(K))
    plain = sgd(model, start, batches, cross_entropy, [0.1] * K, STEPS).state
    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    fast = sgd(problem(name, trained)[1], start, batches, cross_entropy, [0.1] * K, STEPS).state
    assert ops_for(torch.device("cpu")).fast
    for k in range(K):
        assert_lane(fast, k, {n: t[k] for n, t in {**plain.params, **plain.buffers}.items()})


@pytest.mark.parametrize("name", NETWORKS)
def test_a_plain_lane_predicts_like_the_folded_one(name: str) -> None:
    _, model = problem(name, "adapter")
    state, x = noisy(model.initial(K)), batches(0, torch.arange(K)).images
    together = model(state, x)
    for k in range(K):
        assert_close_norm(model.plain(gather(state, [k]))(x.chunk(K)[k]), together[k], 1e-12)


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's layer of that name, in short."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_norm(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)).double()


def test_a_norm_with_an_activation_keeps_it() -> None:
    net = with_norm(BatchNormAct2d(4))
    model = adapt(net, adapter=None, trained="full").to("cpu", torch.float64)
    start = noisy(model.initial(K))
    end = sgd(model, start, batches, cross_entropy, [0.1] * K, STEPS).state
    for k in range(K):
        lane = {n: t[k] for n, t in {**start.params, **start.buffers}.items()}
        assert_lane(end, k, oracle.train(net, lane, start.params, of_lane(k), oracle.Sgd(0.1))[0])


def test_a_norm_with_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(InputError, match=r"1: OwnNorm has no lane-aware form; use nn.BatchNorm2d"):
        adapt(with_norm(OwnNorm(4)), adapter=None, trained="output")


class Twice(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_convolution_with_a_forward_of_its_own_keeps_it_and_gets_no_adapter() -> None:
    net = nn.Sequential(Twice(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)).double()
    assert Residual().places(net) == ["1"]
    model, x = adapt(net, adapter=None, trained="output"), batches(0, torch.arange(1)).images
    assert_close_norm(model(model.initial(), x)[0], net(x), 1e-12)
    with pytest.raises(InputError, match="0: a trained Twice has no lane-aware form; keep it frozen"):
        adapt(net, adapter=None, trained="full")


def test_a_layer_used_under_two_names_is_replaced_under_both() -> None:
    net = nn.Module()
    net.drop = nn.Dropout(0.5)
    net.body = nn.Sequential(nn.Conv2d(3, 4, 3), net.drop, nn.Flatten(), nn.Linear(144, 4))
    net.forward = net.body.forward  # type: ignore[method-assign]
    model = adapt(net, adapter=None, trained="output")
    assert model.module.drop is model.module.body[1]
    assert type(model.module.drop).__name__ == "LaneDropout"
