"""ResNets with torchvision's parameter names, so that its checkpoints load.

`resnet18`, `resnet34` and `resnet50` (He et al., 2016) keep the ImageNet stem at every image size, as the paper does.
`resnet8` is for images of 8 to 32 pixels: a 3×3 stem, no pooling, three stages of one block.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lanes import LaneBatchNorm, Stem, key_of, ops_for

Net = TypeVar("Net", bound=nn.Module)


def normed(norm: nn.Module, x: Tensor, add: Tensor | None = None) -> Tensor:
    """Returns ReLU(norm(x) + add), which a lane-aware norm computes at once."""
    if isinstance(norm, LaneBatchNorm):
        return norm(x, add, relu=True)  # type: ignore[no-any-return]
    y: Tensor = norm(x)
    return F.relu(y if add is None else y + add)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """Returns the convolution of a block's shortcut; None where the block keeps its input's shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def joined(norm: nn.Module, path: Callable[[Tensor], Tensor], short: nn.Module | None, x: Tensor) -> Tensor:
    """Returns ReLU(norm(path(x)) + short(x))."""
    if short is None:
        return normed(norm, path(x), x)
    less, more = ops_for(x.device).side_by_side(short, path, x)
    return normed(norm, more, less)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions."""

    widening = 1  # channels that come out, as a multiple of the width

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return joined(self.bn2, self._path, self.downsample, x)

    def _path(self, x: Tensor) -> Tensor:
        return self.conv2(normed(self.bn1, self.conv1(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1; the 3×3 has the stride, as in torchvision."""

    widening = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.downsample = shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return joined(self.bn3, self._path, self.downsample, x)

    def _path(self, x: Tensor) -> Tensor:
        y = normed(self.bn2, self.conv2(normed(self.bn1, self.conv1(x))))
        return self.conv3(y)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Stages of blocks; every stage but the first halves the resolution."""

    stem = "conv1", "maxpool"  # may be applied beforehand: see LaneModel.front

    def __init__(
        self,
        blocks: tuple[int, ...],
        widths: tuple[int, ...],
        classes: int,
        small_stem: bool,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_stem else (7, 2)
        self.conv1 = nn.Conv2d(3, widths[0], kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.layers = [f"layer{i + 1}" for i in range(len(blocks))]
        inputs = widths[0]
        for i, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            stage = nn.Sequential()
            for j in range(count):
                stage.append(block(inputs, width, 2 if i and j == 0 else 1))
                inputs = block.widening * width
            self.add_module(f"layer{i + 1}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of its parts in the order of computing. ReLU may follow a ReLU where the first are cut off."""
        return ("conv1", "bn1", "relu", "maxpool", *self.layers)

    def forward(self, images: Tensor | Stem) -> Tensor:
        x: Any = images if isinstance(images, Stem) else self.conv1(images)
        if isinstance(self.bn1, LaneBatchNorm):
            x = self.bn1.and_pool(x, self.maxpool)
        else:
            x = self.maxpool(normed(self.bn1, x))
        for name in self.layers:
            x = self.get_submodule(name)(x)
        if x.shape[2:] != (1, 1):
            x = self.avgpool(x)
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, type[BasicBlock] | type[Bottleneck]]] = {
    "resnet8": ((1, 1, 1), (16, 32, 64), True, BasicBlock),
    "resnet18": ((2, 2, 2, 2), (64, 128, 256, 512), False, BasicBlock),
    "resnet34": ((3, 4, 6, 3), (64, 128, 256, 512), False, BasicBlock),
    "resnet50": ((3, 4, 6, 3), (64, 128, 256, 512), False, Bottleneck),
}


def drawn(net: Net, seed: int) -> Net:
    """Returns a network of the device "meta" on the CPU, with first weights that depend on the seed alone.

    Convolutions have He's normal draw, as in torchvision.
    """
    net.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(key_of(seed, "backbone") & (2**63 - 1))
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=draw)
            if layer.groups > 1:  # torch counts the outputs of all groups
                layer.weight.data.mul_(layer.groups**0.5)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator=draw)
            nn.init.uniform_(layer.bias, -bound, bound, generator=draw)
    return net


def resnet(name: str, classes: int, seed: int = 0) -> ResNet:
    """Returns a randomly initialised network."""
    blocks, widths, small_stem, block = SHAPES[name]
    with torch.device("meta"):
        net = ResNet(blocks, widths, classes, small_stem, block)
    return drawn(net, seed)
