"""The paper's theorems on a finished run: every term that can be measured, beside the error that was measured.

bounds(run) measures; docs/theory.md says what each term is and what it cannot say.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..runs.run import Run
from .callback import GradientNorms
from .convergence import Convergence, convergence
from .generalisation import Generalisation
from .probe import Probe
from .sentences import Sentence, about_public, about_sites, about_training
from .terms import Bound, Term, Total
from .theorem1 import theorem1
from .theorem2 import theorem2

__all__ = ["Bound", "Bounds", "Convergence", "GradientNorms", "Sentence", "Term", "Total", "bounds"]

IMAGES = 2_000  # of 32×32 pixels, in one measurement
DELTA = 0.05


@dataclass(frozen=True)
class Bounds:
    """What the theorems say of one run."""

    run: str
    method: str
    round: int
    delta: float
    images: int
    theorem1: Bound | None  # None without public images
    theorem2: Bound
    distillation: dict[str, float | int | None] | None  # Φ, seen in several ways
    convergence: Convergence
    sentences: tuple[Sentence, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `perada bounds --json`."""
        return {
            "run": self.run,
            "method": self.method,
            "round": self.round,
            "delta": self.delta,
            "images": self.images,
            "theorem1": None if self.theorem1 is None else self.theorem1.as_dict(),
            "theorem2": self.theorem2.as_dict(),
            "distillation": self.distillation,
            "convergence": self.convergence.as_dict(),
            "sentences": [asdict(s) for s in self.sentences],
        }


def bounds(run: Run, images: int = IMAGES, delta: float = DELTA, public: Tensor | None = None) -> Bounds:
    """Returns the measured terms of the theorems for a finished run.

    images: most images of 32×32 pixels that one measurement takes through the network; 0 is all.
    delta: the probability that a confidence statement fails.
    public: the public images of a run from Python, which its folder cannot hold.
    """
    if not 0 < delta < 1:
        raise InputError(f"delta must be between 0 and 1, not {delta:g}")
    if images < 0:
        raise InputError(f"images must be 0 (all) or more, not {images}")
    probe = Probe(run, images, public)
    terms, descent = Generalisation(probe, delta), convergence(probe)
    apart = dict(zip(probe.names, (2 * a.seen.value for a in terms.heterogeneity), strict=True))
    distils = run.experiment.method.parts.distils and run.config.distill.steps > 0
    return Bounds(
        run=str(run.path),
        method=run.config.method_name,
        round=run.experiment.now.round,
        delta=delta,
        images=images,
        theorem1=theorem1(terms),
        theorem2=theorem2(terms),
        distillation=terms.distillation(),
        convergence=descent,
        sentences=(
            about_public(terms.shift.seen.low if terms.shift else None, distils),
            about_sites(apart),
            about_training(descent.norms, descent.noise),
        ),
    )
