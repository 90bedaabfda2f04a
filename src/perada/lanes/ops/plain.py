"""Every operation in plain torch. This file says what each of them computes; `triton/` only does it faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import conv
from ..random import fold
from ..state import like

if TYPE_CHECKING:
    from ..front import Stem
    from ..layers import LaneBatchNorm, LaneConv2d, ResidualAdapter

Tensors = Sequence[Tensor]
Branch = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, Tensor], Tensor] | None
Colours = tuple[Tensor, Tensor]  # mean and standard deviation, [C, 1, 1]
Draws = tuple[int, int, int] | None
"""(salt, draws per sample, largest shift) of an augmentation that a kernel knows; None for any other."""


class Statistics(NamedTuple):
    """A norm's running statistics, `[K, C]` or `[C]` without lanes, and how they are used (`mode` is a `Norm`)."""

    mean: Tensor
    var: Tensor
    mode: str
    momentum: float
    eps: float


class Pulled(NamedTuple):
    """A pull towards centres: adds `strength (p − centre)` to the gradients.

    centres: one per parameter, `[K, ...]` or `[1, ...]` where all lanes share it.
    strength: `[K, 1]`.
    where: for parameters in one flat tensor, ones `[n]` where it pulls and zeros elsewhere; else None.
    """

    centres: Tensors
    strength: Tensor
    where: Tensor | None


class AdamPlan(NamedTuple):
    """Adam's settings. table `[steps, 2]`: each step's rate, which contains the first moments' bias correction, and the
    root of the second moments' correction."""

    table: Tensor
    betas: tuple[float, float]
    eps: float


