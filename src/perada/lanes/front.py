"""The front of a network: what is frozen before anything is trained or mixes samples.

An image that is not augmented gives the same there, for every lane at every step, so it may be computed once and kept.
A `Prefix` is whole stages whose norms use their fixed statistics; its outputs are `Features`. Without a prefix, the
front may be the first layer alone, with the norm of each lane behind it: a `Stem`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, unknown

if TYPE_CHECKING:
    from .ops import Statistics

PIECE = {"cpu": 16}  # images in one pass of a prefix: with a fixed number an image's result depends on nothing else
PIECES = 256  # and elsewhere at most so many


@dataclass(frozen=True)
class Features:
    """Images behind a prefix; a model takes them instead of images."""

    values: Tensor  # [n, C, H, W]
    digest: str  # of the prefix that computed them


class Prefix:
    """The first stages of a network, frozen, with fixed statistics."""

    def __init__(self, stages: dict[str, nn.Module]) -> None:
        self.stages = stages
        self.module = nn.Sequential(*stages.values()).eval().requires_grad_(False)
        self._digest = ""

    @staticmethod
    def cut(module: nn.Module, start: str) -> Prefix:
        """Takes the stages before `start` out of `module`, where each leaves an identity; returns them.

        A network names its stages in the order of computing: `stages`. Those of an `nn.Sequential` are its children.
        """
        names = list(getattr(module, "stages", ()))
        if not names and isinstance(module, nn.Sequential):
            names = [name for name, _ in module.named_children()]
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(
                "this network does not name its stages, so none can be kept frozen: give it a class attribute "
                "`stages`, the names of its submodules in the order of computing, or leave adapt_from empty"
            )
        if start not in names[1:]:
            raise unknown("stage", start, names[1:])
        stages = {name: module.get_submodule(name) for name in names[: names.index(start)]}
        for name in stages:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, nn.Identity())
        return Prefix(stages)

    @staticmethod
    @torch.no_grad()
    def check(net: nn.Module, start: str, image: Sequence[int]) -> None:
        """Raises InputError if the network without its first stages, behind them, is not the network."""
        whole = copy.deepcopy(net).eval()
        rest = copy.deepcopy(whole)
        prefix, like = Prefix.cut(rest, start), next(whole.parameters())
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(2, *image, generator=draw).to(like)
        try:
            same = torch.allclose(rest(prefix(images).values), whole(images), rtol=1e-3, atol=1e-3)
        except RuntimeError:  # of shapes that do not fit
            same = False
        if not same:
            raise InputError(
                f"the stages before {start!r} are not where this network begins: its `stages` must be the names of "
                "submodules of which each gets the output of the one before"
            )

    def put_back(self, module: nn.Module) -> None:
        """Puts copies of the stages where they were."""
        for name, stage in self.stages.items():
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, copy.deepcopy(stage))

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the stages."""
        self.module.to(device=device, dtype=dtype)
        if device.type == "cuda":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._digest = ""

    @property
    def digest(self) -> str:
        """The sha256 of all that the outputs depend on besides the images."""
        if not self._digest:
            found = hashlib.sha256(f"{torch.__version__}\0{self.module}".encode())
            for name, tensor in self.module.state_dict().items():
                found.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                wide = tensor.cpu().contiguous()
                found.update((wide.float() if wide.dtype == torch.bfloat16 else wide).numpy().tobytes())
            self._digest = found.hexdigest()
        return self._digest

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Features:
        """Returns what the stages make of prepared images `[n, 3, H, W]`."""
        piece = PIECE.get(images.device.type)
        if piece is None:
            return Features(torch.cat([self.module(part) for part in torch.split(images, PIECES)]), self.digest)
        short = -len(images) % piece
        filled = torch.cat([images, images[-1:].expand(short, -1, -1, -1)]) if short else images
        return Features(
            torch.cat([self.module(part) for part in torch.split(filled, piece)])[: len(images)], self.digest
        )


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


Front = Tensor | Stem | Features
"""What a model takes: images, or what its front has made of them."""
