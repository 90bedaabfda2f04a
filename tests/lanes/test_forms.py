"""Frozen convolutions in the forms a GPU likes: the same numbers."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers import assert_close_norm
from torch import nn

from perada.lanes.conv import Forms, blocks, dense_conv2d, stem_weight, strided_conv1x1


def stem_conv2d(x: torch.Tensor, layer: nn.Conv2d, forms: Forms) -> torch.Tensor:
    return nn.functional.conv2d(blocks(x), stem_weight(layer, forms))


def both(layer: nn.Conv2d, x: torch.Tensor, form: object) -> None:
    layer = layer.double().requires_grad_(False)
    found = []
    for how in (layer, lambda t: form(t, layer, Forms())):  # type: ignore[operator]
        leaf = x.clone().requires_grad_()
        y = how(leaf)
        weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
        found.append((y.detach(), torch.autograd.grad((y * weights).sum(), leaf)[0]))
    for a, b in zip(*found, strict=True):
        assert_close_norm(b, a, 1e-12)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (4, 4), (1, 3)])
@pytest.mark.parametrize("kernel", [(3, 1, 1), (3, 2, 1), (1, 2, 0), (1, 1, 0)])
def test_a_dense_product(size: tuple[int, int], kernel: tuple[int, int, int]) -> None:
    both(nn.Conv2d(5, 7, *kernel, bias=False), torch.randn(6, 5, *size, dtype=torch.float64), dense_conv2d)


@pytest.mark.parametrize("size", [(32, 32), (8, 14)])
def test_the_stem_in_blocks(size: tuple[int, int]) -> None:
    both(nn.Conv2d(3, 6, 7, 2, 3, bias=False), torch.randn(2, 3, *size, dtype=torch.float64), stem_conv2d)


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
def test_a_product_of_the_pixels_that_count(stride: int) -> None:
    both(nn.Conv2d(5, 7, 1, stride, bias=False), torch.randn(3, 5, 7, 8, dtype=torch.float64), strided_conv1x1)


def test_a_form_follows_its_weights() -> None:
    layer, forms = nn.Conv2d(2, 2, 3, 1, 1, bias=False).requires_grad_(False), Forms()
    x = torch.randn(1, 2, 2, 2)
    before = dense_conv2d(x, layer, forms)
    with patch.object(nn.functional, "conv2d", None):
        assert torch.equal(dense_conv2d(x, layer, forms), before), "the matrix was made once"
    dense_conv2d(torch.randn(1, 2, 1, 1), layer, forms)
    assert torch.equal(dense_conv2d(x, layer, forms), before), "the other size has its own"
    layer.weight.mul_(2)
    assert_close_norm(dense_conv2d(x, layer, forms), 2 * before, 1e-6)
    assert len(forms._made) == 1
    del layer
    assert len(forms._made) == 0, "a layer that is gone keeps nothing"
