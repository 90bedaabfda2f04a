"""Other ways to predict where data may have drifted, on logits: what predictions that notice drift are compared with.

Each rule gets the logits `[n, classes]` of the personal and the global model on a stream of images, and what the client
knows of its own validation data. It returns scores `[n, classes]`. All are written from what their papers say. FedTHE
and BTFL have one feature extractor with two heads; here there are two models, so the global model's log probabilities
stand for the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.signal import lfilter
from torch import Tensor

from perada.predict.drift import Calibration, Drift, answer, windows_of

MIXES = (0.1, 0.2, 0.3, 0.5)  # the global model's part in fixed mixes
CEILING = torch.linspace(0, 1, 21)  # mixes among which the ceiling chooses, with labels


@dataclass(frozen=True)
class Known:
    """What one client knows before it sees a test image."""

    by: Calibration
    v: Tensor  # logits on its own validation data
    w: Tensor
    corrected: tuple[float, Tensor]  # temperature and bias per class, for EM
    everyone: Tensor  # the mean of the clients' mean features, which a server would send
    tables: Tensor  # BTFL's shares of quantised features of all clients, [classes, levels]


Rule = Callable[[Known, Tensor, Tensor], Tensor]


def features(w: Tensor) -> Tensor:
    """Returns what stands for features."""
    return w.double().log_softmax(-1).clamp(min=-20)


# EM of the label prior, with bias-corrected temperature scaling


def corrected(v: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Returns temperature and bias per class of the greatest likelihood on these validation data.

    Alexandari et al., "Maximum Likelihood with Bias-Corrected Calibration is Hard-To-Beat at Label Shift Adaptation",
    ICML 2020. Weak pulls keep a class without images finite.
    """
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(v.shape[-1], dtype=torch.float64, requires_grad=True)
    v, targets = v.double().cpu(), targets.cpu()
    if not len(v):
        return 1.0, bias.detach()
    search = torch.optim.LBFGS([scale, bias], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value = F.cross_entropy(v * scale.exp() + bias, targets, reduction="sum")
        value = value + 0.5 * scale.square().sum() + 0.05 * bias.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    return float(torch.exp(-scale.detach())), bias.detach()


def em(known: Known, v: Tensor, w: Tensor, size: int, steps: int = 100) -> Tensor:
    """Returns predictions with the label prior of each window, by EM: Saerens et al., Neural Computation 2002."""
    temperature, bias = known.corrected
    p = (v.double() / temperature + bias.to(v.device)).softmax(-1)
    prior = torch.tensor(known.by.own, dtype=torch.float64, device=v.device)
    rows, at = (t.to(v.device) for t in windows_of(len(p), size))
    inside, now = p[rows] / prior, prior.expand(len(rows), -1)
    for _ in range(steps):
        weight = inside * now.unsqueeze(1)
        now = (weight / weight.sum(-1, keepdim=True)).mean(1)
    return p / prior * now[at]


# FedTHE: Jiang and Lin, "Test-Time Robust Personalization for Federated Learning", ICLR 2023


def fedthe(
    known: Known, v: Tensor, w: Tensor, alpha: float = 0.1, beta: float = 0.3, steps: int = 20, rate: float = 0.1
) -> Tensor:
    """Returns an ensemble of both models, weighted per image by e.

    e is the least, after some steps of Adam, of λ · entropy + (1 − λ) · alignment: λ is the cosine of the two
    predictions. Alignment is e times the distance of the features from everybody's mean, and 1 − e times that from the
    own mean. The features are smoothed over the stream.
    """
    x, own = features(w), features(known.w).mean(0) if len(known.w) else known.everyone
    past = x.cpu().numpy()
    smooth, _ = lfilter([alpha], [1, alpha - 1], past, axis=0, zi=(1 - alpha) * past[:1])
    h = beta * x + (1 - beta) * torch.from_numpy(smooth).to(x.device)
    far_all, far_own = (h - known.everyone.to(x.device)).norm(dim=-1), (h - own.to(x.device)).norm(dim=-1)
    v, w = v.double(), w.double()
    alike = F.cosine_similarity(v.softmax(-1), w.softmax(-1), dim=-1)
    e = torch.zeros(len(v), dtype=torch.float64, device=v.device, requires_grad=True)  # before a sigmoid
    search = torch.optim.Adam([e], lr=rate)
    for _ in range(steps):
        search.zero_grad()
        share = e.sigmoid()
        scores = share.unsqueeze(-1) * w + (1 - share.unsqueeze(-1)) * v
        entropy = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)
        aligned = share * far_all + (1 - share) * far_own
        (alike * entropy + (1 - alike) * aligned).sum().backward()
        search.step()
    share = e.detach().sigmoid().unsqueeze(-1)
    return share * w + (1 - share) * v


