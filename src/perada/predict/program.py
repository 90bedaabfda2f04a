"""A personal model as one program: pictures of any shape in, probabilities out.

Pillow's bicubic scaling is two products with weights that depend on the picture's size. Pillow rounds the weights to
22 bits and the result of each product to a byte. In float64 all of that is exact, so the program sees the same pixels
as `data.read_image`.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.fit import LONGEST, Fit
from ..errors import InputError
from ..lanes import normalised

ONE = 1 << 22  # stands for 1 among the rounded weights
EXAMPLE = (2, 70, 90, 3)  # a batch of any size, to trace the program with
AXES = ("batch", "height", "width")


class Side(NamedTuple):
    """What happens to the rows or the columns of a picture."""

    first: Tensor  # that is used
    used: Tensor  # how many are
    scaled: Tensor  # to how many


class Program(nn.Module):
    """Takes uint8 `[batch, height, width, 3]`, red first, as Pillow has pictures; returns `[batch, classes]`."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        image: Sequence[int],
        fit: Fit,
        mean: Sequence[float],
        std: Sequence[float],
        multilabel: bool,
    ) -> None:
        """image: channels, height and width of what the network was trained on."""
        super().__init__()
        self.network, self.fit, self.multilabel = network, fit, multilabel
        self.channels, self.height, self.width = image
        dtype = next(network.parameters()).dtype
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=dtype).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.pixels(images)
        if self.channels == 1:
            pixels = (pixels.sum(1, keepdim=True) / 3).round()
        logits = self.network(normalised(pixels, self.mean, self.std))
        probabilities: Tensor = logits.sigmoid() if self.multilabel else logits.softmax(-1)
        return probabilities

    def pixels(self, images: Tensor) -> Tensor:
        """Returns what `fitted` in data/fit.py does, float64 `[batch, 3, height, width]`."""
        rows = torch.arange(images.shape[1], dtype=torch.float64, device=images.device)
        columns = torch.arange(images.shape[2], dtype=torch.float64, device=images.device)
        down, across = self._plan(rows[-1] + 1, columns[-1] + 1)
        planes = images.to(torch.float64).permute(0, 3, 1, 2)
        planes = _rounded(planes @ _weights(columns, across, self.width, 0))
        return _rounded(_weights(rows, down, self.height, 1) @ planes)

    def _plan(self, height: Tensor, width: Tensor) -> tuple[Side, Side]:
        """Returns what happens to the rows and to the columns of pictures of this shape."""
        used = height, width
        if self.fit == "crop":
            most = LONGEST * torch.minimum(height, width)
            used = torch.minimum(height, most), torch.minimum(width, most)
        ratios = self.height / used[0], self.width / used[1]
        chosen = torch.maximum(*ratios) if self.fit == "crop" else torch.minimum(*ratios)
        plans = []
        for all_, part, wanted in ((height, used[0], self.height), (width, used[1], self.width)):
            if self.fit == "stretch":
                scaled = torch.full_like(part, wanted)
            else:
                scaled = (part * chosen).round().clamp_min(wanted if self.fit == "crop" else 1)
            plans.append(Side(((all_ - part) / 2).floor(), part, scaled))
        return plans[0], plans[1]


def _weights(places: Tensor, side: Side, wanted: int, axis: int) -> Tensor:
    """Returns the share of each row (or column) in each of the `wanted` ones, times `ONE`.

    axis: that of the places: 1 is `[wanted, places]`, 0 `[places, wanted]`. A transposed matrix would do, too, but ONNX
    Runtime 1.20 fuses it into an operation that it does not have in float64.
    The middle of the scaled rows is kept. Where there are fewer than wanted, those around them have no weights.
    """
    first, used, scaled = side
    over = scaled - wanted
    at = torch.arange(wanted, dtype=places.dtype, device=places.device) + (over.abs() / 2).floor() * over.sign()
    at, places = (at[:, None], places[None, :]) if axis == 1 else (at[None, :], places[:, None])
    ratio = used / scaled
    reach = ratio.clamp_min(1.0)  # more than 1: antialiased
    centre = (at + 0.5) * ratio
    place = places - first
    low = (centre - 2 * reach + 0.5).floor().clamp_min(0)
    high = torch.minimum((centre + 2 * reach + 0.5).floor(), used)
    inside = (place >= low) & (place < high) & (at >= 0) & (at < scaled)
    weights = torch.where(inside, _cubic((place - centre + 0.5) * (1 / reach)), 0.0)
    total = weights.sum(axis, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total) * ONE
    return weights.sign() * (weights.abs() + 0.5).floor()


def _cubic(x: Tensor) -> Tensor:
    """Returns Keys' cubic convolution kernel with a = -1/2."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _rounded(sums: Tensor) -> Tensor:
    """Returns sums of bytes times weights as bytes."""
    return ((sums + ONE // 2) / ONE).floor().clamp(0, 255)


def compiled(program: Program, ending: str, notes: str) -> bytes:
    """Returns a program as the content of a .pt2 or .onnx file, with notes (JSON) in it."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own, about its insides
            axes = {at: torch.export.Dim(name, min=1) for at, name in enumerate(AXES)}
            example = torch.zeros(EXAMPLE, dtype=torch.uint8)
            traced = torch.export.export(program.eval(), (example,), dynamic_shapes=(axes,))
            if ending == ".pt2":
                buffer = io.BytesIO()
                torch.export.save(traced, buffer, extra_files={"perada.json": notes})
                return buffer.getvalue()
            names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"], "verbose": False}
            onnx = torch.onnx.export(traced, dynamo=True, **names)
            assert onnx is not None
            proto = onnx.model_proto
            _name_axes(proto)
            entry = proto.metadata_props.add()
            entry.key, entry.value = "perada", notes
            return bytes(proto.SerializeToString())
    except Exception as error:  # a network of one's own may do what cannot be traced
        first = next(iter(str(error).splitlines()), "")
        why = f"{type(error).__name__}: {first}"
        raise InputError(f"torch cannot write this network as a {ending} file ({why}): export .safetensors") from error
    finally:
        log.setLevel(level)


def _name_axes(proto: Any) -> None:
    """Gives the axes of an ONNX file that may have any length their names; torch numbers them."""
    (images,) = proto.graph.input
    names = {d.dim_param: name for d, name in zip(images.type.tensor_type.shape.dim, AXES, strict=False)}
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in names:
                axis.dim_param = names[axis.dim_param]
