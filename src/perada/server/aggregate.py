"""How the server makes one state of many uploads: by the mean, or by a rule that a hostile minority cannot lead far.

- `mean`: the plain mean, as in the methods' papers. One upload can move it anywhere.
- `norm_clip`: the mean of uploads whose distance from the broadcast is at most 1.2 times the median distance. The
  median is over this round's clients and the medians of the last rounds. Parameters, running statistics and each
  joined part (SCAFFOLD's control variates) are clipped separately. An upload whose parameters are more than 3 times as
  far away as this round's median is left out: no honest client was beyond 1.4 times (digits, very unlike clients),
  and its direction would still count as much as an honest one's after clipping.
- `trimmed_mean`: coordinate by coordinate, the mean without the largest and the smallest values (Yin et al.,
  "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018).
- `median`: the trimmed mean that keeps the one or two values in the middle.

With every rule but the mean, a running variance that is not positive is replaced by the broadcast's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..lanes import State, gather, like, mean, sent
from .checks import variances

Kind = Literal["mean", "norm_clip", "trimmed_mean", "median"]
Norms = Mapping[str, Sequence[float]]  # by part: the median distances of the last rounds

CLIP = 1.2  # times the median: docs/methods.md has the comparison with 1 and 1.5
FAR = 3.0  # times the median
HISTORY = 10  # rounds whose medians are remembered
SHARE = 2.0  # samples that count, as a multiple of the cohort's median, where uploads are clipped
ABSURD = 1e6  # a loss that no model has: 14 is a probability of one in a million
DOUBTFUL = 100.0  # honest judges' differences were at most 5 times the median (digits, 20 unlike clients)


@dataclass(frozen=True)
class Admission:
    """The uploads as they take part in the round."""

    states: State
    left_out: Mapping[int, str]  # the lanes of `uploads` that do not, and why
    norms: Mapping[str, list[float]]  # the medians to remember


@dataclass(frozen=True)
class Rule:
    """`Train.aggregate` and `Train.trim`."""

    kind: Kind = "mean"
    trim: float = 0.2  # share of the clients that a trimmed mean leaves out, at each end

    def of_lanes(self, tensor: Tensor) -> Tensor:
        """Returns `[1, ...]` of `[K, ...]`: the mean, trimmed mean or median over lanes."""
        if self.kind in ("mean", "norm_clip"):
            return tensor.mean(0, keepdim=True)
        return trimmed_mean(tensor, self.left_out(len(tensor)))

    def left_out(self, lanes: int) -> int:
        """Returns how many values are left out at each end: of few clients more than the share, rather than none."""
        most = (lanes - 1) // 2
        return most if self.kind == "median" else min(most, math.ceil(self.trim * lanes - 1e-9))

    def mean(self, state: State, weights: Sequence[float] | None = None) -> State:
        """Returns one lane of many. weights: one per lane; only means that take every lane have any."""
        if self.kind in ("mean", "norm_clip"):
            return mean(state, weights)
        return state.map(self.of_lanes)

    def admit(self, uploads: State, reference: State, norms: Norms) -> Admission:
        """Returns the uploads as they take part in the round. reference: one lane, what they are compared with."""
        if self.kind == "mean":
            return Admission(uploads, {}, {})
        uploads = positive(uploads, reference)
        return clipped(uploads, reference, norms) if self.kind == "norm_clip" else Admission(uploads, {}, {})

    def weights(self, samples: Sequence[float] | None) -> Sequence[float] | None:
        """Returns the weights of the mean. Where uploads are clipped, a client counts at most twice the median."""
        if samples is None or self.kind != "norm_clip":
            return samples
        most = SHARE * float(torch.tensor(samples, dtype=torch.float64).median())
        return [min(n, most) for n in samples]

    def losses(self, losses: Tensor, finite: Tensor) -> Tensor | None:
        """Returns a loss per candidate from `[candidates, judges]`, to compare them; None if no judge has an opinion.

        finite: which candidates are. The first candidate is what the others are compared with.
        """
        valid = losses.abs() <= ABSURD
        losses, valid = losses[:, valid[0]], valid[:, valid[0]]  # others have no data
        if not losses.shape[1]:
            return None
        usable = finite & (2 * valid.sum(1) >= valid.shape[1])  # else it diverged, or as good as
        usable[0] = True
        losses = losses[:, valid[usable].all(0)]  # a judge that skips a candidate has no opinion
        if not losses.shape[1]:
            return None
        gains = (losses - losses[0]).masked_fill(~usable[:, None], 0)
        spread = gains.abs().amax(0)
        if self.kind == "mean":
            believed = (spread <= DOUBTFUL * spread.median()) | (spread.median() == 0)
            scores = losses[:, believed].mean(1)
        else:
            if self.kind == "norm_clip":
                gains = gains * shrink(spread, spread.median())
            scores = losses[0].median() + self.of_lanes(gains.T)[0]
        return scores.masked_fill(~usable, torch.inf)


MEAN = Rule()


def trimmed_mean(tensor: Tensor, left_out: int) -> Tensor:
    """Returns the mean over lanes, `[1, ...]`, without the `left_out` largest and smallest values of a coordinate."""
    if not left_out:
        return tensor.mean(0, keepdim=True)
    return tensor.sort(0).values[left_out : len(tensor) - left_out].mean(0, keepdim=True)


def shrink(norms: Tensor, bound: Tensor) -> Tensor:
    """Returns the factors, at most 1, that bring these norms down to the bound."""
    return torch.where(norms > bound, bound / norms, torch.ones_like(norms))


def positive(uploads: State, reference: State) -> State:
    """Returns the uploads with the reference's value in place of a running variance that is not positive."""
    names = variances(uploads)
    fixed = {n: torch.where(uploads.buffers[n] > 0, uploads.buffers[n], reference.buffers[n]) for n in names}
    return State(uploads.params, {**uploads.buffers, **fixed})


