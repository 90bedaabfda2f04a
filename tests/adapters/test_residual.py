"""Residual adapters: where they go, how they start, what is inert, and how they merge."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import assert_close_norm
from lanes.networks import NETWORKS, network
from lanes.problems import noisy
from torch import nn

import perada
from perada import adapt, plugins
from perada.adapters import Adapter, Residual, adapter_of
from perada.adapters.merged import NotMergeable, merged_network, merged_state
from perada.errors import InputError
from perada.lanes import LaneConv2d, ResidualAdapter, key_of
from perada.models import backbone
from perada.models.resnet import SHAPES, resnet

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def test_it_is_public() -> None:
    assert perada.adapters.Residual is Residual
    assert perada.adapt is adapt
    assert isinstance(Residual(), Adapter)


def test_every_setting_has_a_help_text() -> None:
    assert all(f.metadata["help"] for f in dataclasses.fields(Residual))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Residual().dropout = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"dropout": 1.0}, r"Residual.dropout must be in \[0, 1\), not 1.0"),
        ({"dropout": -0.1}, "Residual.dropout must be in"),
        ({"std": -1.0}, "Residual.std must not be negative"),
        ({"std": float("nan")}, "Residual.std must not be negative"),
        ({"where": "("}, "Residual.where is not a regular expression"),
    ],
)
def test_wrong_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Residual(**how)


# Where.


@pytest.mark.parametrize(("name", "count"), [("resnet8", 6), ("resnet18", 16), ("resnet34", 32), ("resnet50", 16)])
def test_in_a_resnet_behind_the_3x3_of_blocks(name: str, count: int) -> None:
    net = backbone(name, 4).net
    places = Residual().places(net)
    assert len(places) == count
    assert all(p.startswith("layer") and net.get_submodule(p).kernel_size == (3, 3) for p in places)


@pytest.mark.parametrize(
    ("net", "places"),
    [
        # convolutions in blocks, and those in front of a batch norm
        (
            nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "block": nn.Sequential(nn.Conv2d(4, 4, 5), nn.Conv2d(4, 4, 1))}),
            ["block.0"],
        ),
        (nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "n": nn.BatchNorm2d(4), "b": nn.Conv2d(4, 4, 3)}), ["a"]),
        # neither: all of them
        (nn.ModuleDict({"a": nn.Conv2d(3, 4, (1, 3)), "b": nn.Conv2d(4, 4, 3), "c": nn.Conv2d(4, 4, 1)}), ["a", "b"]),
        (nn.ModuleDict({"c": nn.Conv2d(4, 4, 1), "l": nn.Linear(4, 4)}), []),
    ],
)
def test_in_other_networks(net: nn.Module, places: list[str]) -> None:
    assert Residual().places(net) == places


def test_where_replaces_the_rule() -> None:
    net = resnet("resnet8", 4)
    shortcuts = ["layer2.0.downsample.0", "layer3.0.downsample.0"]
    assert Residual(where=r"^conv1$|downsample").places(net) == ["conv1", *shortcuts]


def test_an_adapted_convolution_gets_no_second_adapter() -> None:
    model = adapt(resnet("resnet8", 4), adapter=Residual(where="layer1"))
    again = model.plain(model.initial())
    assert Residual().places(again) == [p for p in Residual().places(resnet("resnet8", 4)) if "layer1" not in p]
    assert Residual(where="adapter").places(again) == []


def test_a_network_without_places() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(InputError, match=r"no convolution of this network takes an adapter: set Residual\.where") as e:
        adapt(net)
    assert "\n" not in str(e.value)
    assert adapt(net, adapter=None, trained="full").initial().params.keys() == {"1.weight", "1.bias"}


# What.


def test_first_weights_are_a_draw_of_seed_and_name() -> None:
    lanes = adapt(resnet("resnet8", 4), adapter=Residual(std=0.5), seed=3).initial().params
    draw = torch.Generator().manual_seed(key_of(3, "layer2.0.conv2", "adapter") & (2**63 - 1))
    wanted = 0.5 * torch.randn(32, 32, 1, 1, generator=draw)
    assert torch.equal(lanes["layer2.0.conv2.adapter.conv.weight"][0], wanted)


def test_settings_reach_the_adapters() -> None:
    model = adapt(resnet("resnet8", 4), adapter=Residual(dropout=0.1, std=0.0))
    added = [m for m in model.module.modules() if isinstance(m, ResidualAdapter)]
    assert len(added) == 6
    assert {m.dropout.p for m in added} == {0.1}
    assert not any(t.any() for n, t in model.initial().params.items() if n.endswith("adapter.conv.weight"))


@pytest.mark.parametrize(
    ("name", "inert"), [("separable", 3), ("bottleneck", 2), ("no norm", 0), ("padded", 0), ("group norm", 0)]
)
def test_only_in_front_of_a_batch_norm_is_the_norms_bias_inert(name: str, inert: int) -> None:
    model = adapt(network(name))
    assert len(model.inert) == inert
    assert all(n.endswith(".adapter.norm.bias") for n in model.inert)


# Merging.


@pytest.mark.parametrize("name", NETWORKS)
def test_merged_convolutions_compute_the_same(name: str) -> None:
    net, kind = network(name), Residual()
    model = adapt(net, adapter=kind, trained="everything").to("cpu", torch.float64)
    state = noisy(model.initial())
    for name_, b in state.buffers.items():
        b.add_(0.3 * torch.rand(b.shape, generator=torch.Generator().manual_seed(len(name_)), dtype=b.dtype))
    plain, x = model.plain(state), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    before = {n: t.clone() for n, t in plain.state_dict().items()}
    merged = kind.merge(plain)
    assert_close_norm(merged(x), plain(x), 1e-9)
    assert (plain(x) - net(x)).abs().max() > 1e-3, "the adapters do something"
    assert not any(isinstance(m, ResidualAdapter) for m in merged.modules())
    assert before.keys() == plain.state_dict().keys(), "the network itself is not changed"
    assert not any(p.requires_grad for p in merged.parameters())
    sizes = [sum(p.numel() for p in m.parameters()) for m in (net, merged)]
    assert sizes[1] >= sizes[0]


def test_a_merged_resnet_has_the_backbones_names() -> None:
    net, kind = resnet("resnet8", 4), Residual()
    model = adapt(net, adapter=kind)
    merged = kind.merge(model.plain(model.initial()))
    more = set(merged.state_dict()) - set(net.state_dict())
    assert more == {f"{place}.bias" for place in kind.places(net)}
    assert all(type(merged.get_submodule(p)) is nn.Conv2d for p in kind.places(net))


def noisy_plain(net: nn.Module) -> nn.Module:
    """The network with adapters and statistics that matter, in float64."""
    model = adapt(net, trained="adapter").to("cpu", torch.float64)
    state = noisy(model.initial())
    for name, b in state.buffers.items():
        b.add_(0.3 * torch.rand(b.shape, generator=torch.Generator().manual_seed(len(name)), dtype=b.dtype))
    return model.plain(state)


@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_load_strictly_into_the_resnet(name: str) -> None:
    net = resnet(name, 4).double().eval()
    plain, images = noisy_plain(net), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    before = net(images)
    state = merged_state(plain, Residual().merge(plain), (3, 32, 32))
    net.load_state_dict(state, strict=True)
    assert_close_norm(net(images), plain(images), 1e-9)
    assert (net(images) - before).abs().max() > 1e-3 * before.abs().max(), "the adapters do something"
    assert state.keys() == {n for n in net.state_dict() if not n.endswith("num_batches_tracked")}


@pytest.mark.parametrize("name", ["bottleneck", "no norm"])
def test_merged_weights_load_strictly_into_other_networks(name: str) -> None:
    net = network(name).double().eval()
    plain, images = noisy_plain(net), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    net.load_state_dict(merged_state(plain, Residual().merge(plain), (3, 8, 8)), strict=True)
    assert_close_norm(net(images), plain(images), 1e-9)


class OutOfOrder(nn.Module):
    """Its norms are declared behind the wrong convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, bias=False)
        self.norm_of_two = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 6, 3, bias=False)
        self.norm_of_one = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm_of_one(self.one(x)))
        x = torch.relu(self.norm_of_two(self.two(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class NoNorm(nn.Module):
    def __init__(self, groups: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, groups=groups, bias=bias), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.conv(x)).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (OutOfOrder(), "not called in the order in which they are declared"),
        (NoNorm(), "conv: it has no bias, and no batch norm behind it"),
        (NoNorm(3, True), r"conv.weight: it would have the shape \[6, 3, 3, 3\], not \[6, 1, 3, 3\]"),
    ],
)
def test_what_cannot_be_merged_under_its_own_names_is_refused(net: nn.Module, why: str) -> None:
    plain = noisy_plain(net)
    with pytest.raises(NotMergeable, match=f"{why}.*Export a .pt2 or .onnx file") as error:
        merged_state(plain, Residual().merge(plain), (3, 8, 8))
    assert "\n" not in str(error.value)


