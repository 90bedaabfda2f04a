"""Networks of experiments, named as `experiments.networks:NAME`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from perada.models import Backbone, backbone
from perada.models.efficientnet import Stem

SIDE = 96  # pixels


class EnlargedStem(Stem):
    """The stem of a network that sees smaller images in 96 pixels: the data stay small, and so do public images.

    The first stage enlarges, so that what the frozen stages make of an image can be kept.
    """

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(F.interpolate(images, (SIDE, SIDE), mode="bilinear", align_corners=False))


def lite0_96(classes: int) -> Backbone:
    """Returns EfficientNet-Lite0 with its ImageNet weights, for images of any size."""
    made = backbone("efficientnet_lite0", classes)
    made.load("package")
    stem = EnlargedStem()
    stem.load_state_dict(made.net.get_submodule("stem").state_dict())
    made.net.stem = stem
    return Backbone(made.net, made.head, SIDE, made.mean, made.std)