def parts(state: State) -> dict[str, list[str]]:
    """Returns the names that are clipped together: `params` and `buffers`, and such with a key for joined states."""
    out: dict[str, list[str]] = {}
    for kind, tensors in (("params", state.params), ("buffers", state.buffers)):
        for name in tensors:
            key = name.rpartition("/")[0]
            out.setdefault(f"{kind}/{key}" if key else kind, []).append(name)
    return out


def clipped(uploads: State, reference: State, norms: Norms) -> Admission:
    """Clips every part of the uploads, and leaves out those whose parameters are far away.

    Of an even number the lower of the two in the middle is the median, so that of two clients neither sets the bound.
    On a GPU this waits once, for the distances.
    """
    new = {"params": dict(uploads.params), "buffers": dict(uploads.buffers)}
    old = {"params": reference.params, "buffers": reference.buffers}
    names, squares, remembered = parts(uploads), list[Tensor](), dict[str, list[float]]()
    for part, own in names.items():
        kind = part.partition("/")[0]
        each = [(new[kind][n] - old[kind][n]).double().flatten(1).square().sum(1) for n in own]
        squares.append(torch.stack(each).sum(0))
    distances = dict(zip(names, torch.stack(squares).sqrt().cpu(), strict=True))
    for part, own in names.items():
        kind, before, d = part.partition("/")[0], [float(x) for x in norms.get(part, ())], distances[part]
        remembered[part] = [*before, float(d.median())][-HISTORY:]
        factors = shrink(d, CLIP * torch.cat([d, d.new_tensor(before)]).median())
        for n in (n for n in own if new[kind][n].is_floating_point()):
            tensor, by = new[kind][n], sent(factors.to(new[kind][n].dtype), new[kind][n].device)
            by = like(by, tensor)
            new[kind][n] = torch.where(by < 1, old[kind][n] + by * (tensor - old[kind][n]), tensor)
    states, left_out = State(new["params"], new["buffers"]), far_away(distances.get("params"))
    if left_out:
        states = gather(states, [k for k in range(states.lanes) if k not in left_out])
    return Admission(states, left_out, remembered)


def far_away(distances: Tensor | None) -> dict[int, str]:
    """Returns the lanes that moved much further than the median, in words; always fewer than half of all.

    Of an even number the upper of the two in the middle is the median: of two honest clients neither is left out.
    """
    if distances is None:
        return {}
    times = (distances / distances.sort().values[len(distances) // 2]).tolist()
    return {
        k: f"its update is {x:.3g} times as long as the median" for k, x in enumerate(times) if x > FAR and x < math.inf
    }