def with_extra(net: nn.Module, names: Sequence[str]) -> nn.Module:
    """The plain network, with a 1×1 convolution behind some convolutions: what docs/export.md does."""
    for name in names:
        conv = net.get_submodule(name)
        conv.extra = nn.Conv2d(conv.out_channels, conv.out_channels, 1)  # type: ignore[arg-type]
        conv.register_forward_hook(lambda layer, inputs, y: layer.extra(y))
    return net.double().eval()


@pytest.mark.parametrize(
    ("net", "extra"),
    [
        (OutOfOrder(), ["one", "two"]),
        (NoNorm(), ["conv"]),
        (NoNorm(3, True), ["conv"]),
        (network("separable"), None),
        (resnet("resnet8", 4), []),
        (network("bottleneck"), []),
    ],
)
def test_what_does_not_fit_into_a_convolution_becomes_an_extra_one(net: nn.Module, extra: list[str] | None) -> None:
    plain, kind, images = noisy_plain(net), Residual(), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    state, names = merged_network(plain, kind, (3, 16, 16))
    grouped = [n for n in kind.places(net) if net.get_submodule(n).groups > 1]
    assert names == (grouped if extra is None else extra)
    outside = with_extra(copy.deepcopy(net), names)
    outside.load_state_dict(state, strict=True)
    assert_close_norm(outside(images), plain(images), 1e-9)
    assert {n for n in state if ".extra." in n} == {f"{n}.extra.{t}" for n in names for t in ("weight", "bias")}


