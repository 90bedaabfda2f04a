"""A client's calibration for predictions that notice drift, from its own validation data alone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..client.scores import logits_of, logits_on, own_logits
from ..client.trainer import sample_loss
from ..data import Federation
from ..errors import InputError
from ..lanes import LaneModel, State
from .drift import Calibration, Drift, balanced, label_prior, likeness, mean_prior, uniform_prior

MIXES = torch.linspace(0, 1, 21, dtype=torch.float64)  # of a
TEMPERATURES = 2 ** torch.linspace(-2, 2, 17, dtype=torch.float64)  # of τ
SPREADS = (0.25, 0.5)  # of the pull: the standard deviations of a and log τ at strength 1
PART = 4.0  # without validation images the deviation of s would be its whole range divided by this
WORTH = 1.0  # as many images as that guess is worth
DIGITS = 9  # after the point, so that a sum in another order gives the same numbers


def calibrated(start: Calibration, v: Tensor, w: Tensor, targets: Tensor, options: Drift) -> Calibration:
    """Returns a client's calibration from the logits `[n, classes]` of both models on its own validation images.

    start: has the priors. a and τ have the greatest likelihood on a grid, with a pull towards `Drift.mix` and 1.
    """
    finite = v.isfinite().all(-1) & w.isfinite().all(-1)
    v, w, targets = (t[finite].cpu() for t in (v, w, targets))
    if not len(v):
        return start
    best = _fitted(start, v.double(), w.double(), targets, options)
    s = likeness(best, balanced(best, v, w))
    mean, guess = float(s.mean()), best.widest / PART
    variance = (float((s - mean).square().sum()) + WORTH * guess**2) / (len(s) - 1 + WORTH)
    return replace(best, mean=round(mean, DIGITS), deviation=round(math.sqrt(variance), DIGITS), images=len(s))


def _fitted(start: Calibration, v: Tensor, w: Tensor, targets: Tensor, options: Drift) -> Calibration:
    """Returns the calibration with the best a and τ; of equals the first."""
    ratio, best, least = start.ratio, start, math.inf
    for temperature in TEMPERATURES:
        scores = torch.lerp((v - ratio).unsqueeze(0), (w / temperature).unsqueeze(0), MIXES.view(-1, 1, 1)) + ratio
        losses = sample_loss(scores, targets.expand(len(MIXES), *targets.shape)).sum(-1)
        if start.multilabel:  # the mean over labels, where a likelihood has the sum
            losses = losses * targets.shape[-1]
        pull = ((MIXES - options.mix) / SPREADS[0]) ** 2 + (temperature.log() / SPREADS[1]) ** 2
        losses = losses + options.strength / 2 * pull
        at = int(losses.argmin())
        if float(losses[at]) < least - 1e-9:
            least = float(losses[at])
            best = replace(start, mix=round(float(MIXES[at]), DIGITS), temperature=round(float(temperature), DIGITS))
    return best


def everyones_prior(
    options: Drift, model: LaneModel, shared: State, federation: Federation, public: Tensor | None
) -> tuple[float, ...]:
    """Returns g. public: the server's images, for `Drift.prior` public."""
    many, multilabel = len(federation.classes), federation.multilabel
    if options.prior == "uniform":
        return uniform_prior(many, multilabel)
    if options.prior == "shared":
        counts, known = (torch.from_numpy(n.sum(0)) for n in (federation.label_counts(), federation.known_counts()))
        return label_prior(counts, known, multilabel)
    if public is None:
        raise InputError("Drift.prior=public needs public images: set Distill.data, or Drift.prior=uniform")
    return mean_prior(logits_of(model, shared, federation, public)[0], multilabel)


def calibrations(
    model: LaneModel,
    personal: State,
    shared: State,
    federation: Federation,
    options: Drift,
    everyone: tuple[float, ...],
) -> dict[str, Calibration]:
    """Returns every client's calibration, by its own training labels and its own validation data.

    personal: one lane per client, in their order. shared: the global model, one lane. everyone: g.
    """
    clients, multilabel = federation.clients, federation.multilabel
    values = [c.val for c in clients]
    v, w = own_logits(model, personal, federation, values), [logits_on(model, shared, federation, i)[0] for i in values]
    made, counts = {}, (federation.label_counts(), federation.known_counts())
    for client, labels, known, own, global_ in zip(clients, *counts, v, w, strict=True):
        prior = label_prior(torch.from_numpy(labels), torch.from_numpy(known), multilabel)
        start = Calibration(prior, everyone, multilabel=multilabel)
        made[client.name] = calibrated(start, own, global_, federation.labels(client.val), options)
    return made
