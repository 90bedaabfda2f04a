"""Networks of experiments, named as `experiments.networks:NAME`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from perada.models import Backbone, backbone
from perada.models.efficientnet import SCALES, EfficientNetLite

SIDE = 96  # pixels


class Enlarged(EfficientNetLite):
    """An EfficientNet-Lite that sees smaller images in 96 pixels: the data stay small, and so do public images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False))


def lite0_96(classes: int) -> Backbone:
    """Returns EfficientNet-Lite0 with its ImageNet weights, for images of any size."""
    made = backbone("efficientnet_lite0", classes)
    made.load("package")
    net = Enlarged(SCALES["efficientnet_lite0"], classes)
    net.load_state_dict(made.net.state_dict())
    return Backbone(net, made.head, SIDE, made.mean, made.std)
