"""Small vision transformers: ours, timm's, transformers' and torchvision's, and torch's own encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from libraries import timm, torchvision, transformers
from torch import Tensor, nn

from perada.models.vit import Shape, ViT

SIZE, PATCH, WIDTH, CLASSES = 8, 4, 12, 4


def of_timm() -> nn.Module:
    return timm.models.VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=CLASSES
    )


def of_transformers() -> nn.Module:
    config = transformers.AutoConfig.for_model(
        "vit",
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=CLASSES,
    )
    return transformers.AutoModelForImageClassification.from_config(config)


class Logits(nn.Module):
    """transformers' network as one that gives logits, for tests without `perada.models`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = of_transformers()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def of_torchvision() -> nn.Module:
    net = torchvision.models.vision_transformer.VisionTransformer(
        image_size=SIZE,
        patch_size=PATCH,
        num_layers=2,
        num_heads=2,
        hidden_dim=WIDTH,
        mlp_dim=24,
        num_classes=CLASSES,
    )
    nn.init.normal_(net.heads.head.weight, std=0.1)  # zeros, when new
    return net


class Encoder(nn.Module):
    """Torch's own encoder layers, which have a fast path in eval mode that calls no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: ViT(Shape(WIDTH, 2, 2), SIZE, PATCH, CLASSES),
    "timm": of_timm,
    "transformers": Logits,
    "torchvision": of_torchvision,
    "torch": Encoder,
}


def transformer(name: str) -> nn.Module:
    """In float64, with weights of a usual size everywhere."""
    torch.manual_seed(0)
    net = TRANSFORMERS[name]().double().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net
