"""The GPU kernels, run by Triton's interpreter on the CPU, against the plain layers: values, gradients, statistics,
and the same elements dropped."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from helpers import assert_close_norm
from torch import Tensor
from torch.func import functional_call

from perada.lanes import layers
from perada.lanes.layers import LaneBatchNorm, ResidualAdapter
from perada.lanes.random import keep_mask

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes import kernels

K = 3
SHAPES = [(4, 5, 3, 3), (9, 8, 1, 1), (7, 70, 2, 2), (40, 3, 5, 4)]  # B, C, H, W: uneven ones, more than a tile
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


Made = tuple[Tensor, tuple[Tensor, ...]]


def both(make: Callable[..., Made], inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    """The same by plain layers and by kernels: outputs, statistics, and gradients of a weighted sum."""
    found = []
    for fast in (None, kernels):
        monkeypatch.setattr(layers, "fast_kernels", lambda device, fast=fast: fast)
        leaves = [t.clone().requires_grad_() for t in inputs]
        y, kept = make(*leaves)
        weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin()
        grads = torch.autograd.grad((y * weights).sum(), leaves)
        found.append([y.detach(), *kept, *grads])
    for i, (plain, fast) in enumerate(zip(*found, strict=True)):
        assert_close_norm(fast, plain, tolerance, what=f"result {i}")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["train", "batch"])
@pytest.mark.parametrize("end", ["", "relu", "add relu"])
def test_norms(
    shape: tuple[int, ...], mode: str, end: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, channels, *size = shape
    inputs = [draw(K * batch, channels, *size, dtype=dtype) * 2 + 5, draw(K, channels, dtype=dtype, seed=1)]
    inputs += [draw(K, channels, dtype=dtype, seed=2), draw(K * batch, channels, *size, dtype=dtype, seed=3)]

    def make(x: Tensor, weight: Tensor, bias: Tensor, add: Tensor) -> Made:
        norm = LaneBatchNorm(channels).to(dtype)
        norm.mode = mode  # type: ignore[assignment]
        mean, var = draw(K, channels, dtype=dtype, seed=4) + 4, draw(K, channels, dtype=dtype, seed=5).exp()
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        y = functional_call(norm, tensors, (x, add if "add" in end else None, "relu" in end))
        return y + 0 * add.sum(), (mean, var)

    both(make, inputs, monkeypatch, TOLERANCE[dtype])


def test_a_frozen_affine_is_shared_and_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = draw(6, seed=1), draw(6, seed=2)

    def make(x: Tensor) -> Made:
        mean, var = torch.zeros(K, 6, dtype=torch.float64), torch.ones(K, 6, dtype=torch.float64)
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        return functional_call(LaneBatchNorm(6).double(), tensors, (x,)), (mean, var)

    both(make, [draw(K * 5, 6, 3, 3)], monkeypatch, 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("active", [True, False])
def test_adapters(shape: tuple[int, ...], dropped: float, active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, channels, *size = shape
    inputs = [draw(K * batch, channels, *size) + 1, draw(K, channels, seed=1), draw(K, channels, seed=2)]
    inputs.append(draw(K, channels, channels, 1, 1, seed=3))

    def make(x: Tensor, weight: Tensor, bias: Tensor, matrix: Tensor) -> Made:
        adapter = ResidualAdapter(channels, dropped, "layer").double().eval()
        adapter.norm.mode = "train"
        mean, var = torch.zeros(K, channels, dtype=torch.float64), torch.ones(K, channels, dtype=torch.float64)
        tensors = {"norm.weight": weight, "norm.bias": bias, "conv.weight": matrix}
        tensors |= {"norm.running_mean": mean, "norm.running_var": var}
        if active:
            tensors["dropout.key"] = torch.tensor([5, -7, 2**62 + 12345])
        return functional_call(adapter, tensors, (x,)), (mean, var)

    both(make, inputs, monkeypatch, 1e-12)


def test_the_elements_dropped_are_those_of_the_plain_path() -> None:
    """Ones through a norm that does nothing: what is left of them is the mask."""
    x = torch.ones(K * 4, 6, 3, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    keys, salt = torch.tensor([1, -(2**60), 77]), 1234
    how = kernels._How(0.1, 1e-5, False, False, kernels.Drop(keys, salt, 0.4))
    zeros, ones = torch.zeros(K, 6, dtype=torch.float64), torch.ones(K, 6, dtype=torch.float64)
    noise = draw(K * 4, 6, 3, 2).contiguous(memory_format=torch.channels_last)
    y, _, _ = kernels._forward(noise, zeros, ones, (zeros.clone(), ones.clone()), how, None)
    from perada.lanes import fold

    kept = keep_mask(fold(keys, salt), 4 * 6 * 3 * 2, 0.4).view(x.shape)
    assert torch.equal(y != 0, kept)
    assert 0.5 < kept.double().mean() < 0.7


@pytest.mark.parametrize("centre", ["none", "shared", "own"])
@pytest.mark.parametrize("size", [5, 2500])
def test_a_step_on_everything_at_once(centre: str, size: int) -> None:
    p, g, numbers = draw(K, size), draw(K, size, seed=1), draw(K, 2, seed=2)
    towards = {"none": None, "shared": draw(1, size, seed=3), "own": draw(K, size, seed=3)}[centre]
    rates, pull = numbers[:, :1], numbers[:, 1:]  # neighbours in memory, as a loop keeps them
    wanted = p - rates * (g if towards is None else g + pull * (p - towards))
    assert_close_norm(kernels.sgd_step(p, g, rates, towards, pull), wanted, 1e-14)
