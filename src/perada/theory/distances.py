"""Estimators for the terms of Theorems 1 and 2: pure functions of probabilities, labels and features."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Features = NDArray[np.float32]
FOLDS = 5
RIDGE = 0.1  # scikit-learn's C of the domain classifier, on standardised features


def risk(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Returns ERR, the mean of `1 − h(x)_y`. probabilities: `[..., n, k]`; labels: int64 `[n]`."""
    index = labels.expand(probabilities.shape[:-1]).unsqueeze(-1)
    return 1 - probabilities.gather(-1, index).squeeze(-1).mean(-1)


def error(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Returns the share of images whose most probable class is not the label."""
    return (probabilities.argmax(-1) != labels).double().mean(-1)


def distillation_distance(student: Tensor, ensemble: Tensor) -> Tensor:
    """Returns Φ, the mean of `‖g(x) − h(x)‖₁` (0 to 2). Both are probabilities `[n, k]`."""
    return (student - ensemble).abs().sum(-1).mean()


def prediction_distance(personal: Tensor, common: Tensor) -> Tensor:
    """Returns the mean of `min{1, ‖p(x) − g(x)‖₁}`. Both are probabilities `[..., n, k]`."""
    return (personal - common).abs().sum(-1).clamp(max=1).mean(-1)


def mean_of_probabilities(logits: Tensor) -> Tensor:
    """Returns the theorem's ensemble, `1/M Σ softmax(f_m)`, of logits `[M, n, k]`."""
    return logits.softmax(-1).mean(0)


def softmax_of_mean(logits: Tensor) -> Tensor:
    """Returns what the distillation aims at, `softmax(1/M Σ f_m)`, of logits `[M, n, k]`."""
    return logits.mean(0).softmax(-1)


def hoeffding(samples: float, delta: float, sides: int = 2) -> float:
    """Returns t so that a mean of `samples` values in [0, 1] is within t, with probability `1 − delta`."""
    return math.sqrt(math.log(sides / delta) / (2 * samples))


def rademacher(parameters: int, samples: int) -> float:
    """Returns an upper bound on the empirical Rademacher complexity of functions into [0, 1].

    parameters: stands for their pseudo-dimension d. Sauer's and Massart's lemmas give `sqrt(2 d log(en/d) / n)`.
    1/2 is the most that there can be: a class that fits any signs has it.
    """
    if parameters >= samples:
        return 0.5
    return min(0.5, math.sqrt(2 * parameters * math.log(math.e * samples / parameters) / samples))


@dataclass(frozen=True)
class Advantage:
    """How well a classifier tells two samples apart: its hit rates on both, less 1."""

    value: float  # from 0, a coin, to 1
    low: float  # what it is at least, with probability 1 − delta
    samples: tuple[int, int]


def advantage(one: Features, other: Features, delta: float = 0.05, seed: int = 0) -> Advantage:
    """Returns the cross-validated advantage of a logistic regression that tells two samples apart.

    It is a lower estimate of their total variation. Twice the advantage is the empirical H-divergence, for the class of
    half-spaces of these features.
    """
    value = sum(held_out_hits(one, other, seed)) - 1
    doubt = sum(hoeffding(len(sample), delta / 2, sides=1) for sample in (one, other))
    return Advantage(max(0.0, value), max(0.0, value - doubt), (len(one), len(other)))


def held_out_hits(one: Features, other: Features, seed: int) -> tuple[float, float]:
    """Returns the shares of two samples that a classifier recognises which was trained on the other folds of both."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    folds = min(FOLDS, len(one), len(other))
    if folds < 2:
        return 0.5, 0.5
    truth = np.repeat([0, 1], [len(one), len(other)])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=RIDGE, class_weight="balanced", max_iter=500))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one that is not trained to the end is still a classifier
        splits = StratifiedKFold(folds, shuffle=True, random_state=seed)
        predicted = cross_val_predict(classifier, np.concatenate([one, other]), truth, cv=splits)
    return float((predicted[: len(one)] == 0).mean()), float((predicted[len(one) :] == 1).mean())


def label_variation(one: NDArray[np.int64], other: NDArray[np.int64], delta: float) -> tuple[float, float]:
    """Returns the total variation of two class distributions, from counts, and what it is at most.

    The second holds with probability `1 − delta`: a plug-in estimate of k classes is off by at most `√(k/n)/2` in the
    mean, and McDiarmid's inequality bounds the rest.
    """
    a, b = one / one.sum(), other / other.sum()
    value = float(np.abs(a - b).sum() / 2)
    doubt = sum(
        math.sqrt(len(counts) / counts.sum()) / 2 + hoeffding(float(counts.sum()), delta / 2, sides=1)
        for counts in (one, other)
    )
    return value, min(1.0, value + doubt)


def surrogate(vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both sides of the lemma `2(1 − v_y) ≥ 1[argmax v ≠ y]`, for vectors `[n, k]`.

    It needs entries from 0 with a sum of at most 1: then a class that is not the largest has at most 1/2.
    """
    chosen = vectors.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return 2 * (1 - chosen), (vectors.argmax(-1) != labels).to(vectors.dtype)


def interval(values: Tensor, delta: float = 0.05) -> tuple[float, float]:
    """Returns Hoeffding's interval of a mean of values in [0, 1]."""
    middle, doubt = float(values.mean()), hoeffding(values.numel(), delta)
    return max(0.0, middle - doubt), min(1.0, middle + doubt)


def as_features(values: Tensor) -> Features:
    """Returns features as scikit-learn takes them."""
    return values.detach().to(torch.float32).flatten(1).cpu().numpy()
