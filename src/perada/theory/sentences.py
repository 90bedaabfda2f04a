"""Three sentences to act on, each tied to one term and one threshold. docs/theory.md explains the thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FAR = 0.5  # TV between public and clients' images, at least: distillation may cost accuracy from here on
OUTLIER = 3.0  # deviations from the median d̂ of the sites, in robust standard deviations
LEAST_SPREAD = 0.1  # of d̂ (0 to 2): sites that are closer together than that do not stand out
FEW = 4  # with fewer sites than that, none can stand out
CONVERGED = 0.05  # ‖∇L(w)‖² as a share of what it was before the first round


@dataclass(frozen=True)
class Sentence:
    """What to do or not to do, and the number that says so."""

    about: str  # public, sites or training
    text: str
    term: str
    value: float | None
    threshold: float
    warns: bool


def about_public(low: float | None, distils: bool) -> Sentence:
    """Returns what TV(target, public) says. low: what it is at least, with confidence; None without public images."""
    if low is None:
        return Sentence("public", "There are no public images, so nothing can be said of them.", "TV", None, FAR, False)
    if low < FAR:
        text = f"The public images are not far from your sites' (TV at least {low:.2f}): they suit distillation."
        return Sentence("public", text, "TV", low, FAR, False)
    cost = "distillation can cost accuracy" if distils else "a distillation on them could cost accuracy"
    text = (
        f"The public images are far from your sites' (TV at least {low:.2f}): {cost}. "
        "Compare with Distill.steps=0, or choose images that are more like your own."
    )
    return Sentence("public", text, "TV", low, FAR, True)


def about_sites(divergences: Mapping[str, float]) -> Sentence:
    """Returns which sites stand out by d̂, their divergence from everybody."""
    names, values = list(divergences), np.array(list(divergences.values()))
    if len(names) < FEW:
        text = f"{len(names)} sites are too few to say that one stands out."
        return Sentence("sites", text, "d̂", None, OUTLIER, False)
    middle = float(np.median(values))
    spread = max(1.4826 * float(np.median(np.abs(values - middle))), LEAST_SPREAD)
    scores = (values - middle) / spread
    top = float(scores.max())
    out = [names[i] for i in np.argsort(-scores, kind="stable") if scores[i] > OUTLIER]
    if not out:
        text = f"No site stands out: the sites' divergence from everybody is {values.min():.2f} to {values.max():.2f}."
        return Sentence("sites", text, "d̂", top, OUTLIER, False)
    are = "is an outlier" if len(out) == 1 else "are outliers"
    more = f" and {len(out) - 3} more" if len(out) > 3 else ""
    text = (
        f"{', '.join(out[:3])}{more} {are}: divergence from everybody {values.max():.2f}, at the median site "
        f"{middle:.2f}. Check how its images are made and labelled."
    )
    return Sentence("sites", text, "d̂", top, OUTLIER, True)


def about_training(norms: Sequence[float], noise: float) -> Sentence:
    """Returns whether the global model's training has converged. norms: ‖∇L(w)‖² before the first round, ..., now."""
    if len(norms) < 2 or norms[0] <= 0:
        text = "Whether training has converged cannot be said: the gradient before the first round is not known."
        return Sentence("training", text, "‖∇L(w)‖²", None, CONVERGED, False)
    share = norms[-1] / norms[0]
    if share <= CONVERGED or norms[-1] <= noise:
        why = f"{share:.1%} of what it was at the start" if share <= CONVERGED else "within the noise of mini-batches"
        text = f"Training has converged: the global model's squared gradient is {why}."
        return Sentence("training", text, "‖∇L(w)‖²", share, CONVERGED, False)
    text = (
        f"Training has not converged: the global model's squared gradient is still {share:.1%} of what it was at the "
        "start. Train more rounds, or check Train.lr."
    )
    return Sentence("training", text, "‖∇L(w)‖²", share, CONVERGED, True)
