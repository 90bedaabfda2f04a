"""Vision transformers: timm's names and values, exact counts, patches and positions for the run's images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors, build_backbone
from libraries import timm
from safetensors.torch import save_file

from perada import adapt
from perada.adapters import Bottleneck, Lora
from perada.errors import InputError
from perada.models import backbone, count_groups, group_sizes, known
from perada.models.vit import Shape, ViT, patch_for, resampled, vit


@pytest.mark.parametrize(
    ("name", "size", "patch"), [("vit_tiny", 32, 4), ("vit_small_patch8", 96, 8), ("vit_tiny_patch2", 8, 2)]
)
def test_it_computes_what_timms_own_class_does(name: str, size: int, patch: int) -> None:
    kind = name.removesuffix(f"_patch{patch}")
    theirs = timm.create_model(f"{kind}_patch16_224", num_classes=7, img_size=size, patch_size=patch)
    ours = backbone(name, 7, size=size).net
    assert [(n, t.shape) for n, t in ours.state_dict().items()] == [
        (n, t.shape) for n, t in theirs.state_dict().items()
    ], "the same keys in the same order"
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 3, size, size, dtype=torch.float64)
    assert_close_norm(ours.double().eval()(x), theirs.double().eval()(x), 1e-12)


def by_hand(width: int, depth: int, patch: int, tokens: int, classes: int) -> int:
    block = 2 * 2 * width + (width * 3 * width + 3 * width) + (width * width + width)
    block += (width * 4 * width + 4 * width) + (4 * width * width + width)
    patches = 3 * patch * patch * width + width
    return patches + width + (tokens + 1) * width + depth * block + 2 * width + width * classes + classes


def test_the_parameters_of_vit_small_patch16() -> None:
    # At 224 pixels 14² = 196 patches: 22,050,664 with 1,000 classes, as the paper's DeiT-S and timm have it.
    assert by_hand(384, 12, 16, 196, 1000) == 22_050_664
    counts = count_groups("vit_small_patch16", 1000)
    assert counts["full"] == {"parameters": 22_050_664, "buffers": 0}
    assert count_groups("vit_tiny", 10)["full"]["parameters"] == by_hand(192, 12, 16, 196, 10)
    head, norms, a, b = 384 * 1000 + 1000, 25 * 2 * 384, 12 * 8 * 384, 12 * 1152 * 8
    assert counts["adapter_modules"]["parameters"] == a + b == 147_456  # LoRA of rank 8 on 12 fused qkv
    assert counts["adapter"]["parameters"] == a + b + norms + head == 551_656
    assert counts["lora_b"]["parameters"] == b
    assert counts["batch_norm"]["parameters"] == 0
    assert counts["output"]["parameters"] == head
    # 3·16²·384 + 384 in the patches, 384 in the class token, 197·384 in the positions
    assert counts["input"]["parameters"] == 295_296 + 384 + 75_648


def test_the_parameters_of_other_adapters_on_vit_small() -> None:
    net = backbone("vit_small_patch16", 10).net
    whole = 12 * 8 * ((384 + 1152) + (384 + 384) + 2 * (384 + 1536))  # qkv, proj, fc1 and fc2
    count = {}
    for kind in (Lora(target_modules="all-linear"), Lora(freeze_a=True), Bottleneck()):
        model = adapt(net, adapter=kind)
        count[repr(kind)] = group_sizes(model.module, model.groups)["adapter_modules"]["parameters"]
    assert list(count.values()) == [whole, 12 * 1152 * 8, 24 * (2 * 384 * 24 + 24 + 384)]


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (16, 2), (28, 4), (32, 4), (64, 8), (96, 8), (97, 16), (224, 16)])
def test_the_patch_follows_from_the_image(size: int, patch: int) -> None:
    assert patch_for(size) == patch
    if size % patch == 0:
        assert vit("vit_tiny", 2, size=size).pos_embed.shape == (1, 1 + (size // patch) ** 2, 192)


def test_what_it_says_about_its_images() -> None:
    made = backbone("vit_small_patch4", 5, size=32)
    assert (made.head, made.size, made.mean, made.std) == ("head", 224, (0.5,) * 3, (0.5,) * 3)
    made.check((3, 32, 32), 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch1", "a patch has 2 to 16 pixels per side"),
        ("vit_small_patch17", "a patch has 2 to 16 pixels per side"),
        ("vit_tinny", "unknown backbone 'vit_tinny': did you mean 'vit_tiny'"),
        ("vit_tiny_patch", "unknown backbone"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        known(name)


def test_images_without_whole_patches() -> None:
    with pytest.raises(InputError, match="30 pixels do not divide into patches of 4; what fits: 2, 3, 5, 6, 10, 15"):
        backbone("vit_tiny", 3, size=30)


def test_first_weights_depend_on_the_seed_alone() -> None:
    a, b = (vit("vit_tiny", 3, seed, 8) for seed in (3, 4))
    assert_same_tensors(a.state_dict(), vit("vit_tiny", 3, 3, 8).state_dict())
    assert not torch.equal(a.cls_token, b.cls_token)
    assert abs(float(a.blocks[0].attn.qkv.weight.detach().std()) - 0.02) < 1e-3


def test_positions_of_other_images_are_resampled(tmp_path: Path) -> None:
    given = vit("vit_tiny_patch4", 3, size=16)
    save_file(given.state_dict(), tmp_path / "w.safetensors")
    made = backbone("vit_tiny_patch4", 3, size=24)
    report = made.load(str(tmp_path / "w.safetensors"))
    assert report is not None
    assert not report.missing
    wanted = timm.layers.resample_abs_pos_embed(given.pos_embed.detach(), [6, 6], num_prefix_tokens=1)
    torch.testing.assert_close(made.net.pos_embed.detach(), wanted)
    assert torch.equal(made.net.pos_embed[:, 0], given.pos_embed[:, 0]), "the class token's stays"
    with pytest.raises(InputError, match="needs"):  # patches of another size
        backbone("vit_tiny_patch2", 3, size=16).load(str(tmp_path / "w.safetensors"))


def test_only_square_grids_of_positions_are_resampled() -> None:
    odd = torch.zeros(1, 8, 4)
    assert resampled("pos_embed", odd, torch.zeros(1, 17, 4)) is odd
    assert resampled("weight", torch.zeros(1, 17, 4), torch.zeros(1, 5, 4)).shape == (1, 17, 4)
    assert resampled("encoder.pos_embedding", torch.zeros(1, 16, 4), torch.zeros(1, 4, 4)).shape == (1, 4, 4)


def test_groups_of_a_transformer() -> None:
    model = adapt(ViT(Shape(8, 1, 2), 8, 4, 3), adapter=Lora(rank=2))
    assert set(model.groups) == {
        *("full", "adapter", "adapter_modules", "output", "batch_norm", "feature_extractor", "everything"),
        *("input", "lora_b"),
    }
    assert model.group("input").params == {"cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    norms = {f"blocks.0.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")} | {"norm.weight", "norm.bias"}
    added = {f"blocks.0.attn.qkv.adapter.lora_{m}.weight" for m in "AB"}
    assert model.group("adapter").params == added | norms | {"head.weight", "head.bias"}
    assert model.group("lora_b").params == {"blocks.0.attn.qkv.adapter.lora_B.weight"}


def test_a_network_of_a_name_is_built_with_weights() -> None:
    net, report = build_backbone("vit_tiny", 3, "random", 0)
    assert report is None
    assert net.pos_embed.shape[1] == 197
