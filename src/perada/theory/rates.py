"""The right-hand sides of Theorems 3 and 4, from measured constants. Plain arithmetic.

Their O(·) hides a constant: with 1 in its place these are orders of magnitude, not bounds. docs/theory.md says where
the paper's statement and its proof differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the assumptions name, in the paper's letters. `sigma2` is σ² itself."""

    L: float  # smoothness of the clients' losses
    L_R: float  # smoothness of the distillation loss
    sigma2: float  # σ²: variance of a client's mini-batch gradient
    sigma_R2: float  # σ_R²: the same for the distillation
    gamma: float  # γ̄: how much the clients' gradients differ
    G: float  # largest gradient of a client's loss
    G_R: float  # largest gradient of the distillation loss
    G_P: float  # largest gradient of a personal objective with respect to w
    T: int  # rounds
    E: int  # local steps
    S: int  # personal steps
    R: int  # distillation steps
    M: int  # clients
    lam: float
    delta_L: float  # L(w⁰) − L(wᵀ)
    delta_P: float  # P_m(v⁰, w⁰) − P_m(vᵀ, wᵀ), the mean over clients


def psi2(c: Constants) -> float:
    """Returns ψ₂, the bound on the squared length of a mean distillation gradient."""
    if c.R == 0:
        return 0.0
    return 4 * c.sigma_R2 + 32 * (3 * c.G_R**2 + 2 * c.sigma_R2 / c.R) / c.T**2 + 2 * c.G_R**2


def psi1(c: Constants) -> float:
    """Returns ψ₁ as the theorem states it."""
    distilled = c.L * (c.G**2 + psi2(c)) / (c.E * c.L_R) if c.R else 0.0
    return c.sigma2 / (c.E * c.M) + distilled


def phi1(c: Constants) -> float:
    """Returns φ₁."""
    return 64 * (3 * c.gamma + 2 * c.sigma2 / c.E)


def phi2(c: Constants) -> float:
    """Returns φ₂. γ̄ bounds a square, so its root stands where the paper adds γ̄ itself to lengths."""
    both = c.L + c.lam
    return (
        c.S * c.sigma2
        + math.sqrt(phi1(c)) * c.G_P * both / (c.L * c.E)
        + math.sqrt(psi2(c)) * c.G_P * both
        + c.G_P * math.sqrt(c.gamma) * both / (c.L * math.sqrt(c.E))
    )


def theorem3(c: Constants) -> dict[str, float]:
    """Returns the parts of Theorem 3's right-hand side, by how they fall with T."""
    last = c.L**2 * psi2(c) / (c.T * math.sqrt(c.T) * c.L_R**2 * c.E) if c.R else 0.0
    return {
        "1/√T": (c.L * c.delta_L + psi1(c)) / math.sqrt(c.T),
        "1/T": c.gamma / c.T,
        "1/(T√T)": last,
    }


def theorem3_proved(c: Constants) -> float:
    """Returns the last line of the proof with its own constants, and the factor that its algebra gives.

    With η_l E = 1/(L√T) the distillation's part is `L(G² + ψ₂)/(L_R √T)`: the 1/E in the paper does not follow.
    """
    distilled = (c.L * (c.G**2 + psi2(c)) / c.L_R + c.L**2 * psi2(c) / (c.L_R**2 * c.T)) if c.R else 0.0
    root = math.sqrt(c.T)
    return 2 * c.L * c.delta_L / root + c.sigma2 / (c.E * c.M * root) + 16 * c.gamma / c.T + distilled / root


def theorem4(c: Constants) -> dict[str, float]:
    """Returns the parts of Theorem 4's right-hand side. The last one does not fall with T."""
    pull = c.G_P * (c.L + c.lam) / c.S
    start = max(0.0, c.L * c.delta_L + psi1(c))
    return {
        "1/√T": ((c.L + c.lam) * c.delta_P + phi2(c)) / (math.sqrt(c.T) * c.S),
        "1/T^¼": pull * math.sqrt(start) / (c.T**0.25 * c.L * math.sqrt(c.E)),
        "1/T^¾": pull * math.sqrt(psi2(c)) / (c.T**0.75 * c.L_R * c.E) if c.R else 0.0,
        "constant": pull * math.sqrt(c.sigma2) / (c.L * c.E),
    }