class Change(NamedTuple):
    """New values that are written once it is known which lanes move."""

    total: Tensor  # [K]; a lane's change is finite if its total is
    write: Callable[[Tensor], None]  # takes bool [K]: which lanes move


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns uint8 images `[n, C, H, W]` normalised, in the type of `mean` `[C, 1, 1]`; grey in three channels."""
    return ((images.to(mean.dtype) / 255 - mean) / std).expand(-1, 3, -1, -1)


class Ops:
    """The operations of one device."""

    fast = False  # whether there are kernels

    def __init__(self) -> None:
        self.forms = conv.Forms()

    # Layers.

    def norm(self, x: Tensor, layer: LaneBatchNorm, add: Tensor | None = None, relu: bool = False) -> Tensor:
        """Returns ReLU(norm(x) + add); the sum and the ReLU only where asked for."""
        y = _norm_by_lane(x, layer.weight, layer.bias, layer.statistics)
        y = y if add is None else y + add
        return F.relu(y) if relu else y

    def norm_and_pool(self, x: Tensor, layer: LaneBatchNorm, pool: nn.Module) -> Tensor:
        """Returns pool(ReLU(norm(x)))."""
        return pool(self.norm(x, layer, relu=True))  # type: ignore[no-any-return]

    def stem_norm(self, stem: Stem, layer: LaneBatchNorm) -> Tensor:
        """Returns ReLU(norm(x)) of a stem, whose x is pooled already."""
        return stem.normed((layer.weight, layer.bias), layer.statistics)

    def adapter(self, x: Tensor, adapter: ResidualAdapter) -> Tensor:
        """Returns x + Conv1x1(Dropout(BN(x)))."""
        added: Tensor = adapter.conv(adapter.dropout(adapter.norm(x)))
        return x + added

    def conv(self, x: Tensor, layer: LaneConv2d, kernel: conv.Kernel | None = None) -> Tensor:
        """Returns lane k's images convolved with lane k's weight `[K, O, I, h, w]`, without the layer's bias."""
        return conv.lane_conv2d(x, layer.weight, layer.stride, layer.padding, layer.dilation, kernel)  # type: ignore[arg-type]

    def frozen_conv(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        """Returns all lanes' images convolved with the layer's one frozen weight, without its bias."""
        form = conv.best_form(x, layer)
        if form == "dense":
            return conv.dense_conv2d(x, layer, self.forms)
        if form == "1x1":
            return conv.strided_conv1x1(x, layer, self.forms)
        if form == "stem":
            return F.conv2d(self.blocks(x), conv.stem_weight(layer, self.forms))
        return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation)

    def blocks(self, x: Tensor) -> Tensor:
        """Returns colour images in blocks of 2×2 pixels, for the stem's convolution (`conv.stem_weight`)."""
        return conv.blocks(x)

    def side_by_side(self, less: Branch, more: Branch, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `less(x)` and `more(x)`; a GPU computes both at the same time if it has room."""
        return less(x), more(x)

    def join(self, device: torch.device) -> None:
        """Waits for work on a second stream, before its results are used."""

    # Losses, per sample.

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns losses `[...]` of logits `[..., classes]` and targets int64 `[...]`."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)

    def divergence(self, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns KL(teacher ‖ student) of logits `[..., classes]`, times T²: `[...]`."""
        t, s = teacher / temperature, student / temperature
        each = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
        return each.sum(-1) * temperature**2

    # Batches.

    def views(
        self, pool: Tensor, samples: Tensor, keys: Tensor, augment: Augment, draws: Draws, colours: Colours
    ) -> Tensor:
        """Returns images of the pool by number, `[k, B]`, augmented with the lanes' keys and normalised by mean and
        standard deviation: `[k·B, 3, H, W]`."""
        images = pool[samples.flatten()]
        return normalised(images if augment is None else augment(images, keys), *colours)

    def client_batch(
        self, index: Tensor, row: Tensor, keys: Tensor, targets: Tensor, lanes: Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what these lanes see at a step: sample numbers and targets `[k, B]`, and the lanes' keys `[k]`.

        index `[clients, steps, B]`; row and keys have one entry per lane; `step` is one number or a tensor `[k]`.
        """
        samples, folded = index[row[lanes], step], fold(keys[lanes], step)
        return samples, targets[samples], folded

    def chunk(self, step: int | Tensor, first: Tensor, key: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of the chunk seen at a step, counted from `first`; its targets; and the step's key."""
        at = step + first
        number = at % len(targets)
        return number, targets[number], fold(key, at)

    # Training steps. Parameters come as a list: one tensor per name, or a single flat one that holds them all.

    def sgd(
        self, params: Tensors, grads: Tensors, rates: Tensor, pull: Pulled | None, momentum: float, velocities: Tensors
    ) -> list[Change]:
        """Returns the changes p − rate · v, where v = momentum · v + g, and g includes the pull. rates `[K, 1]`."""
        changes = []
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            g = g.to(p.dtype)
            if pull is not None:
                towards = like(pull.strength, p) * (p - pull.centres[i])
                g = g + (towards if pull.where is None else towards * pull.where)
            if momentum:
                g = momentum * velocities[i] + g
                changes.append(self.replace(velocities[i], g))
            changes.append(self.replace(p, torch.addcmul(p, g, like(rates, p), value=-1.0)))
        return changes

    def adam(
        self, params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, done: Tensor, plan: AdamPlan
    ) -> list[Change]:
        """Returns the changes of one step of Adam; `done` `[K, 1]` counts the steps taken."""
        table, (one, two), eps = plan
        rate, root = table[done[:, 0].long().clamp(max=len(table) - 1)].unsqueeze(-1).unbind(1)
        changes = [self.replace(done, done + 1)]
        for p, g, first, second in zip(params, grads, firsts, seconds, strict=True):
            g = g.to(p.dtype)
            m = torch.lerp(first, g, 1 - one)
            v = torch.addcmul(second * two, g, g, value=1 - two)
            new = p - like(rate, p) * m / (v.sqrt() / like(root, p) + eps)
            changes += [self.replace(p, new), self.replace(first, m), self.replace(second, v)]
        return changes

    def replace(self, old: Tensor, new: Tensor) -> Change:
        """Returns the change of a state's tensor `[K, ...]` into a new one."""
        return Change(new.flatten(1).sum(1), lambda moves: self.write(old, new, moves))

    def write(self, old: Tensor, new: Tensor, moves: Tensor) -> None:
        """Writes the lanes of `new` that move over those of `old`."""
        old.copy_(torch.where(like(moves, new), new, old))  # not a product with a mask: 0·NaN is NaN

    def settle(
        self, counts: Tensor, at: Tensor, finite: Tensor, losses: Tensor, total: Tensor, trace: Tensor
    ) -> Tensor:
        """Returns which lanes move, bool `[k]`: they have steps left, and their loss and total are finite.

        Also writes the losses into `trace`, counts the step in `at`, and clears `finite` where a lane failed.
        """
        going = counts > at
        moves = going & finite & losses.isfinite() & total.isfinite()
        finite.logical_and_(~going | moves)
        trace[at, torch.arange(len(counts), device=at.device)] = torch.where(going, losses, torch.nan)
        at += going
        return moves

    # Compiling.

    def get_ready(self, device: torch.device) -> None:
        """Starts the processes that compile kernels. They need seconds to start, so call this early."""

    def compile(self, work: Callable[[], Any]) -> None:
        """Compiles the kernels that `work` starts, by a call of it that computes nothing."""


def _norm_by_lane(x: Tensor, weight: Tensor, bias: Tensor, s: Statistics) -> Tensor:
    if s.mean.dim() == 1:
        return _normalised(x, weight, bias, s)
    lanes, channels = s.mean.shape
    if x.is_cuda and s.mode == "running":  # a transpose would cost more than the formula
        scale = weight * torch.rsqrt(s.var + s.eps)
        shift = bias - s.mean * scale
        form = (lanes, 1, channels, *([1] * (x.dim() - 2)))
        y = x.reshape(lanes, -1, *x.shape[1:]) * scale.to(x.dtype).view(form) + shift.to(x.dtype).view(form)
        return y.flatten(0, 1)
    # F.batch_norm keeps statistics per channel: K lanes of C channels are K·C channels.
    wide = x.reshape(lanes, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)  # [B, K·C, ...]
    weight, bias = (t.expand(lanes, channels).reshape(-1) for t in (weight, bias))
    mean, var = s.mean.reshape(-1), s.var.reshape(-1)
    y = _normalised(wide, weight, bias, s._replace(mean=mean, var=var))
    if s.mode == "train" and not s.mean.is_contiguous():  # then `reshape` made copies
        s.mean.copy_(mean.view(lanes, channels))
        s.var.copy_(var.view(lanes, channels))
    return y.view(-1, lanes, channels, *y.shape[2:]).transpose(0, 1).flatten(0, 1)


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, s: Statistics) -> Tensor:
    weight, bias = weight.to(s.mean.dtype), bias.to(s.mean.dtype)  # statistics may have more precision than x
    mean, var = (None, None) if s.mode == "batch" else (s.mean, s.var)
    return F.batch_norm(x, mean, var, weight, bias, s.mode != "running", s.momentum, s.eps)
