"""Other people's networks, small: without norms, with grouped convolutions, with bottlenecks, with odd paddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perada.models.resnet import Bottleneck, ResNet


class NoNorm(nn.Module):
    """A plain network: convolutions with biases as attributes, no batch norm, a hidden linear layer."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding="same")
        self.conv2 = nn.Conv2d(6, 8, 5, padding=2, stride=2)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.hidden = nn.Linear(8 * 4, 12)
        self.out = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv2(self.pool(self.relu(self.conv1(x)))))
        return self.out(torch.tanh(self.hidden(x.flatten(1))))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with norms: MobileNet's blocks."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)),
            self.block(6, 8, 1),
            self.block(8, 10, 2),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(10, classes))

    @staticmethod
    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Padded(nn.Module):
    """Every way to pad, even kernels, dilation, strides, groups of several channels, with and without biases."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 4, padding="same"),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(6, 6, (1, 3), padding=(0, 2), dilation=2, groups=3, padding_mode="circular", bias=False),
            nn.Tanh(),
            nn.Conv2d(6, 9, 2, padding="same", groups=3, padding_mode="replicate", dilation=3),
            nn.Tanh(),
            nn.Conv2d(9, 6, 3, padding="valid", stride=2, bias=False),
            nn.Tanh(),
            nn.Conv2d(6, 6, 1, groups=6),
        )
        self.fc = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


class GroupNormed(nn.Module):
    """Convolutions with group norms, as federated learning likes them, the second without a bias."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, 2, bias=False), nn.GroupNorm(4, 8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


def bottleneck(classes: int = 4) -> ResNet:
    """ResNet-50's layout: one block per stage, few channels."""
    return ResNet((1, 1), (4, 6), classes, small_stem=True, block=Bottleneck)


NETWORKS = {
    "no norm": NoNorm,
    "separable": Separable,
    "padded": Padded,
    "group norm": GroupNormed,
    "bottleneck": bottleneck,
}


def network(name: str) -> nn.Module:
    """In float64, with running statistics that are not a new norm's zeros and ones."""
    torch.manual_seed(0)
    net = NETWORKS[name]().double().train()
    with torch.no_grad():
        for _ in range(3):
            net(2.0 * torch.randn(16, 3, 8, 8, dtype=torch.float64))
    return net.eval()
