"""The estimators of Theorems 3 and 4: a quadratic of which everything is known, and the rate on a convex toy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from perada.theory.gradients import diversity, running_mean, slope, smoothness, squared_norm, variance
from perada.theory.rates import Constants, phi1, phi2, psi1, psi2, theorem3, theorem3_proved, theorem4

CLIENTS, DIMENSIONS, NOISE = 6, 20, 0.7


class Quadratics:
    """L_m(θ) = ½ (θ − c_m)ᵀ A (θ − c_m), with eigenvalues of A up to 5, and noise of a known variance."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(DIMENSIONS, DIMENSIONS, generator=draw, dtype=torch.float64))[0]
        self.eigenvalues = torch.linspace(0.1, 5, DIMENSIONS, dtype=torch.float64)
        self.A = basis @ torch.diag(self.eigenvalues) @ basis.T
        self.centres = torch.randn(CLIENTS, DIMENSIONS, generator=draw, dtype=torch.float64)
        self.draw = draw

    def exact(self, points: Tensor) -> Tensor:
        """∇L_m at `[M, d]`."""
        return (points - self.centres) @ self.A

    def noisy(self, points: Tensor, batches: int) -> Tensor:
        """`[M, K, d]`, each off by a vector of mean square NOISE²."""
        noise = torch.randn(CLIENTS, batches, DIMENSIONS, generator=self.draw, dtype=torch.float64)
        return self.exact(points).unsqueeze(1) + NOISE * noise / math.sqrt(DIMENSIONS)


def test_a_quadratic_is_recovered() -> None:
    toy, theta = Quadratics(), torch.ones(CLIENTS, DIMENSIONS, dtype=torch.float64)
    gradients = toy.noisy(theta, batches=200)
    exact = toy.exact(theta)
    assert float(variance(gradients).mean()) == pytest.approx(NOISE**2, rel=0.1)
    gamma = float((exact - exact.mean(0)).square().sum(1).mean())
    assert diversity(gradients) == pytest.approx(gamma, rel=0.1)
    assert squared_norm(gradients).tolist() == pytest.approx(exact.square().sum(1).tolist(), rel=0.1)
    curved = smoothness(toy.exact, theta)
    assert float(curved.max()) == pytest.approx(5.0, rel=0.1), "L is one number for all clients"
    assert (curved > 4).all()
    assert smoothness(toy.exact, theta, iterations=40).tolist() == pytest.approx([5.0] * CLIENTS, rel=0.01)
    assert (curved <= 5.0 + 1e-6).all(), "a power iteration never overstates"


def test_few_batches_are_not_biased() -> None:
    """Two mini-batches each, many times: the mean is right, where plain plug-in estimates would be off by σ²/K."""
    toy, theta = Quadratics(), torch.zeros(CLIENTS, DIMENSIONS, dtype=torch.float64)
    toy.centres *= 0.05  # small gradients, so that noise dominates
    exact = toy.exact(theta)
    gamma, lengths = float((exact - exact.mean(0)).square().sum(1).mean()), exact.square().sum(1).mean()
    many = [toy.noisy(theta, batches=2) for _ in range(3000)]
    plain = sum(float(g.mean(1).square().sum(1).mean()) for g in many) / len(many)
    assert plain > float(lengths) + 0.8 * NOISE**2 / 2
    assert sum(float(squared_norm(g).mean()) for g in many) / len(many) == pytest.approx(float(lengths), abs=0.02)
    spread = [(g.mean(1) - g.mean((0, 1))).square().sum(1).mean() - 5 / 6 * variance(g).mean() / 2 for g in many]
    assert float(sum(spread)) / len(many) == pytest.approx(gamma, abs=0.02)
    assert all(diversity(g) >= 0 for g in many)


def test_slopes() -> None:
    assert slope([1, 4, 16], [1, 0.5, 0.25]) == pytest.approx(-0.5)
    assert slope([1, 2, 4], [3, 3, 3]) == pytest.approx(0)
    assert slope([0, 1], [1, 1]) is None
    assert slope([1, 2], [1, 0]) is None
    assert running_mean([4, 2, 0]) == [4, 3, 2]


