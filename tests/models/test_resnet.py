"""ResNets: names, parameter groups and the exact counts of SPEC section 4."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_tensors, build_backbone

from perada import adapt
from perada.errors import InputError
from perada.models import BACKBONES, count_groups
from perada.models.resnet import resnet


@pytest.mark.parametrize(
    ("name", "classes", "full", "adapter"),
    [
        ("resnet18", 10, 11_181_642, 1_413_258),
        ("resnet18", 65, 11_209_857, 1_441_473),
        ("resnet34", 65, 21_318_017, 2_578_625),
        # torchvision's 25,557,032; in 16 adapters 3·64² + 4·128² + 6·256² + 3·512² = 1,257,472 and 2·3776 = 7,552,
        # in norms 2·(64 + 3·(2·64 + 256) + 4·(2·128 + 512) + 6·(2·256 + 1024) + 3·(2·512 + 2048)) = 45,440,
        # in fc 2,049,000
        ("resnet50", 1000, 25_557_032, 3_359_464),
    ],
)
def test_the_counts_of_the_paper(name: str, classes: int, full: int, adapter: int) -> None:
    counts = count_groups(name, classes)
    assert counts["full"]["parameters"] == full
    assert counts["adapter"]["parameters"] == adapter


def test_the_groups_of_resnet18() -> None:
    # Channels of the norms: 64 in the stem, 4·(64+128+256+512) = 3840 in the blocks, 128+256+512 = 896 in the
    # downsamples. Each has a mean and a variance, so 2·4800 = 9600 buffers; the 3840 adapter channels, 7680.
    assert count_groups("resnet18", 10) == {
        "full": {"parameters": 11_181_642, "buffers": 9_600},
        # 1,400,320 + 7,808 + 5,130; the statistics of every norm travel along
        "adapter": {"parameters": 1_413_258, "buffers": 17_280},
        # 4·(64² + 128² + 256² + 512²) = 1,392,640 in the 1×1 weights, 2·3840 in the norms
        "adapter_modules": {"parameters": 1_400_320, "buffers": 7_680},
        "output": {"parameters": 5_130, "buffers": 0},  # 512·10 + 10
        # 2·(64 + 3840): the downsample norms' affines are not counted, their statistics are
        "batch_norm": {"parameters": 7_808, "buffers": 9_600},
        "feature_extractor": {"parameters": 11_176_512, "buffers": 9_600},  # 11,181,642 − 5,130
        "everything": {"parameters": 12_581_962, "buffers": 17_280},
        # 9,536 in the stem; 73,984 + 221,696 + 885,760 + 3,540,992 in the blocks' first convolutions and norms
        "input": {"parameters": 4_731_968, "buffers": 3_968},  # 2·(64 + 2·960)
    }


def test_what_partial_methods_send() -> None:
    model = adapt(resnet("resnet18", 10), trained="everything")
    size = {n: p.numel() for n, p in model.module.named_parameters()}

    def count(held: frozenset[str]) -> int:
        return sum(size[n] for n in held)

    group = model.group
    assert count((group("full") - group("input")).params) == 6_449_674  # FedAlt and FedSim, personal input
    assert count((group("everything") - group("adapter_modules")).params) == 11_181_642


def test_what_is_trained_with_the_adapters() -> None:
    trained = set(adapt(resnet("resnet18", 10)).initial().params)
    assert {"bn1.weight", "layer1.0.bn2.bias", "layer4.1.conv2.adapter.conv.weight", "fc.bias"} <= trained
    frozen = {"conv1.weight", "layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight", "layer1.0.conv1.weight"}
    assert not trained & frozen
    held = adapt(resnet("resnet18", 10)).initial().buffers
    assert "layer2.0.downsample.1.running_mean" in held, "downsample statistics are a lane's own all the same"


def test_the_input_group_is_the_first_convolution_of_every_block() -> None:
    held = adapt(resnet("resnet18", 10), adapter=None, trained="input").initial()
    blocks = [f"layer{i}.{j}." for i in range(1, 5) for j in range(2)]
    names = {f"{b}{n}" for b in ["", *blocks] for n in ("conv1.weight", "bn1.weight", "bn1.bias")}
    assert set(held.params) == names


def test_names_are_torchvisions() -> None:
    held = resnet("resnet18", 1000).state_dict()
    # Stem: conv1 and bn1's five (weight, bias, mean, variance, batches): 6. Eight blocks of two convolutions and
    # two norms, 12 each: 96. Three downsamples of a convolution and a norm: 18. fc: 2. Together 122.
    assert len(held) == 122
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "bn1.num_batches_tracked": (),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer1.1.bn2.bias": (64,),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.running_mean": (128,),
        "layer4.1.conv2.weight": (512, 512, 3, 3),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    }
    assert {n: tuple(held[n].shape) for n in shapes} == shapes
    assert not any("downsample" in n and n.startswith("layer1.") for n in held)
    # ResNet-34: 6 + 16·12 + 18 + 2
    assert len(resnet("resnet34", 1000).state_dict()) == 218


def test_resnet50_has_torchvisions_names() -> None:
    net = resnet("resnet50", 1000)
    held = net.state_dict()
    assert len(held) == 320  # 6 + 16 blocks of three convolutions and norms, 18 each, + 4 downsamples of 6 + 2
    shapes = {
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.conv2.weight": (64, 64, 3, 3),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.1.conv1.weight": (64, 256, 1, 1),
        "layer3.5.bn3.running_var": (1024,),
        "layer4.0.downsample.1.bias": (2048,),
        "fc.weight": (1000, 2048),
    }
    assert {n: tuple(held[n].shape) for n in shapes} == shapes
    strides = [net.get_submodule(f"layer2.0.conv{i}").stride for i in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)], "the 3×3 has the stride, as in torchvision"


def test_a_bottleneck_computes_what_its_paper_says() -> None:
    block = resnet("resnet50", 4, seed=1).eval().layer2[0]
    x = torch.randn(2, 256, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = block.bn1(block.conv1(x)).relu()
        y = block.bn2(block.conv2(y)).relu()
        y = (block.bn3(block.conv3(y)) + block.downsample(x)).relu()
        assert torch.equal(block(x), y)


@pytest.mark.parametrize(
    ("name", "pixels"), [("resnet8", 8), ("resnet8", 32), ("resnet18", 32), ("resnet34", 64), ("resnet50", 32)]
)
def test_shapes_and_finite_logits(name: str, pixels: int) -> None:
    with torch.no_grad():
        logits = resnet(name, 7).eval()(torch.randn(2, 3, pixels, pixels))
    assert logits.shape == (2, 7)
    assert bool(logits.isfinite().all())


def test_a_network_is_a_function_of_its_seed() -> None:
    torch.manual_seed(1)  # the global generator has no say
    a = resnet("resnet8", 4, seed=3).state_dict()
    torch.manual_seed(2)
    assert_same_tensors(a, resnet("resnet8", 4, seed=3).state_dict())
    assert not torch.equal(a["conv1.weight"], resnet("resnet8", 4, seed=4).state_dict()["conv1.weight"])
    fresh = resnet("resnet8", 4).state_dict()
    assert all(float(t.sum()) == 0.0 for n, t in fresh.items() if n.endswith(("running_mean", "num_batches_tracked")))
    assert all(bool((t == 1.0).all()) for n, t in fresh.items() if n.endswith("running_var"))


def test_backbones_by_name() -> None:
    assert {"resnet8", "resnet18", "resnet34", "resnet50"} <= set(BACKBONES)
    net, report = build_backbone("resnet8", 4, "random", seed=1)
    assert report is None
    assert_same_tensors(net.state_dict(), resnet("resnet8", 4, 1).state_dict())
    for make in (lambda: build_backbone("resnet81", 4, "random", 0), lambda: count_groups("resnet81", 4)):
        with pytest.raises(InputError, match="unknown backbone 'resnet81': did you mean 'resnet"):
            make()