# By name.


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclasses.dataclass(frozen=True)
class Nothing:
    """An adapter of somebody else: it inserts a layer without parameters."""

    def places(self, module: nn.Module) -> list[str]:
        return ["conv1"]

    def insert(self, module: nn.Module, seed: int) -> frozenset[str]:
        conv = LaneConv2d.of(module.conv1)
        conv.adapter = Scale()
        module.conv1 = conv
        return frozenset()

    def merge(self, module: nn.Module) -> nn.Module:
        return module


def test_adapters_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter_of("residual") == Residual()
    assert adapter_of(None) is None
    own: Any = ModuleType("own_adapters")
    own.Nothing, own.three = Nothing, lambda: 3
    monkeypatch.setitem(sys.modules, "own_adapters", own)
    assert adapter_of("own_adapters:Nothing") == Nothing()
    point = EntryPoint("nothing", "own_adapters:Nothing", "perada.adapters")
    monkeypatch.setattr(plugins, "entry_points", lambda group, name=point.name: [point] if name == point.name else [])
    assert adapter_of("nothing") == Nothing()
    for name, message in {
        "residuals": "unknown adapter 'residuals': did you mean 'residual'",
        "own_adapters:three": "int is not an adapter: it needs places, insert and merge",
    }.items():
        with pytest.raises(InputError, match=message):
            adapter_of(name)


def test_another_adapter_trains_the_head_and_the_norms() -> None:
    model = adapt(resnet("resnet8", 4), adapter=Nothing())
    assert isinstance(model.module.conv1.adapter, Scale)
    assert {"fc.weight", "bn1.weight"} <= model.initial().params.keys()
