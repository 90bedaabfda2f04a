"""LoRA: where it goes, how it starts, PEFT's own numbers and files, merging, and what is shared."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm
from lanes.problems import cross_entropy, noisy
from lanes.transformers import CLASSES, SIZE, WIDTH, of_transformers, transformer
from libraries import peft, transformers
from torch import Tensor, nn

import perada
from perada import adapt
from perada.adapters import Adapter, Exports, Lora, adapter_of
from perada.errors import InputError
from perada.lanes import Batch, LaneModel, State, gather, sgd
from perada.models import backbone, group_sizes

NAMES = ("ours", "timm", "transformers", "torchvision")
QKV = {
    "ours": ["blocks.0.attn.qkv", "blocks.1.attn.qkv"],
    "timm": ["blocks.0.attn.qkv", "blocks.1.attn.qkv"],
    "transformers": [f"model.vit.layers.{i}.attention.{p}_proj" for i in range(2) for p in "qkv"],
    "torchvision": [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)],
    "torch": [f"encoder.layers.{i}.self_attn" for i in range(2)],
}


def lanes_of(name: str, kind: Lora, lanes: int = 1) -> tuple[nn.Module, LaneModel, State]:
    net = transformer(name)
    model = adapt(net, adapter=kind).to("cpu", torch.float64)
    return net, model, noisy(model.initial(lanes))


def test_it_is_public() -> None:
    assert perada.adapters.Lora is Lora
    assert isinstance(Lora(), Adapter)
    assert isinstance(Lora(), Exports)
    assert adapter_of("lora") == Lora()


def test_every_setting_has_a_help_text() -> None:
    assert all(f.metadata["help"] for f in dataclasses.fields(Lora))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": 0}, "Lora.rank must be at least 1, not 0"),
        ({"rank": 1.5}, "Lora.rank must be a whole number"),
        ({"alpha": 0.0}, "Lora.alpha must be above 0"),
        ({"dropout": 1.0}, r"Lora.dropout must be in \[0, 1\), not 1.0"),
        ({"dropout": -0.5}, "Lora.dropout must be in"),
        ({"target_modules": "("}, "Lora.target_modules is not a regular expression"),
        ({"target_modules": 3}, "Lora.target_modules must be a list"),
        ({"target_modules": ("qkv", 3)}, "Lora.target_modules must be text"),
    ],
)
def test_wrong_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Lora(**how)


# Where.


@pytest.mark.parametrize("name", QKV)
def test_by_default_it_goes_to_queries_keys_and_values(name: str) -> None:
    assert Lora().places(transformer(name)) == QKV[name]


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (["qkv"], QKV["timm"]),
        (["0.attn.qkv", "fc1"], ["blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.1.mlp.fc1"]),
        ([".qkv", "kv", "head"], []),  # whole parts of a name, and never the head
        (r".*\.1\..*(proj|fc2)", ["blocks.1.attn.proj", "blocks.1.mlp.fc2"]),
        (r"blocks\.0", []),  # a regular expression is for the whole name
        ("all-linear", [f"blocks.{i}.{n}" for i in (0, 1) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]),
    ],
)
def test_targets_are_those_of_peft(wanted: Any, places: list[str]) -> None:
    net = transformer("timm")
    assert Lora(target_modules=wanted).places(net) == places
    if places and wanted != "all-linear":  # which PEFT allows for transformers' own models only
        theirs = peft.get_peft_model(net, peft.LoraConfig(target_modules=wanted))
        found = {n.split(".lora_A")[0] for n, _ in theirs.named_parameters() if "lora_A" in n}
        assert found == {f"base_model.model.{p}" for p in places}


def test_the_head_gets_none_whichever_layer_it_is() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))
    assert Lora(target_modules="all-linear").places(net) == ["1"]
    assert Lora(target_modules="all-linear").places(net, "1") == ["2"]
    model = adapt(net, adapter=Lora(target_modules="all-linear"), head="1")
    assert "2.adapter.lora_A.weight" in model.initial().params
    assert "1.adapter.lora_A.weight" not in model.initial().params
    again = model.plain(model.initial())
    assert Lora(target_modules="all-linear").places(again, "1") == []


def test_a_network_without_targets() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"no linear layer .* is a target of LoRA: set Lora\.target_modules to") as e:
        adapt(net, adapter=Lora())
    assert "\n" not in str(e.value)


# What.


def test_a_new_adapter_adds_nothing_and_a_is_a_draw_of_seed_and_name() -> None:
    start = [adapt(transformer("ours"), adapter=Lora(rank=3), seed=s).initial().params for s in (5, 5, 6)]
    a = "blocks.0.attn.qkv.adapter.lora_A.weight"
    assert torch.equal(start[0][a], start[1][a])
    assert not torch.equal(start[0][a], start[2][a])
    assert not torch.equal(start[0][a], start[0][a.replace("0", "1", 1)])
    assert start[0][a].shape == (1, 3, WIDTH)
    assert float(start[0][a].abs().max()) <= WIDTH**-0.5
    assert not start[0][a.replace("lora_A", "lora_B")].any()


def peft_model(net: nn.Module, kind: Lora, state: State, head: str) -> nn.Module:
    """PEFT's own LoRA on the same network, with one lane's values."""
    norms = [n for n, m in net.named_modules() if isinstance(m, nn.LayerNorm)]
    config = peft.LoraConfig(
        r=kind.rank,
        lora_alpha=kind.alpha,
        lora_dropout=kind.dropout,
        target_modules=kind.places(net, head),
        modules_to_save=[*norms, head],
    )
    theirs = peft.get_peft_model(net, config)
    own = {n.replace(".default", "").replace("modules_to_save.", ""): p for n, p in theirs.named_parameters()}
    with torch.no_grad():
        for name, p in state.params.items():
            own[f"base_model.model.{name.replace('.adapter.', '.')}"].copy_(p[0])
    for name, p in theirs.named_parameters():  # PEFT adapts both layers of an nn.MultiheadAttention
        p.requires_grad_(p.requires_grad and "base_layer.out_proj" not in name)
    return theirs


# Linear layers in attention and MLP. The one within nn.MultiheadAttention is left out, as PEFT adds its LoRA twice.
WIDE = r".*(qkv|[qkvo]_proj|attn\.proj|fc\d|mlp\.\d|self_attention)"


@pytest.mark.parametrize("targets", ["default", "wide"])
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_pefts_own_lora(name: str, targets: str) -> None:
    """Logits, and every parameter after four steps of training, of each of three lanes at once."""
    kind = Lora(rank=3, alpha=5, target_modules=WIDE if targets == "wide" else ())
    _, model, start = lanes_of(name, kind, 3)
    head = next(n for n in model.group("output").params if n.endswith("weight")).removesuffix(".weight")
    images = torch.randn(4, 3, 6, 3, SIZE, SIZE, dtype=torch.float64)
    targets_ = torch.randint(CLASSES, (4, 3, 6))
    keys = torch.zeros(3, dtype=torch.int64)
    done = sgd(
        model,
        start,
        lambda step, lanes: Batch(images[step].flatten(0, 1), targets_[step], None, keys),
        cross_entropy,
        [0.1] * 3,
        [4] * 3,
    ).state
    for k in range(3):
        theirs = peft_model(transformer(name), kind, gather(start, [k]), head).eval()
        wanted = peft_model(transformer(name), kind, gather(done, [k]), head).eval()
        x = images[0, k]
        assert_close_norm(model(gather(start, [k]), x)[0], theirs(x), 1e-6)
        trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
        for i in range(4):
            loss = F.cross_entropy(theirs(images[i, k]), targets_[i, k])
            grads = torch.autograd.grad(loss, list(trained.values()))
            with torch.no_grad():
                for p, g in zip(trained.values(), grads, strict=True):
                    p -= 0.1 * g
        ours = dict(wanted.named_parameters())
        for n, p in trained.items():
            assert_close_norm(ours[n].detach(), p.detach(), 1e-6, n)
        assert sum(p.numel() for p in trained.values()) == model.initial().parameters_per_lane(), "as many as PEFT's"


def test_pefts_count_for_vit_small() -> None:
    made = backbone("vit_small_patch16", 10)
    model = adapt(made.net, adapter=Lora())
    theirs = peft.get_peft_model(made.net, peft.LoraConfig(r=8, target_modules=["qkv"]))
    counted = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert counted == group_sizes(model.module, model.groups)["adapter_modules"]["parameters"] == 147_456


def test_a_frozen_a_is_neither_trained_nor_sent() -> None:
    _, model, start = lanes_of("ours", Lora(rank=2, freeze_a=True), 2)
    assert not any("lora_A" in n for n in [*start.params, *model.group("everything").params])
    a = model.module.get_submodule("blocks.0.attn.qkv.adapter.lora_A").weight
    both = adapt(transformer("ours"), adapter=Lora(rank=2))
    assert torch.equal(a.float(), both.module.get_parameter("blocks.0.attn.qkv.adapter.lora_A.weight").float())
    assert len(start.params) == len(both.initial().params) - 2


# Merging and files.


@pytest.mark.parametrize("freeze_a", [False, True])
@pytest.mark.parametrize("name", QKV)
def test_merged_weights_compute_the_same(name: str, freeze_a: bool) -> None:
    kind = Lora(rank=2, target_modules="all-linear", freeze_a=freeze_a)
    net, model, state = lanes_of(name, kind)
    plain, x = model.plain(state), torch.randn(5, 3, SIZE, SIZE, dtype=torch.float64)
    merged = kind.merge(plain)
    with torch.no_grad():
        assert_close_norm(merged(x), plain(x), 1e-9)
        assert (plain(x) - net(x)).abs().max() > 1e-3, "the adapters do something"
        assert merged.state_dict().keys() == net.state_dict().keys()
        net.load_state_dict(merged.state_dict())
        assert_close_norm(net(x), plain(x), 1e-9)
    assert not any("adapter" in n for n, _ in merged.named_modules())
    assert any("adapter" in n for n, _ in plain.named_parameters()), "the network itself is not changed"


def exported(kind: Lora, model: LaneModel, state: State, head: str, folder: Path) -> Path:
    names = [*state.params, *state.buffers]
    folder.mkdir()
    for name, content in kind.export(model.plain(state), names, head).items():
        (folder / name).write_bytes(content)
    return folder


HEADS = {"ours": "head", "timm": "head", "torchvision": "heads.head"}


@pytest.mark.parametrize("targets", ["default", "wide"])
@pytest.mark.parametrize("name", ["ours", "timm", "torchvision"])
@pytest.mark.filterwarnings("ignore")  # PEFT's, about where the base model came from
def test_peft_loads_an_exported_adapter(name: str, targets: str, tmp_path: Path) -> None:
    kind = Lora(rank=2, alpha=3, target_modules=WIDE if targets == "wide" else ())
    net, model, state = lanes_of(name, kind)
    model.to("cpu", torch.float32)
    net, state = net.float(), state.map(Tensor.float)
    x = torch.randn(5, 3, SIZE, SIZE)
    folder = exported(kind, model, state, HEADS[name], tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(net, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(state, x)[0], rtol=0, atol=1e-5)
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_an_adapter_of_a_transformers_model(tmp_path: Path) -> None:
    """The whole way: a folder of `save_pretrained`, our backbone of that name, an adapter, and PEFT on their model."""
    theirs = of_transformers()
    theirs.save_pretrained(tmp_path / "vit")
    made = backbone(f"transformers:{tmp_path / 'vit'}", CLASSES, size=SIZE)
    report = made.load("transformers")
    assert report is not None
    assert not report.missing
    assert not report.unexpected
    assert made.head == "classifier"
    kind = Lora(rank=2, target_modules=["q_proj", "v_proj"])
    model = adapt(made.net, adapter=kind, head=made.head)
    state = noisy(model.initial())
    folder = exported(kind, model, state, made.head, tmp_path / "adapter")
    fresh = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "vit")
    loaded = peft.PeftModel.from_pretrained(fresh, folder).eval()
    x = torch.randn(5, 3, SIZE, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(made.net.eval()(x), theirs.eval()(pixel_values=x).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded(pixel_values=x).logits, model(state, x)[0], rtol=0, atol=1e-5)
        assert (made.net(x) - model(state, x)[0]).abs().max() > 1e-2, "the adapter does something"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"vit.layers.{i}.attention.{p}_proj" for i in (0, 1) for p in "qv"]


def test_what_pefts_format_cannot_hold() -> None:
    kind = Lora(rank=2)
    model = adapt(transformer("ours"), adapter=kind, trained="everything")
    with pytest.raises(InputError, match=re.escape("it has trained layers of the backbone (its own, ...)")):
        kind.export(model.plain(model.initial()), model.initial().params, "head")
    model = adapt(transformer("ours"), adapter=None, trained="output")
    with pytest.raises(InputError, match="it has no LoRA"):
        kind.export(model.plain(model.initial()), model.initial().params, "head")
    kind = Lora(target_modules="all-linear")
    model = adapt(transformer("torchvision"), adapter=kind)
    with pytest.raises(InputError, match=r"LoRA within nn\.MultiheadAttention .*which PEFT adds twice"):
        kind.export(model.plain(model.initial()), model.initial().params, "heads.head")


def test_pefts_sum_within_torchs_attention_is_wrong() -> None:
    """Why that is refused: PEFT adds the product of `out_proj` twice. When this test fails, allow the export."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    theirs = peft.get_peft_model(nn.ModuleDict({"a": layer}), peft.LoraConfig(r=1, lora_alpha=1, target_modules=["a"]))
    out = theirs.base_model.model["a"].base_layer.out_proj
    nn.init.normal_(out.lora_B["default"].weight)
    x = torch.randn(2, 3, 4)
    given = theirs.base_model.model["a"].base_layer.state_dict()
    plain = nn.MultiheadAttention(4, 2, batch_first=True)
    plain.load_state_dict({n.replace("base_layer.", ""): p for n, p in given.items() if "lora" not in n})
    with torch.no_grad():
        plain.out_proj.weight.add_(2 * out.get_delta_weight("default"))
        torch.testing.assert_close(plain(x, x, x)[0], theirs.base_model.model["a"](x, x, x)[0])
