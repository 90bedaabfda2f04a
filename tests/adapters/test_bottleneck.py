"""Bottleneck adapters: where they go, how they start, and that they cannot be merged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm
from lanes.problems import noisy
from lanes.transformers import SIZE, WIDTH, transformer
from torch import Tensor, nn

import perada
from perada import adapt
from perada.adapters import Adapter, Bottleneck, Exports, adapter_of
from perada.errors import InputError

PLACES = {
    "ours": [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attn.proj", "mlp.fc2")],
    "timm": [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attn.proj", "mlp.fc2")],
    "transformers": [f"model.vit.layers.{i}.{n}" for i in (0, 1) for n in ("attention.o_proj", "mlp.fc2")],
    "torchvision": [
        f"encoder.layers.encoder_layer_{i}.{n}" for i in (0, 1) for n in ("self_attention.out_proj", "mlp.3")
    ],
    "torch": [f"encoder.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.out_proj", "linear2")],
}


def test_it_is_public() -> None:
    assert perada.adapters.Bottleneck is Bottleneck
    assert isinstance(Bottleneck(), Adapter)
    assert not isinstance(Bottleneck(), Exports)
    assert adapter_of("bottleneck") == Bottleneck()
    assert all(f.metadata["help"] for f in dataclasses.fields(Bottleneck))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"reduction": 0}, "Bottleneck.reduction must be a whole number of at least 1, not 0"),
        ({"reduction": 1.5}, "Bottleneck.reduction must be a whole number"),
        ({"dropout": 1.0}, r"Bottleneck.dropout must be in \[0, 1\)"),
        ({"where": "("}, "Bottleneck.where is not a regular expression"),
    ],
)
def test_wrong_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Bottleneck(**how)


@pytest.mark.parametrize("name", PLACES)
def test_it_goes_behind_attention_and_mlp(name: str) -> None:
    assert Bottleneck().places(transformer(name)) == PLACES[name]
    model = adapt(transformer(name), adapter=Bottleneck(reduction=4))
    added = {n.split(".adapter.")[0] for n in model.initial().params if ".adapter." in n}
    assert sorted(added) == sorted(PLACES[name])
    assert Bottleneck().places(model.plain(model.initial())) == []


def test_where_replaces_the_rule() -> None:
    assert Bottleneck(where=r"0\.mlp").places(transformer("ours")) == ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"no attention or MLP of a known name: set Bottleneck\.where"):
        adapt(net, adapter=Bottleneck())
    assert "1.adapter.down.weight" in adapt(net, adapter=Bottleneck(where="^1$")).initial().params


def by_hand(x: Tensor, p: dict[str, Tensor], place: str) -> Tensor:
    down = F.linear(x, p[f"{place}.adapter.down.weight"], p[f"{place}.adapter.down.bias"])
    return x + F.linear(F.gelu(down), p[f"{place}.adapter.up.weight"], p[f"{place}.adapter.up.bias"])


def test_what_it_computes() -> None:
    """Hooks behind the plain network's layers, with the formula written out."""
    net = transformer("ours")
    model = adapt(net, adapter=Bottleneck(reduction=4)).to("cpu", torch.float64)
    first = model.initial()
    x = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64)
    assert_close_norm(model(first, x)[0], net(x), 1e-12)  # a new adapter adds zero
    assert first.params["blocks.0.mlp.fc2.adapter.down.weight"].shape == (1, WIDTH // 4, WIDTH)
    assert 0.005 < float(first.params["blocks.0.mlp.fc2.adapter.down.weight"].std()) < 0.02
    state = noisy(first)
    one = {n: p[0] for n, p in state.params.items()}
    net.load_state_dict({n: t for n, t in one.items() if ".adapter." not in n}, strict=False)
    for place in PLACES["ours"]:
        net.get_submodule(place).register_forward_hook(lambda m, i, y, place=place: by_hand(y, one, place))
    assert_close_norm(model(state, x)[0], net(x), 1e-9)
    assert (model(state, x)[0] - model(first, x)[0]).abs().max() > 1e-2


def test_it_cannot_be_merged() -> None:
    model = adapt(transformer("ours"), adapter=Bottleneck())
    with pytest.raises(InputError, match="not linear and cannot be merged"):
        Bottleneck().merge(model.plain(model.initial()))