# BTFL: Zhou and Liu, "BTFL: A Bayesian-based Test-Time Generalization Method ...", KDD 2025

LEVELS = 4  # of a quantised feature
GRID = np.linspace(0.01, 0.99, 99)  # of the share of external images


def quantised(w: Tensor) -> Tensor:
    """Returns each class's log probability as a level, `[n, classes]`."""
    edges = torch.tensor([-6.0, -3.0, -1.0], dtype=torch.float64, device=w.device)
    return torch.bucketize(features(w).contiguous(), edges)


def level_shares(w: Tensor) -> Tensor:
    """Returns how often each class's feature has each level, `[classes, levels]`; each level has one image more."""
    counts = F.one_hot(quantised(w), LEVELS).double().sum(0) + 1
    return counts / counts.sum(-1, keepdim=True)


def btfl(known: Known, v: Tensor, w: Tensor) -> Tensor:
    """Returns a mix of both predictions; the global part is the posterior chance that an image is external.

    The prior of that chance is a Beta distribution of the images before it. An image is counted where its features and
    the entropies of both models, against those on own validation data, agree on what it is.
    """
    own = level_shares(known.w).to(w.device)
    at, classes = quantised(w), torch.arange(w.shape[-1], device=w.device)
    evidence = (own[classes, at].log() - known.tables.to(w.device)[classes, at].log()).sum(-1)

    def entropy(logits: Tensor) -> Tensor:
        return -(logits.double().softmax(-1) * logits.double().log_softmax(-1)).sum(-1)

    usual = [float(entropy(x).mean()) if len(x) else 0.0 for x in (known.v, known.w)]
    sure = [(entropy(x) < mean).cpu().numpy() for x, mean in zip((v, w), usual, strict=True)]
    ratio = evidence.clamp(-30, 30).exp().cpu().numpy()
    internal, external = (ratio > 1) & sure[0] & ~sure[1], (ratio < 1) & sure[1] & ~sure[0]
    inside, outside = (1 + np.concatenate([[0], np.cumsum(one)[:-1]]) for one in (internal, external))
    shares = np.empty(len(ratio))
    for part in np.array_split(np.arange(len(ratio)), max(1, len(ratio) // 4096)):
        a, b = outside[part, None], inside[part, None]
        log = (a - 1) * np.log(GRID) + (b - 1) * np.log(1 - GRID)
        weight = np.exp(log - log.max(1, keepdims=True))
        posterior = GRID / (GRID + (1 - GRID) * ratio[part, None])
        shares[part] = (weight * posterior).sum(1) / weight.sum(1)
    share = torch.from_numpy(shares).to(v.device).unsqueeze(-1)
    return share * w.double().softmax(-1) + (1 - share) * v.double().softmax(-1)


# all of them


def rules(options: Drift, windows: tuple[int, ...] = (1, 8, 32)) -> Mapping[str, Rule]:
    """Returns every rule that needs no labels and no further pass of the network, by its name in a table."""

    def aware(size: int) -> Rule:
        return lambda known, v, w: answer(known.by, v, w, options, size).probabilities

    def mixing(share: float) -> Rule:
        return lambda known, v, w: (1 - share) * v.double() + share * w.double()

    return {
        "personal": lambda known, v, w: v,
        "global": lambda known, v, w: w,
        **{f"logits {share:g}": mixing(share) for share in MIXES},
        "EM, BCTS": lambda known, v, w: em(known, v, w, max(windows)),
        "FedTHE": fedthe,
        "BTFL": btfl,
        **{f"drift {size}": aware(size) for size in windows},
    }


def ceiling(known: Known, v: Tensor, w: Tensor, targets: Tensor) -> float:
    """Returns the accuracy in % of the best mix of logits, with home's prior or without it, chosen with the labels."""
    v, w, ratio, best = v.double(), w.double(), known.by.ratio.to(v.device), 0.0
    for share in CEILING.tolist():
        for offset in (torch.zeros_like(ratio), -(1 - share) * ratio, share * ratio):
            right = ((1 - share) * v + share * w + offset).argmax(-1) == targets
            best = max(best, 100 * float(right.double().mean()))
    return best
