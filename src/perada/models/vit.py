"""Vision transformers with timm's parameter names and layout, so that its checkpoints load.

`vit_tiny` and `vit_small` (Dosovitskiy et al., 2021; Touvron et al., 2021) cut an image into square patches. A name may
end with the patch size, as in `vit_small_patch4`; without it the size follows from the image (`patch_for`). The
position embeddings are made for the run's image size. Those of a checkpoint for other images are resampled.
"""

import math
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..lanes import key_of


class Shape(NamedTuple):
    width: int
    depth: int
    heads: int


SHAPES = {"vit_tiny": Shape(192, 12, 3), "vit_small": Shape(384, 12, 6)}
NAME = re.compile(rf"({'|'.join(SHAPES)})(?:_patch(\d+))?")
SIZE = 224  # pixels per side where nobody says another: what timm's checkpoints have seen
MEAN = STD = (0.5, 0.5, 0.5)  # of the images that timm's checkpoints expect
PATCHES = range(2, 17)
POSITIONS = re.compile(r"(^|\.)pos(ition)?_embed(ding|dings)?$")  # timm, transformers and torchvision


def is_vit(name: str) -> bool:
    """Returns whether a name is one of these networks. Raises InputError for a patch size that there is not."""
    match = NAME.fullmatch(name)
    if match and match[2] and int(match[2]) not in PATCHES:
        raise InputError(f"backbone {name!r}: a patch has {PATCHES[0]} to {PATCHES[-1]} pixels per side")
    return bool(match)


def patch_for(size: int) -> int:
    """Returns the patch size of a name without one: 2 up to images of 16 pixels, 4 to 32, 8 to 96, and then 16."""
    return next((patch for most, patch in ((16, 2), (32, 4), (96, 8)) if size <= most), 16)


class Patches(nn.Module):
    """Cuts images into patches: `[n, 3, H, W]` -> `[n, tokens, width]`."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(n, tokens, width))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Predicts from the class token."""

    def __init__(self, shape: Shape, size: int, patch: int, classes: int) -> None:
        super().__init__()
        width, depth, heads = shape
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.patch_embed = Patches(patch, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def vit(name: str, classes: int, seed: int = 0, size: int | None = None) -> ViT:
    """Returns a randomly initialised network for images of `size` pixels per side, with timm's draws."""
    match = NAME.fullmatch(name)
    assert match is not None
    size = size or SIZE
    patch = int(match[2]) if match[2] else patch_for(size)
    if size % patch:
        fits = ", ".join(str(p) for p in PATCHES if size % p == 0) or "none: change DataOptions.size"
        raise InputError(f"backbone {name!r}: {size} pixels do not divide into patches of {patch}; what fits: {fits}")
    with torch.device("meta"):
        net = ViT(SHAPES[match[1]], size, patch, classes)
    net.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(key_of(seed, "backbone") & (2**63 - 1))
    nn.init.normal_(net.cls_token, std=1e-6, generator=draw)
    nn.init.trunc_normal_(net.pos_embed, std=0.02, generator=draw)
    for layer in net.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02, generator=draw)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Conv2d):
            bound = math.prod(layer.weight.shape[1:]) ** -0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator=draw)
            nn.init.uniform_(layer.bias, -bound, bound, generator=draw)  # type: ignore[arg-type]
    return net


def resampled(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Returns position embeddings `[1, tokens, width]` for as many tokens as `like` has; another tensor as it is.

    The grid of patches is resampled bicubically. What comes before it (the class token's embedding) stays.
    """
    if not POSITIONS.search(name) or tensor.dim() != 3 or tensor.shape == like.shape:
        return tensor
    for first in (1, 0):
        old, new = tensor.shape[1] - first, like.shape[1] - first
        sides = math.isqrt(max(old, 0)), math.isqrt(max(new, 0))
        if 0 not in sides and (sides[0] ** 2, sides[1] ** 2) == (old, new):
            grid = tensor[:, first:].transpose(1, 2).reshape(1, -1, sides[0], sides[0])
            grid = F.interpolate(grid, (sides[1], sides[1]), mode="bicubic", antialias=True, align_corners=False)
            return torch.cat([tensor[:, :first], grid.flatten(2).transpose(1, 2)], 1)
    return tensor
