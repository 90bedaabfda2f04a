"""How the server makes one state of many uploads: by the mean, or by a rule that limits what a hostile minority can do.

- `mean`: the plain mean, as in the methods' papers. One upload can move it anywhere.
- `norm_clip`: the mean of uploads whose distance from the broadcast is at most 1.2 times the median distance, over this
  round's clients and the medians of the last rounds. Parameters, running statistics and each joined part (SCAFFOLD's
  control variates) are clipped separately. An upload whose parameters are more than 20 times as far away as that median
  is left out. The factor is that high because an honest update grows with the client's number of steps. From 3 times on
  an upload is left out if it also points against the sum of the others: then clipping alone costs too much.
- `trimmed_mean`: coordinate by coordinate, the mean without the largest and the smallest values (Yin et al.,
  "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018).
- `median`: the trimmed mean that keeps the one or two values in the middle.

With every rule but the mean, a running variance that is not positive is replaced by the broadcast's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..lanes import State, gather, like, mean, sent
from .checks import MIN_OTHERS, by_key, variances

Kind = Literal["mean", "norm_clip", "trimmed_mean", "median"]
Norms = Mapping[str, Sequence[float]]  # by part: the median distances of the last rounds

CLIP = 1.2  # times the median: docs/methods.md has the comparison with 1 and 1.5
FAR = 20.0  # times the median: a client with six times the images of the others was at 4 times
LONG = 3.0  # times the median, where the direction decides
HISTORY = 10  # rounds whose medians the server keeps
SHARE = 2.0  # samples that count, as a multiple of the cohort's median, where uploads are clipped
ABSURD = 1e6  # a loss that no model has: 14 is a probability of one in a million


@dataclass(frozen=True)
class Admission:
    """The uploads as they take part in the round."""

    states: State
    left_out: Mapping[int, str]  # the lanes of `uploads` that do not, and why
    norms: Mapping[str, list[float]]  # the medians, for the next rounds


@dataclass(frozen=True)
class Rule:
    """`Train.aggregate` and `Train.trim`."""

    kind: Kind = "mean"
    trim: float = 0.2  # share of the clients that a trimmed mean leaves out, at each end

    def of_lanes(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Returns the mean, trimmed mean or median over the lanes, which are dimension `dim`; it keeps one of them."""
        if self.kind in ("mean", "norm_clip"):
            return tensor.mean(dim, keepdim=True)
        return trimmed_mean(tensor, self.cut(tensor.shape[dim]), dim)

    def cut(self, lanes: int) -> int:
        """Returns how many values are cut off at each end: of few clients more than the share, rather than none."""
        most = (lanes - 1) // 2
        return most if self.kind == "median" else min(most, math.ceil(self.trim * lanes - 1e-9))

    def mean(self, state: State, weights: Sequence[float] | None = None) -> State:
        """Returns one lane of many. weights: one per lane; only means that take every lane have any."""
        if self.kind in ("mean", "norm_clip"):
            return mean(state, weights)
        return state.map(self.of_lanes)

    def admit(self, uploads: State, reference: State, norms: Norms) -> Admission:
        """Returns the uploads as they take part in the round. reference: one lane, what they are compared with."""
        if self.kind == "mean" or not uploads.lanes:
            return Admission(uploads, {}, {})
        uploads = positive(uploads, reference)
        return clipped(uploads, reference, norms) if self.kind == "norm_clip" else Admission(uploads, {}, {})

    def weights(self, samples: Sequence[float] | None) -> Sequence[float] | None:
        """Returns the weights of the mean. Where uploads are clipped, a client counts at most twice the median.

        Fewer than `MIN_OTHERS` clients say nothing about each other's samples.
        """
        if samples is None or self.kind != "norm_clip" or len(samples) < MIN_OTHERS:
            return samples
        most = SHARE * float(torch.tensor(samples, dtype=torch.float64).median())
        return [min(n, most) for n in samples]

    def losses(self, losses: Tensor, finite: Tensor) -> Tensor | None:
        """Returns a loss per candidate from `[candidates, judges]`, to compare them; None if no judge has an opinion.

        finite: which candidates are. The first candidate is what the others are compared with. The mean takes every
        judge that has data at its word; the other rules drop a judge whose losses are absurd.
        """
        usable = finite.clone()
        usable[0] = True
        if self.kind == "mean":
            losses = losses[:, ~losses[0].isnan()]
            scores = losses.mean(1)
            return scores.masked_fill(~usable | ~scores.isfinite(), torch.inf) if losses.shape[1] else None
        valid = losses.abs() <= ABSURD
        losses, valid = losses[:, valid[0]], valid[:, valid[0]]  # others have no data
        usable[1:] &= (2 * valid.sum(1) >= valid.shape[1])[1:]  # else it diverged, or as good as
        losses = losses[:, valid[usable].all(0)]  # a judge that skips a candidate has no opinion
        if not losses.shape[1]:
            return None
        gains = (losses - losses[0]).masked_fill(~usable[:, None], 0)
        if self.kind == "norm_clip":
            spread = gains.abs().amax(0)
            gains = gains * shrink(spread, spread.median())
        scores = losses[0].median() + self.of_lanes(gains, 1)[:, 0]
        return scores.masked_fill(~usable, torch.inf)


