"""Theorems 3 and 4 on a finished run: the constants of their assumptions, measured where the folder has a state."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..lanes import State
from .descent import BATCHES, Descent
from .gradients import ITERATIONS, diversity, smoothness, squared_norm, variance
from .probe import TOGETHER, Probe
from .rates import Constants, phi1, phi2, psi1, psi2, theorem3, theorem3_proved, theorem4

FEWEST = 2  # mini-batches whose gradients can be compared
FEW = 16  # images per client whose loss has its curvature measured, at least


@dataclass(frozen=True)
class Convergence:
    """What can be said of Theorems 3 and 4 afterwards."""

    constants: Constants
    rounds: tuple[int, ...]  # where gradients were measured
    norms: tuple[float, ...]  # ‖∇L(w)‖² there
    noise: float  # the part of the last ‖∇L(w)‖² that would be chance, had it not been taken off
    losses: tuple[float, ...]  # L(w) there
    personal_norms: tuple[float, ...]  # ‖∇_v P_m‖² at the last state, per client; empty without λ
    batches: int
    theorem3: dict[str, float]
    theorem4: dict[str, float]  # empty without λ
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns what `perada bounds --json` prints of it."""
        c = self.constants
        return asdict(self) | {
            "psi1": psi1(c),
            "psi2": psi2(c),
            "phi1": phi1(c),
            "phi2": phi2(c),
            "theorem3_proved": theorem3_proved(c),
        }


def convergence(probe: Probe) -> Convergence:
    """Returns the constants and both sides of Theorems 3 and 4, as far as a folder can tell."""
    count = min(BATCHES, probe.room(probe.clients * probe.config.train.batch, FEWEST))
    descent, visited = Descent(probe.experiment, probe.federation, count), probe.visited()
    points = [descent.at(number, state) for number, state in visited]
    clients, end, last = probe.clients, visited[-1][1], points[-1]
    at, gradient = descent.client_slopes(end, probe.room(clients * (ITERATIONS + 1), FEW))
    curved = float(smoothness(gradient, at).max())
    sigma2 = max(float(p.variance.max()) for p in points)
    largest = max(float(squared_norm(p.gradients, p.variance).max()) for p in points)
    lam = float(getattr(probe.experiment.method, "lam", math.nan))
    personal = _personal(descent, probe.personal, end, lam, points[0].loss) if math.isfinite(lam) else None
    train, taught = probe.config.train, _taught(probe, descent)
    steps = round(sum(probe.planned_steps) / clients)
    own_epochs = getattr(probe.experiment.method, "personal_epochs", 0) or train.epochs
    constants = Constants(
        L=curved,
        L_R=taught[0],
        sigma2=sigma2,
        sigma_R2=taught[1],
        gamma=max(diversity(p.gradients, p.variance) for p in points),
        G=math.sqrt(max(largest, 0.0)),
        G_R=taught[2],
        G_P=0.0 if personal is None else personal[1],
        T=visited[-1][0] or 1,
        E=steps,
        S=max(1, round(steps * own_epochs / train.epochs)),
        R=probe.config.distill.steps if probe.experiment.method.parts.distils and taught[0] else 0,
        M=clients,
        lam=0.0 if personal is None else lam,
        delta_L=points[0].loss - last.loss,
        delta_P=0.0 if personal is None else personal[2],
    )
    return Convergence(
        constants,
        tuple(p.round for p in points),
        tuple(p.squared_norm for p in points),
        float(variance(last.gradients.mean(0))) / last.gradients.shape[1],
        tuple(p.loss for p in points),
        () if personal is None else personal[0],
        last.gradients.shape[1],
        theorem3(constants),
        {} if personal is None else theorem4(constants),
        _notes(probe, personal is not None, constants.delta_L),
    )


def _taught(probe: Probe, descent: Descent) -> tuple[float, float, float]:
    """Returns L_R, σ_R² and G_R at the average of the local models; zeros without public images."""
    made, public = probe.student, probe.public
    if made is None or public is None or len(public) < 2 * FEWEST:
        return 0.0, 0.0, 0.0
    size = min(probe.config.distill.batch, len(public) // FEWEST, TOGETHER)
    batches = torch.split(public[: min(BATCHES, len(public) // size) * size], size)
    targets = [probe.as_teachers(probe.local, images).mean(0) for images in batches]
    gradients, gradient = descent.distillation(made[0], batches, targets)
    curved = float(smoothness(gradient, descent.row(made[0])).max())
    return curved, float(variance(gradients)), math.sqrt(max(0.0, float(squared_norm(gradients))))


def _personal(
    descent: Descent, lanes: State, end: State, lam: float, first: float
) -> tuple[tuple[float, ...], float, float] | None:
    """Returns ‖∇_v P_m‖² per client, G_P, and the mean of P_m(v⁰, w⁰) − P_m(vᵀ, wᵀ).

    first: L(w⁰), which is the mean of P_m(v⁰, w⁰), since every v starts as w.
    """
    if lanes.params.keys() != end.params.keys():
        return None
    gradients, last = descent.personal(lanes, end, lam)
    norms = tuple(max(0.0, x) for x in squared_norm(gradients).tolist())
    return norms, lam * float(descent.away(lanes, end).norm(dim=1).max()), first - float(last.mean())


def _notes(probe: Probe, personal: bool, gained: float) -> tuple[str, ...]:
    """Returns what has to be said of these numbers."""
    train, distill = probe.config.train, probe.config.distill
    cohort = train.cohort or probe.clients
    notes = [
        "the constants are maxima over the states above, so they are lower estimates of the theorems' suprema",
        "gradients between the first round and the kept checkpoints cannot be measured afterwards: pass the callback "
        "perada.theory.GradientNorms to a training",
        f"the theorems' step size η_l = 1/(E L √T) is not the run's ({train.lr:g})",
    ]
    if cohort < probe.clients:
        notes.append(f"the theorems have all clients in every round; the run had {cohort} of {probe.clients}")
    if probe.experiment.method.parts.distils and distill.steps:
        notes.append("the theorems' server takes plain gradient steps; the run's takes Adam's")
    if gained < 0:
        notes.append("L(w) is higher than before the first round, so the right-hand sides mean little")
    if not personal:
        notes.append("the method has no λ, so Theorem 4 says nothing of it")
    return tuple(notes)
