"""Vision transformers in whole runs: from the command line, resumed, over Flower's messages, exported, and by the names
of timm, transformers and torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said, train
from flower.test_parity import assert_same, simulated
from flower.wire import make_world
from flower.wire import run as over_flower
from helpers import assert_same_tensors
from libraries import peft, timm, torchvision, transformers
from own_images import refused
from small import adapters, plain, small
from torch import nn

import perada
from perada.adapters import Bottleneck, Lora, Residual
from perada.config import Config, build, describe, resolve
from perada.errors import InputError
from perada.methods import name_of
from perada.models import Backbone, backbone
from perada.models.vit import SHAPES, Shape, ViT
from perada.report.facts import Holdings, _sizes

assert timm
assert torchvision

LORA: dict[str, Any] = {"model__weights": "random", "model__adapter": "lora", "model__rank": 2}


def tiny(classes: int) -> Backbone:
    """A named network for runs of a second. Its weights depend on the seed that `backbone` sets."""
    return Backbone(ViT(Shape(8, 1, 2), 8, 4, classes).apply(drawn), "head", mean=(0.5,) * 3, std=(0.5,) * 3)


def drawn(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, std=0.2)


TINY = {**LORA, "model__backbone": "models.test_transformers:tiny"}


def test_vit_tiny_trains_from_the_command_line(tmp_path: Path) -> None:
    """Distilled, reported and exported; what it counts is what the method sends."""
    how = {**LORA, "model__backbone": "vit_tiny_patch4", "train__rounds": 1, "train__cohort": 1, "distill__size": 16}
    assert train(tmp_path / "run", **how) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["distill"] is not None
    # LoRA of rank 2 on 12 fused qkv, 25 norms, the head
    sent = 12 * 2 * (192 + 576) + 25 * 2 * 192 + 192 * 10 + 10
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["parameters"] == {
        "trained": 2 * sent,
        "communicated": sent,
        "communicated_buffers": 0,
        "full": backbone_size("vit_tiny_patch4", 8),
    }
    run = perada.load(tmp_path / "run")
    assert run.config.model.strategy() == Lora(rank=2)
    assert run.model("client-00").pos_embed.shape == (1, 5, 192)


def test_a_run_that_is_not_done_is_counted_with_its_own_adapter(tmp_path: Path) -> None:
    how = {**LORA, "model__backbone": "vit_tiny_patch4", "train__rounds": 1, "train__cohort": 1, "distill__steps": 0}
    assert train(tmp_path / "run", **how) == 0
    known = json.loads((tmp_path / "run" / "summary.json").read_text())["parameters"]
    run = perada.load(tmp_path / "run")
    assert _sizes(run, {}, Holdings.of(run.federation)) == known


def backbone_size(name: str, size: int) -> int:
    return sum(p.numel() for p in backbone(name, 10, size=size).net.parameters())


@pytest.mark.parametrize("adapter", ["lora", "bottleneck"])
def test_a_resumed_run_is_the_run(adapter: str, tmp_path: Path) -> None:
    how = {**TINY, "model__adapter": adapter, "model__adapter_dropout": 0.2}
    assert train(tmp_path / "whole", **how, train__rounds=3) == 0
    assert train(tmp_path / "parts", **how, train__rounds=1) == 0
    assert train(tmp_path / "parts", "--resume", **how, train__rounds=3) == 0
    assert adapters(tmp_path / "parts") == adapters(tmp_path / "whole")
    run = perada.load(tmp_path / "whole")
    first, second = (run.model(c)(torch.zeros(1, 3, 8, 8)) for c in run.clients[:2])
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("perada", {}),
        ("perada", {"model__freeze_a": True, "model__target_modules": "all-linear"}),
        ("perada", {"model__adapter": "bottleneck"}),
        ("fedsa", {}),
        ("fedavg", {}),
    ],
)
def test_sites_over_flower_give_what_the_simulation_gives(
    method: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "vit_tiny", Shape(8, 1, 2))  # a plan may not name code of one's own
    how = {**LORA, "model__backbone": "vit_tiny_patch4", "train__rounds": 2, **more}
    world = make_world(tmp_path, method__name=method, **how)
    sim = simulated(world)
    path, _ = over_flower(world)
    assert_same(world, path, sim)


def test_sites_make_the_vit_of_a_plan_for_their_images(tmp_path: Path) -> None:
    how = {**LORA, "model__backbone": "vit_tiny_patch4", "train__rounds": 1, "train__cohort": 1, "distill__steps": 0}
    world = make_world(tmp_path, **how)
    sim = simulated(world)
    path, _ = over_flower(world)
    assert_same(world, path, sim)


# Settings.


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"model.adapter": "lora"}, Lora()),
        (
            {"model.adapter": "lora", "model.rank": 4, "model.alpha": 2, "model.target_modules": ["qkv", "proj"]},
            Lora(4, 2.0, ("qkv", "proj")),
        ),
        ({"model.adapter": "lora", "model.target_modules": "all-linear"}, Lora(target_modules="all-linear")),
        (
            {"model.adapter": "lora", "model.adapter_dropout": 0.1, "model.freeze_a": True},
            Lora(dropout=0.1, freeze_a=True),
        ),
        ({"model.adapter": "bottleneck"}, Bottleneck()),
        (
            {"model.adapter": "bottleneck", "model.reduction": 4, "model.where": "mlp", "model.adapter_dropout": 0.5},
            Bottleneck(4, 0.5, "mlp"),
        ),
        ({"model.adapter": "residual", "model.dropout": 0.1}, Residual(0.1)),
        ({"model.adapter": "none"}, None),
    ],
)
def test_keys_make_adapters_and_adapters_make_keys(words: dict[str, Any], wanted: Any) -> None:
    config = resolve("digits", words)
    assert config.model.strategy() == wanted
    again = Config(model=type(config.model)(**type(config.model).of(wanted)))
    assert again.model.strategy() == wanted


def test_keys_survive_a_file(tmp_path: Path) -> None:
    for value in (["qkv", "fc1"], "all-linear", r".*\.qkv"):
        config = resolve("digits", {"model.adapter": "lora", "model.target_modules": value})
        (tmp_path / "c.toml").write_text(config.toml())
        assert resolve(str(tmp_path / "c.toml")) == config


@pytest.mark.parametrize(
    ("set", "message"),
    [
        ("model.rank=0", "model.rank must be at least 1, not 0"),
        ("model.alpha=0", "model.alpha must be above 0"),
        ("model.adapter_dropout=1", "model.adapter_dropout must be in [0, 1), not 1.0"),
        ("model.target_modules=(", "model.target_modules is not a regular expression"),
        ("model.target_modules=[1]", "model.target_modules must be text"),
        ("model.target_modules=nowhere", "set model.target_modules to 'all-linear' or to names"),
        ("model.backbone=vit_tiny_patch3", "8 pixels do not divide into patches of 3"),
        ("model.backbone=vit_tiny_patch99", "a patch has 2 to 16 pixels per side"),
        ("model.adapter=residual", "or for a transformer the adapter lora or bottleneck"),
        ("model.weights=embedded", "no embedded weights for 'models.test_transformers:tiny'"),
    ],
)
def test_a_wrong_setting_is_one_line(
    set: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = [f"--set={k.replace('__', '.')}={v}" for k, v in TINY.items()]
    said = refused(capsys, "train", "digits", *how, f"--set={set}", "--out", str(tmp_path / "run"))
    assert message in said
    assert not (tmp_path / "run").exists()


def test_from_python(tmp_path: Path) -> None:
    config = small(**TINY, method__name="perada-no-kd", train__rounds=1)
    net, data = backbone(config.model.backbone, 10).net, build(config).federation
    exp = perada.Experiment(
        net,
        data,
        config.make_method(),
        adapter=perada.adapters.Lora(rank=3, target_modules=["fc1"]),
        train=config.train,
    )
    assert describe(exp).model.strategy() == Lora(rank=3, target_modules=("fc1",))
    run = exp.run(tmp_path / "run")
    again = perada.load(tmp_path / "run", model=net, federation=data)
    assert again.config.model.strategy() == exp.adapter
    client = run.clients[0]
    assert_same_tensors(again.model(client).state_dict(), run.model(client).state_dict())


def test_fedsa_is_known_by_name() -> None:
    method = resolve("digits", {"method.name": "fedsa"}).make_method()
    assert name_of(method) == {"name": "fedsa"}
    assert method.parts.withholds == "lora_b"


def test_a_run_says_that_fedbn_finds_no_batch_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", **TINY, method__name="fedbn", train__rounds=1) == 0
    line = "warning: this network has no batch norm parameters: no part of it is personal"
    assert line in capsys.readouterr().err
    assert train(tmp_path / "other", method__name="fedbn", train__rounds=1) == 0
    assert "no part of it is personal" not in capsys.readouterr().err


# Files.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> perada.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = plain({**TINY, "method__name": "perada-no-kd", "train__rounds": 1, "train__lr": 0.3})
    return perada.train("digits", set=settings, out=out)


@pytest.mark.filterwarnings("ignore")  # PEFT's, about where the base model came from
def test_the_command_exports_for_peft(trained: perada.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "wrote" in said(
        capsys, "export", str(trained.folder.path), "--client", "client-01", "--out", str(tmp_path / "a")
    )
    net = backbone("models.test_transformers:tiny", 10, trained.config.run.seed).net
    x = torch.randn(5, 3, 8, 8)
    before = net(x).detach()
    loaded = peft.PeftModel.from_pretrained(net, tmp_path / "a").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), trained.model("client-01")(x), rtol=0, atol=1e-5)
        assert (loaded(x) - before).abs().max() > 1e-3
        merged = Lora(rank=2).merge(trained.model("client-01"))
        torch.testing.assert_close(merged(x), loaded(x), rtol=0, atol=1e-5)


def test_programs_hold_the_adapters(trained: perada.Run, tmp_path: Path) -> None:
    import onnxruntime

    pictures = torch.randint(0, 256, (3, 8, 8, 1), dtype=torch.uint8).repeat(1, 1, 1, 3)  # grey, as the digits are
    x = trained.normalise(pictures.permute(0, 3, 1, 2)[:, :1])
    wanted = trained.model("client-01")(x).softmax(-1).detach()
    trained.export("client-01", tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(pictures), wanted, rtol=0, atol=1e-5)
    trained.export("client-01", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    np.testing.assert_allclose(session.run(None, {"images": pictures.numpy()})[0], wanted.numpy(), atol=1e-5)


def test_a_folder_is_for_lora_only(tmp_path: Path) -> None:
    settings = plain({**TINY, "model__adapter": "bottleneck", "train__rounds": 1, "distill__steps": 0})
    run = perada.train("digits", set=settings, out=tmp_path / "run")
    with pytest.raises(InputError, match="the name must end in"):
        run.export("client-01", tmp_path / "folder")
    run.export("client-01", tmp_path / "own.safetensors")
    assert not (tmp_path / "folder").exists()


# Other people's networks.


@pytest.mark.parametrize(
    ("name", "head", "size", "mean"),
    [
        ("timm:vit_tiny_patch16_224", "head", 224, (0.5,) * 3),
        ("timm:resnet10t", "fc", 176, (0.485, 0.456, 0.406)),
        ("torchvision:vit_b_32", "heads.head", 224, (0.485, 0.456, 0.406)),
    ],
)
def test_networks_by_the_names_of_libraries(name: str, head: str, size: int, mean: tuple[float, ...]) -> None:
    made = backbone(name, 5, size=64)
    assert (made.head, made.size, made.mean) == (head, size, mean)
    made.check((3, 64, 64), 5)


def test_a_kind_of_transformers_and_a_folder(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model("vit", image_size=16, patch_size=4, num_labels=3, **shape)
    config.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}'
    )
    made = backbone(f"transformers:{tmp_path / 'vit'}", 5, seed=1, size=8)
    assert (made.head, made.size, made.mean, made.std) == ("classifier", 8, (0.1, 0.2, 0.3), (1, 1, 1))
    made.check((3, 8, 8), 5)
    assert made.net.vit.embeddings.position_embeddings.shape == (1, 5, 8)
    again = backbone(f"transformers:{tmp_path / 'vit'}", 5, seed=1, size=8).net
    assert_same_tensors(made.net.state_dict(), again.state_dict())
    for name, message in {
        "no_such_kind": "transformers has no kind of model 'no_such_kind', and there is no such folder",
        "someone/nothing": "cannot read 'someone/nothing' as a folder or from its local cache",
    }.items():
        with pytest.raises(InputError, match=message):
            backbone(f"transformers:{name}", 5)


def test_a_transformers_folder_trains(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model("vit", image_size=8, patch_size=4, **shape)
    config.save_pretrained(tmp_path / "vit")
    settings = plain({**LORA, "model__backbone": f"transformers:{tmp_path / 'vit'}", "train__rounds": 1})
    run = perada.train("digits", set=settings, out=tmp_path / "run")
    assert torch.equal(
        perada.load(tmp_path / "run").model("client-01")(torch.zeros(1, 3, 8, 8)),
        run.model("client-01")(torch.zeros(1, 3, 8, 8)),
    )