MEAN = Rule()


def trimmed_mean(tensor: Tensor, cut: int, dim: int = 0) -> Tensor:
    """Returns the mean over a dimension, which it keeps, without the `cut` largest and smallest values."""
    kept = tensor.sort(dim).values.narrow(dim, cut, tensor.shape[dim] - 2 * cut) if cut else tensor
    return kept.mean(dim, keepdim=True)


def shrink(norms: Tensor, bound: Tensor) -> Tensor:
    """Returns the factors, at most 1, that bring these norms down to the bound."""
    return torch.where(norms > bound, bound / norms, torch.ones_like(norms))


def positive(uploads: State, reference: State) -> State:
    """Returns the uploads with the reference's value in place of a running variance that is not positive."""
    names = variances(uploads)
    fixed = {n: torch.where(uploads.buffers[n] > 0, uploads.buffers[n], reference.buffers[n]) for n in names}
    return State(uploads.params, {**uploads.buffers, **fixed})


def parts(state: State) -> dict[str, list[str]]:
    """Returns the names that are clipped together: `params` and `buffers`, and such with a key for joined states.

    Whole numbers and masks are no update that could be made shorter, so they are in no part.
    """
    return {
        f"{kind}/{key}" if key else kind: names
        for kind, tensors in (("params", state.params), ("buffers", state.buffers))
        for key, names in by_key({n: t for n, t in tensors.items() if t.is_floating_point()}).items()
    }


def usual(distances: Tensor, history: Sequence[float]) -> float | None:
    """Returns the median distance of this round's uploads and of the last rounds; None if that says nothing.

    An upload that equals the broadcast says nothing. Neither do fewer than three uploads: then the last rounds count
    alone. Of an even number the lower of the two in the middle is the median.
    """
    few = len(distances) < MIN_OTHERS
    known = torch.cat([distances[:0] if few else distances, distances.new_tensor(history)])
    known = known[known > 0]
    return float(known.median()) if len(known) else None


def distances(new: Mapping[str, Tensor], old: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Returns how far each lane of some tensors is from those of one lane, all together: float64 `[K]`."""
    squares = [(new[n].double() - old[n].double()).flatten(1).square().sum(1) for n in names]
    return torch.stack(squares).sum(0).sqrt()


def clipped(uploads: State, reference: State, norms: Norms) -> Admission:
    """Clips every part of the uploads, and leaves out those whose parameters are far away.

    On a GPU this waits for the distances, and for the directions if an update is long.
    """
    new = {"params": dict(uploads.params), "buffers": dict(uploads.buffers)}
    old = {"params": reference.params, "buffers": reference.buffers}
    names = parts(uploads)
    each = [distances(new[part.partition("/")[0]], old[part.partition("/")[0]], own) for part, own in names.items()]
    history, far = dict[str, list[float]](), dict[int, str]()
    for (part, own), d in zip(names.items(), torch.stack(each).cpu() if each else (), strict=True):
        kind, before = part.partition("/")[0], [float(x) for x in norms.get(part, ()) if x > 0]
        history[part] = [*before, *d[d > 0].median(0, keepdim=True).values.tolist()][-HISTORY:] if d.any() else before
        median = usual(d, before)
        if median is None:
            continue
        factors = shrink(d, torch.tensor(CLIP * median, dtype=d.dtype))
        for n in own:
            tensor, by = new[kind][n], sent(factors.to(new[kind][n].dtype), new[kind][n].device)
            by = like(by, tensor)
            new[kind][n] = torch.where(by < 1, old[kind][n] + by * (tensor - old[kind][n]), tensor)
        if part == "params":
            moves = {n: new[kind][n] - old[kind][n] for n in own} if (d > LONG * median).any() else {}
            far = far_away(d / median, against_others(moves))
    states = State(new["params"], new["buffers"])
    if far:
        states = gather(states, [k for k in range(states.lanes) if k not in far])
    return Admission(states, far, history)


def against_others(moves: Mapping[str, Tensor]) -> list[bool]:
    """Returns for each lane whether its move points against the sum of the other lanes'; nothing of no moves."""
    flat = [t.double().flatten(1) for t in moves.values()]
    each = [m @ m.sum(0) - m.square().sum(1) for m in flat]
    return (torch.stack(each).sum(0) < 0).tolist() if each else []


def far_away(times: Tensor, against: Sequence[bool]) -> dict[int, str]:
    """Returns the lanes to leave out, in words; none if they are half of all, which clipping has to bound.

    times: each one's distance, in medians. against: whether each points against the others, if any is long.
    """
    far: dict[int, str] = {}
    for lane, x in enumerate(times.tolist()):
        if x > FAR or (x > LONG and against[lane]):
            why = "" if x > FAR else " and points against the others"
            far[lane] = f"its update is {x:.3g} times as long as the median{why}"
    return far if 2 * len(far) < len(times) else {}
