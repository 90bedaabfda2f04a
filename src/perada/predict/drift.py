"""Predictions that notice drift: the formulas, on logits (docs/drift.md explains them).

A client holds a personal model `v`, the global model `w`, the prior `P` of its own labels, and a prior `g` that stands
for everybody's. From these come, for an image x:

    b(x) = logsoftmax((1 − a)(v(x) − log P/g) + a·w(x)/τ)     scores as if the classes were as frequent as in g
    s(x) = log Σ_c exp(b_c(x)) P_c/g_c                        how much more x looks like home than like everybody's
    z    = (μ − mean s) / (σ (1/√n + 1/√n_val))               how far a window of n images is from home

Home predicts softmax(b + log P/g). If z is above the threshold, the share π of home images in the window is the most
likely one, and each image is mixed by r = π e^s / (π e^s + 1 − π): `r·softmax(b + log P/g) + (1 − r)·softmax(b)`.
With few validation images, home is softmax(v). Multi-label data have a Bernoulli per label, not a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..fields import check_fields

HALVINGS = 50  # steps of the search for the share of home images
FEW = 6  # validation images below which home is the personal model alone: they say too little about a and τ
LEAST_PRIOR = 1e-9  # of a class, where a model that is sure has given it none


@dataclass(frozen=True)
class Drift:
    """The `[drift]` section: how a client notices drift. Training does not depend on it."""

    window: int = 32  # unlabelled images that are judged together
    threshold: float = 3.0  # z above which a window has drifted
    prior: Literal["uniform", "public", "shared"] = "uniform"  # where g comes from: docs/drift.md says what is sent
    mix: float = 0.6  # a, the global model's part, where few validation images say otherwise
    strength: float = 0.3  # how strongly a and τ are pulled towards `mix` and 1
    multilabel: bool = False  # whether multi-label data get it too, where it gained next to nothing

    def __post_init__(self) -> None:
        check_fields(self, {"window": 1}, positive=("threshold", "strength"))
        if not 0 <= self.mix <= 1:
            raise InputError(f"Drift.mix must be from 0 to 1, not {self.mix}")


@dataclass(frozen=True)
class Calibration:
    """What a client knows about its own data: a few numbers, no images and no weights.

    A prior has one number per class, or per label of multi-label data. Without validation images `images` is 0: then
    drift is never found, and the client predicts with its personal model alone.
    """

    own: tuple[float, ...]  # P
    everyone: tuple[float, ...]  # g
    mix: float = 0.0  # a
    temperature: float = 1.0  # τ
    mean: float = 0.0  # μ, of s on the own validation images
    deviation: float = 0.0  # σ
    images: int = 0  # n_val: validation images on which both models are finite
    multilabel: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Self:
        """Returns what `as_dict` wrote. Raises TypeError or ValueError for anything else."""
        made = cls(**{**written, "own": tuple(written["own"]), "everyone": tuple(written["everyone"])})
        priors, rest = (*made.own, *made.everyone), (made.mix, made.temperature, made.mean, made.deviation)
        good = all(isinstance(n, int | float) and math.isfinite(n) for n in (*priors, *rest))
        if not good or not isinstance(made.images, int) or len(made.own) != len(made.everyone):
            raise ValueError("numbers that were not written")
        if not all(0 < p < 1 for p in priors) or made.temperature <= 0 or made.deviation < 0 or made.images < 0:
            raise ValueError("numbers that no calibration has")
        return made

    @property
    def ratio(self) -> Tensor:
        """log P/g per class; per label the difference of the log odds."""
        own, everyone = (torch.tensor(p, dtype=torch.float64) for p in (self.own, self.everyone))
        return own.logit() - everyone.logit() if self.multilabel else own.log() - everyone.log()

    @property
    def least(self) -> float:
        """The smallest value that s can have: that of an image which is surely of the rarest class."""
        own, everyone = (torch.tensor(p, dtype=torch.float64) for p in (self.own, self.everyone))
        yes, no = (own / everyone).log(), ((1 - own) / (1 - everyone)).log()
        return float(torch.minimum(yes, no).sum() if self.multilabel else yes.min())

    @property
    def widest(self) -> float:
        """The distance between the largest and the smallest value that s can have."""
        own, everyone = (torch.tensor(p, dtype=torch.float64) for p in (self.own, self.everyone))
        yes, no = own.log() - everyone.log(), (1 - own).log() - (1 - everyone).log()
        return float((yes - no).abs().sum() if self.multilabel else yes.max() - yes.min())


def label_prior(
    counts: Sequence[float] | Tensor, samples: Sequence[float] | Tensor | int = 0, multilabel: bool = False
) -> tuple[float, ...]:
    """Returns the prior of labels that were counted: every class has one more than it has.

    samples: how many images were counted, for multi-label data: of all labels alike, or of each label.
    """
    more, of = (torch.as_tensor(n, dtype=torch.float64) for n in (counts, samples))
    return tuple(((more + 1) / (of + 2 if multilabel else (more + 1).sum())).tolist())


def uniform_prior(classes: int, multilabel: bool = False) -> tuple[float, ...]:
    """Returns the prior that is used where nothing is known about the other clients."""
    return (0.5,) * classes if multilabel else (1 / classes,) * classes


def mean_prior(logits: Tensor, multilabel: bool = False) -> tuple[float, ...]:
    """Returns the mean prediction of a model on images `[n, classes]`, none of it 0 or 1."""
    finite = logits.double()[logits.isfinite().all(-1)]
    if not len(finite):
        return uniform_prior(logits.shape[-1], multilabel)
    shares = (finite.sigmoid() if multilabel else finite.softmax(-1)).mean(0).cpu().clamp(LEAST_PRIOR, 1 - LEAST_PRIOR)
    return tuple((shares if multilabel else shares / shares.sum()).tolist())


def balanced(by: Calibration, v: Tensor, w: Tensor) -> Tensor:
    """Returns b of logits `[..., classes]`; per label the log odds.

    Where one of the models is not finite on an image, the other one counts alone.
    """
    v, w, ratio = v.double(), w.double(), by.ratio.to(v.device)
    personal, shared = v - ratio, w / by.temperature
    both = (1 - by.mix) * personal + by.mix * shared
    bad_v, bad_w = ~v.isfinite().all(-1, keepdim=True), ~w.isfinite().all(-1, keepdim=True)
    scores = torch.where(bad_w, personal, torch.where(bad_v, shared, both))
    return scores if by.multilabel else scores.log_softmax(-1)


def at_home(by: Calibration, v: Tensor, w: Tensor) -> Tensor:
    """Returns the probabilities `[n, classes]` that a client predicts at home."""
    sure = by if by.images >= FEW else replace(by, mix=0.0)
    scores = balanced(sure, v, w) + by.ratio.to(v.device)
    return scores.sigmoid() if by.multilabel else scores.softmax(-1)


def everywhere(by: Calibration, b: Tensor) -> Tensor:
    """Returns the probabilities of balanced scores: what a client predicts where nothing is at home."""
    return b.sigmoid() if by.multilabel else b.softmax(-1)


def likeness(by: Calibration, b: Tensor) -> Tensor:
    """Returns s of balanced scores `[..., classes]`, one number per image."""
    if not by.multilabel:
        return (b + by.ratio.to(b.device)).logsumexp(-1)
    own, everyone = (torch.tensor(p, dtype=b.dtype, device=b.device) for p in (by.own, by.everyone))
    yes = F.logsigmoid(b) + (own / everyone).log()
    no = F.logsigmoid(-b) + ((1 - own) / (1 - everyone)).log()
    return torch.logaddexp(yes, no).sum(-1)


def home_share(s: Tensor) -> Tensor:
    """Returns the most likely share of home images of windows `[..., n]`, from 0 to 1.

    The likelihood of a share π is the product of π e^s + 1 − π over the images: EM climbs to the same maximum. It has
    one maximum, so its slope is halved upon. Images whose s is not finite do not count.
    """
    known = s.isfinite()
    ratio = torch.where(known, s, 0.0).clamp(-500, 500).exp()
    low, high = torch.zeros_like(s[..., :1]), torch.ones_like(s[..., :1])
    for _ in range(HALVINGS):
        share = (low + high) / 2
        slope = ((ratio - 1) / (share * ratio + 1 - share)).sum(-1, keepdim=True)
        low, high = torch.where(slope > 0, share, low), torch.where(slope > 0, high, share)
    flat = (ratio == 1).all(-1, keepdim=True)  # nothing speaks against home
    return torch.where(flat, 1.0, (low + high) / 2)[..., 0]


def distance(by: Calibration, s: Tensor) -> Tensor:
    """Returns z of windows `[..., n]`: 0 where nothing can be said."""
    known = s.isfinite()
    n = known.sum(-1)
    if not by.images or not by.deviation:
        return torch.zeros_like(n, dtype=torch.float64)
    mean = torch.where(known, s, 0.0).sum(-1) / n.clamp(min=1)
    scale = by.deviation * (1 / n.clamp(min=1).double().sqrt() + 1 / math.sqrt(by.images))
    return torch.where(n > 0, (by.mean - mean) / scale, 0.0)


def farthest(by: Calibration, n: float) -> float:
    """Returns the greatest z that a window of n images can have."""
    if not by.images or not by.deviation:
        return 0.0
    return (by.mean - by.least) / (by.deviation * (1 / math.sqrt(n) + 1 / math.sqrt(by.images)))


@dataclass(frozen=True)
class Verdict:
    """What is said of windows: one number each, `[windows]`."""

    z: Tensor
    share: Tensor  # π, as estimated; what is predicted with has share 1 unless the window has drifted
    drifted: Tensor

    @property
    def used(self) -> Tensor:
        """The share that predictions use."""
        return torch.where(self.drifted, self.share, 1.0)


def judged(by: Calibration, s: Tensor, threshold: float) -> Verdict:
    """Returns the verdict on windows of values of s, `[windows, n]`."""
    z = distance(by, s)
    return Verdict(z, home_share(s), z > threshold)


def mixed(home: Tensor, abroad: Tensor, s: Tensor, share: Tensor) -> Tensor:
    """Returns the probabilities `[n, classes]` of images in windows with these shares of home images, `[n]`."""
    gate = torch.sigmoid(share.logit() + s)
    gate = torch.where(share >= 1, 1.0, torch.where(share <= 0, 0.0, gate)).unsqueeze(-1)
    return gate * home + (1 - gate) * abroad


def windows_of(images: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the windows of a row of images as numbers `[windows, n]`, and the window of each image, `[images]`.

    The images are judged in groups of `size`. The last group may be smaller: its window is the last `size` images.
    """
    size = max(1, min(size, images))
    last = torch.arange(size, images + size, size).clamp(max=images)[: -(-images // size)]
    return last.unsqueeze(1) - size + torch.arange(size), torch.arange(images) // size


@dataclass(frozen=True)
class Answer:
    """Predictions on a row of images, and what was said of their windows."""

    probabilities: Tensor  # [n, classes]
    likeness: Tensor  # s, [n]
    verdict: Verdict


def answer(by: Calibration, v: Tensor, w: Tensor, options: Drift, size: int = 0) -> Answer:
    """Returns the predictions for a row of images with logits `[n, classes]`.

    size: of the windows; 0 is the options'.
    """
    b = balanced(by, v, w)
    s = likeness(by, b)
    rows, at = (t.to(s.device) for t in windows_of(len(s), size or options.window))
    verdict = judged(by, s[rows], options.threshold)
    return Answer(mixed(at_home(by, v, w), everywhere(by, b), s, verdict.used[at]), s, verdict)
