"""The output of a frozen first layer. Images that are not augmented give the same for every lane at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from .ops import Statistics


@dataclass(frozen=True)
class Stem:
    """Chunks of images behind the first layer; a model takes it instead of images.

    A norm, ReLU and perhaps max pooling follow that layer. Norm and ReLU are monotone in every channel, so pooling may
    come first: of the windows' maxima where the norm's factor is positive, of their minima where it is negative. The
    norm's statistics are of all pixels before pooling.
    """

    ends: Tensor  # [N, 2, B, H, W, C]: maxima and minima; [N, 1, ...] without pooling
    moments: Tensor  # [N, 2, C]: mean and variance
    pixels: int  # how many pixels the moments are of
    number: Tensor  # int64 [K]: which chunk each lane sees

    @staticmethod
    @torch.no_grad()
    def of(x: Tensor, pool: nn.Module) -> Stem:
        """Returns one chunk from the layer's output `[B, C, H, W]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        ends = [x] if isinstance(pool, nn.Identity) else [pool(x), -pool(-x)]
        table = torch.stack([e.permute(0, 2, 3, 1) for e in ends])[None]
        number = torch.zeros(1, dtype=torch.int64, device=x.device)
        return Stem(table, torch.stack([mean, var])[None], x.numel() // x.shape[1], number)

    @staticmethod
    def joined(stems: Sequence[Stem]) -> Stem:
        """Returns the chunks of all stems, one after another."""
        return replace(stems[0], ends=torch.cat([s.ends for s in stems]), moments=torch.cat([s.moments for s in stems]))

    def seen(self, number: Tensor) -> Stem:
        """Returns the stem for lanes that see these chunks, int64 `[K]`."""
        return replace(self, number=number)

    def by(self, lanes: int) -> Stem:
        """Returns the stem for this many lanes, which all see the same chunk unless there is a number per lane."""
        return self if len(self.number) == lanes else replace(self, number=self.number.expand(lanes).contiguous())

    @property
    def bytes(self) -> int:
        return self.ends.numel() * self.ends.element_size()

    @property
    def device(self) -> torch.device:
        return self.ends.device

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of the first layer's pooled output for all lanes."""
        _, _, batch, height, width, channels = self.ends.shape
        return torch.Size((len(self.number) * batch, channels, height, width))

    def normed(self, affine: tuple[Tensor, Tensor], statistics: Statistics) -> Tensor:
        """Returns ReLU(norm(x)), pooled: `[K·B, C, H, W]`. affine `[K, C]`, or `[C]` where it is frozen."""
        running = statistics.mean, statistics.var
        mean, var = running if statistics.mode == "running" else self.moments[self.number].unbind(1)
        weight, bias = (t.to(mean.dtype) for t in affine)
        scale = weight * torch.rsqrt(var + statistics.eps)
        x = self.ends[self.number, 0]
        if self.ends.shape[1] == 2:
            x = torch.where(_spread(scale >= 0), x, self.ends[self.number, 1])
        y = F.relu((x - _spread(mean)) * _spread(scale) + _spread(bias.expand_as(mean)))
        if statistics.mode == "train":
            running[0].lerp_(mean, statistics.momentum)
            running[1].lerp_(var * (self.pixels / (self.pixels - 1)), statistics.momentum)
        return y.to(x.dtype).flatten(0, 1).permute(0, 3, 1, 2)


def _spread(per_lane: Tensor) -> Tensor:
    """Returns `[K, C]` as `[K, 1, 1, 1, C]`."""
    return per_lane[:, None, None, None]