def trained(rounds: int, local_steps: int, distil_steps: int) -> float:
    """Algorithm 1 on the convex toy with the theorem's step sizes; returns the mean of ‖∇L(w̄^{t,e})‖².

    The distillation loss is ½ ‖w − mean θ‖² with noise, whose smoothness L_R is 1.
    """
    toy, w, norms = Quadratics(seed=3), torch.full((DIMENSIONS,), 2.0, dtype=torch.float64), []
    lr, server_lr = 1 / (local_steps * 5.0 * math.sqrt(rounds)), 1 / max(1, distil_steps) / rounds
    for _ in range(rounds):
        theta = w.expand(CLIENTS, -1)
        for _ in range(local_steps):
            mean = theta.mean(0).expand(CLIENTS, -1)
            norms.append(float(toy.exact(mean).mean(0).square().sum()))
            theta = theta - lr * toy.noisy(theta, 1)[:, 0]
        average = w = theta.mean(0)
        for _ in range(distil_steps):
            noise = torch.randn(DIMENSIONS, generator=toy.draw, dtype=torch.float64) / math.sqrt(DIMENSIONS)
            w = w - server_lr * ((w - average) + 0.3 * noise)
    return sum(norms) / len(norms)


def test_the_rate_on_a_convex_toy() -> None:
    """Separate trainings of T = 16 to 1024 rounds, each with its own step sizes: at most T^−0.4, as T^−½ promises."""
    rounds = [16, 64, 256, 1024]
    found = slope(rounds, [trained(t, local_steps=2, distil_steps=2) for t in rounds])
    assert found is not None
    assert found <= -0.4


C = Constants(
    L=2.0, L_R=4.0, sigma2=9.0, sigma_R2=1.0, gamma=4.0, G=3.0, G_R=0.5, G_P=1.5,
    T=16, E=4, S=2, R=2, M=3, lam=1.0, delta_L=5.0, delta_P=6.0,
)  # fmt: skip


def test_the_right_hand_sides_by_hand() -> None:
    two = 4 * 1 + 32 * (3 * 0.25 + 2 * 1 / 2) / 256 + 2 * 0.25
    assert psi2(C) == pytest.approx(two)
    one = 9 / (4 * 3) + 2 * (9 + two) / (4 * 4)
    assert psi1(C) == pytest.approx(one)
    assert phi1(C) == 64 * (3 * 4 + 2 * 9 / 4)
    three = math.sqrt(phi1(C)) * 1.5 * 3 / (2 * 4) + math.sqrt(two) * 1.5 * 3 + 1.5 * 2 * 3 / (2 * 2)
    assert phi2(C) == pytest.approx(2 * 9 + three)
    parts = theorem3(C)
    assert parts["1/√T"] == pytest.approx((2 * 5 + one) / 4)
    assert parts["1/T"] == 4 / 16
    assert parts["1/(T√T)"] == pytest.approx(4 * two / (16 * 4 * 16 * 4))
    proof = 2 * 2 * 5 / 4 + 9 / (4 * 3 * 4) + 16 * 4 / 16 + (2 * (9 + two) / 4 + 4 * two / (16 * 16)) / 4
    assert theorem3_proved(C) == pytest.approx(proof)
    personal = theorem4(C)
    assert personal["1/√T"] == pytest.approx((3 * 6 + phi2(C)) / (4 * 2))
    assert personal["1/T^¼"] == pytest.approx(1.5 * 3 * math.sqrt(10 + one) / (2 * 2 * 2 * 2))
    assert personal["1/T^¾"] == pytest.approx(1.5 * 3 * math.sqrt(two) / (8 * 4 * 4 * 2))
    assert personal["constant"] == pytest.approx(1.5 * 3 * 3 / (2 * 4 * 2))


def test_what_falls_with_the_rounds_and_what_does_not() -> None:
    more = Constants(**{**vars(C), "T": 64 * C.T})
    for before, after, factor in (("1/√T", "1/√T", 8), ("1/T^¼", "1/T^¼", 64**0.25), ("constant", "constant", 1)):
        assert theorem4(C)[before] / theorem4(more)[after] == pytest.approx(factor, rel=0.15)
    assert theorem3(C)["1/T"] / theorem3(more)["1/T"] == pytest.approx(64)


def test_without_distillation_its_terms_are_gone() -> None:
    none = Constants(**{**vars(C), "R": 0, "L_R": 0.0})
    assert psi2(none) == 0
    assert psi1(none) == pytest.approx(9 / 12)
    assert theorem3(none)["1/(T√T)"] == 0
    assert theorem4(none)["1/T^¾"] == 0
    assert theorem3_proved(none) > 0
