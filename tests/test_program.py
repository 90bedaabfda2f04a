"""The program of an exported model: it sees the pixels that `read_image` reads, and says what the network says."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from perada.data import read_image
from perada.data.fit import LONGEST, Fit, fitted
from perada.errors import InputError
from perada.models.resnet import resnet
from perada.predict.program import Program, compiled

RNG = np.random.default_rng(17)
SIDES = (1, 2, 7, 16, 33, 100)
FITS: tuple[Fit, ...] = ("crop", "pad", "stretch")


def program(fit: Fit, height: int = 16, width: int = 16, channels: int = 3, multilabel: bool = False) -> Program:
    net = resnet("resnet8", 5).eval()
    return Program(net, (channels, height, width), fit, [0.4] * channels, [0.3] * channels, multilabel).eval()


def picture(height: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("height", "width"), [(16, 16), (13, 13), (12, 31)])
def test_the_pixels_are_the_same_bit_for_bit(fit: Fit, height: int, width: int) -> None:
    made = program(fit, height, width)
    long = LONGEST + 3
    for shape in [*itertools.product(SIDES, SIDES), (5, 5 * long), (5 * long, 5), (480, 640), (641, 479)]:
        pixels = picture(*shape)
        found = made.pixels(torch.from_numpy(pixels)[None])[0].numpy()
        wanted = fitted(Image.fromarray(pixels), height, width, fit)
        assert np.array_equal(found, wanted), (shape, np.abs(found - wanted).max())


def test_extremes_are_cut_off_as_bytes_are() -> None:
    """Cubic weights are negative, too: black beside white would go below 0 and above 255."""
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:, 20:] = pixels[5:15, 5:15] = 255
    for side in (16, 100):
        found = program("crop", side, side).pixels(torch.from_numpy(pixels)[None])[0].numpy()
        assert np.array_equal(found, fitted(Image.fromarray(pixels), side, side, "crop"))
        assert found.min() == 0
        assert found.max() == 255


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_probabilities_are_the_networks(channels: int, multilabel: bool, tmp_path: Path) -> None:
    made, paths = program("crop", channels=channels, multilabel=multilabel), []
    for i in range(4):
        Image.fromarray(picture(30, 22)).save(tmp_path / f"{i}.png")
        paths.append(tmp_path / f"{i}.png")
    pixels = np.stack([read_image(p, 16) for p in paths]).astype(np.float64)
    if channels == 1:
        pixels = np.rint(pixels.mean(1, keepdims=True)).repeat(3, 1)
    ready = torch.from_numpy((pixels / 255 - 0.4) / 0.3).float()
    with torch.no_grad():
        logits = made.network(ready)
        found = made(torch.from_numpy(np.stack([np.array(Image.open(p)) for p in paths])))
    wanted = 1 / (1 + (-logits).exp()) if multilabel else logits.exp() / logits.exp().sum(-1, keepdim=True)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_an_onnx_file_names_its_axes() -> None:
    proto = onnx.load_model_from_string(compiled(program("pad"), ".onnx", '{"a": 1}'))
    onnx.checker.check_model(proto)
    ((images,), (out,)) = (proto.graph.input, proto.graph.output)
    sides = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (images, out)]
    assert sides == [["batch", "height", "width", 3], ["batch", 5]]
    assert (images.name, out.name) == ("images", "probabilities")
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert {p.key: p.value for p in proto.metadata_props} == {"perada": '{"a": 1}'}


class Moody(nn.Module):
    """Does something else for every picture, which cannot be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 0:
            return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]
        return -self.head(x.amax((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ending", [".pt2", ".onnx"])
def test_a_network_that_cannot_be_written_is_one_line(ending: str) -> None:
    made = Program(Moody(), (3, 16, 16), "crop", [0.5] * 3, [0.5] * 3, False)
    with pytest.raises(InputError, match=f"torch cannot write this network as a {ending} file") as error:
        compiled(made, ending, "{}")
    assert "\n" not in str(error.value)
