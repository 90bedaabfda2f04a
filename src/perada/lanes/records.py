"""The gradients of large matrices, sample by sample, without the gradients: what went into a layer and came back.

A linear layer's gradient of one sample is Gᵀ A, with A its inputs and G the slopes of its outputs. Its norm needs only
the small products A Aᵀ and G Gᵀ, and a weighted sum over samples is one product over all of them (Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost", ICML 2023). A convolution is the same with the
columns of its inputs. Everything here is computed in the precision of the lanes, because the bound on a sample's part
must hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LaneConv2d, LaneLinear
from .model import LaneModel

LARGE = 1 << 14  # numbers in a matrix from which it is worth it: smaller gradients are simply made
HALVES = 2**-15  # more than what `halves` adds to the square of a norm
SLACK = 8  # times the rounding of the largest norm that inputs and slopes allow


@dataclass
class Record:
    """One call of a layer with a matrix per lane."""

    inputs: Tensor  # [m, tokens, in]
    output: Tensor
    columns: bool = False  # whether the inputs are the columns of a convolution, larger than its images
    slopes: Tensor | None = None  # of the output: [m, tokens, out]

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Returns the squared norm of each sample's gradient, `[m]`; by rounding it is never too small."""
        a, g = self._wide(dtype)
        tokens, least = a.shape[1], SLACK * torch.finfo(dtype).eps * a.square().sum((1, 2)) * g.square().sum((1, 2))
        if 2 * tokens**2 <= a.shape[2] * g.shape[2]:
            found = (a @ a.transpose(1, 2) * (g @ g.transpose(1, 2))).sum((1, 2)).clamp_min(0.0)
        else:
            found = (g.transpose(1, 2) @ a).square().sum((1, 2))
        return found * (1 + HALVES if self.inputs.dtype == torch.bfloat16 else 1) + least

    def total(self, factors: Tensor, lanes: int) -> Tensor:
        """Returns each lane's sum of its samples' gradients times their factors `[m]`: `[k, out, in]`."""
        a, g = self._wide(factors.dtype)
        by = factors.view(-1, 1, 1)
        g, a = torch.where(by > 0, g * by, 0.0), torch.where(by > 0, a, 0.0)  # not finite where the factor is 0
        rows = a.reshape(lanes, -1, a.shape[2])
        parts = halves(g) if self.inputs.dtype == torch.bfloat16 else (g,)
        return torch.stack([p.reshape(lanes, -1, g.shape[2]).transpose(1, 2) @ rows for p in parts]).sum(0)

    def _wide(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self.slopes is not None
        return self.inputs.to(dtype), self.slopes.to(dtype)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two tensors of few digits whose sum is x to 16 bits: tensor cores multiply them with bfloat16 exactly."""
    high = x.to(torch.bfloat16).to(x.dtype)
    return high, (x - high).to(torch.bfloat16).to(x.dtype)


@contextmanager
def exact_products(compute: torch.dtype | None) -> Iterator[None]:
    """Keeps a GPU from rounding the factors of float32 products to 10 bits, by which a clipped gradient might grow.

    What was computed in bfloat16 has fewer bits anyway, and is multiplied on tensor cores.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = compute == torch.bfloat16
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@dataclass
class Recorder:
    """Takes down the calls of some layers in one pass."""

    records: dict[str, list[Record]] = field(default_factory=dict)  # by the name of the weight

    @contextmanager
    def watching(self, model: LaneModel, names: frozenset[str]) -> Iterator[None]:
        hooks = [
            layer.register_forward_hook(lambda m, x, y, n=f"{name}.weight": self._note(n, m, x[0], y))
            for name, layer in model.module.named_modules()
            if f"{name}.weight" in names
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if not y.requires_grad:  # the first layer: nothing before it is trained
            y = y.detach().requires_grad_()
        self.records.setdefault(name, []).append(Record(*_tokens(layer, x.detach(), y)))
        return y

    def finish(self, slopes: Sequence[Tensor | None]) -> dict[str, Record]:
        """Takes the slopes of the outputs, in their order; returns the records by name."""
        done = {}
        for (name, (record,)), slope in zip(self.records.items(), slopes, strict=True):
            g = torch.zeros_like(record.output) if slope is None else slope
            image = g.dim() == 4
            record.slopes = g.flatten(2).transpose(1, 2) if image else g.reshape(len(g), -1, g.shape[-1])
            record.output = g
            done[name] = record
        return done

    @property
    def outputs(self) -> list[Tensor]:
        return [record.output for (record,) in self.records.values()]


def _tokens(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns a layer's inputs as rows that its matrix multiplies, `[m, tokens, in]`; its output; whether the rows are
    columns."""
    if not isinstance(layer, LaneConv2d):
        return x.reshape(len(x), -1, x.shape[-1]), y, False
    if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        return x[:, :, :: layer.stride[0], :: layer.stride[1]].flatten(2).transpose(1, 2), y, False
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    return columns.transpose(1, 2), y, True


def candidates(model: LaneModel, names: list[str]) -> frozenset[str]:
    """Returns the trained matrices whose layers can be watched: large ones, that one layer alone has."""
    tied, found = {*model.shared, *model.shared.values()}, set()
    for name, layer in model.module.named_modules():
        weight = f"{name}.weight"
        if weight in names and weight not in tied and _watchable(layer):
            found.add(weight)
    return frozenset(found)


def _watchable(layer: nn.Module) -> bool:
    """Returns whether a layer's gradients follow from its inputs and slopes, and would be large or slow to make.

    On a GPU a k×k convolution of every sample with its own kernel is slow, whatever its size.
    """
    if not isinstance(layer, LaneConv2d):
        return type(layer) is LaneLinear and layer.weight.numel() >= LARGE
    usual = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    slow = layer.kernel_size != (1, 1) and layer.weight.is_cuda
    large = slow or layer.weight.numel() >= LARGE
    return usual and large and layer.adapter is None


def worth(records: dict[str, list[Record]]) -> frozenset[str]:
    """Returns the weights that were used once, and whose norms cost less this way than their gradients."""

    def cheap(record: Record) -> bool:
        (_, tokens, inputs), y = record.inputs.shape, record.output
        outputs = y.shape[1] if y.dim() == 4 else y.shape[-1]
        return record.columns or 2 * tokens**2 <= inputs * outputs

    return frozenset(n for n, each in records.items() if len(each) == 1 and cheap(each[0]))
