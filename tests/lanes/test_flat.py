"""The kernels that step on all parameters at once, run by Triton's interpreter on the CPU, against plain torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers import assert_close_norm

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes import kernels

from .test_kernels import K, draw


def test_lanes_that_do_not_move_stay() -> None:
    old, new = draw(K, 1500), draw(K, 1500, seed=1)
    new[1] = torch.nan
    before = old.clone()
    kernels.keep(old, new, torch.tensor([True, False, True]))
    assert torch.equal(old, torch.stack([new[0], before[1], new[2]]))


def test_adam_is_torchs() -> None:
    """Two lanes, the second of which has done a step more."""
    betas, ahead = (0.9, 0.999), (0, 1)
    table = torch.tensor([[0.1 / (1 - 0.9**t), (1 - 0.999**t) ** -0.5] for t in range(1, 5)]).double()
    p, done = draw(2, 1500), torch.tensor([[0.0, 7.0], [1.0, 7.0]]).double()[:, :1]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    leaves = [p[k].clone().requires_grad_() for k in range(2)]
    plain = [torch.optim.Adam([leaf], lr=0.1, betas=betas, eps=1e-8) for leaf in leaves]
    for k in range(2):
        for _ in range(ahead[k]):  # a step that moves nothing
            leaves[k].grad = torch.zeros_like(leaves[k])
            plain[k].round()
    for t in range(1, 4):
        g = draw(2, 1500, seed=t)
        for k in range(2):
            leaves[k].grad = g[k].clone()
            plain[k].round()
        p, m, v, done, total = kernels.adam_step(p, g, m, v, done, table, betas, 1e-8)
        assert_close_norm(total, (p + m + v).sum(1), 1e-12)
        assert done.flatten().tolist() == [t, t + 1]
    for k in range(2):
        assert_close_norm(p[k], leaves[k].detach(), 1e-7)  # the rate above is a float32 first


@pytest.mark.parametrize("centre", ["none", "shared", "own"])
@pytest.mark.parametrize("size", [5, 2500])
def test_a_step_on_everything_at_once(centre: str, size: int) -> None:
    p, g, numbers = draw(K, size), draw(K, size, seed=1), draw(K, 2, seed=2)
    towards = {"none": None, "shared": draw(1, size, seed=3), "own": draw(K, size, seed=3)}[centre]
    rates, pull = numbers[:, :1], numbers[:, 1:]  # neighbours in memory, as a loop keeps them
    where = (torch.arange(size) % 3 > 0).double()
    wanted = p - rates * (g if towards is None else g + pull * (p - towards) * where)
    wanted[1] = p[1]  # does not move
    before = p.clone()
    given = None if towards is None else (towards, pull, where)
    far = 0 if towards is None else (pull * towards * where).abs()
    assert_close_norm(kernels.length(g, rates, given), (rates.abs() * (g.abs() + far)).sum(1), 1e-12)
    kernels.sgd_step(p, g, rates, given, torch.tensor([True, False, True]))
    assert_close_norm(p, wanted, 1e-14)
    assert torch.equal(p[1], before[1])


@np.errstate(all="ignore")  # the interpreter computes with numpy
def test_a_step_that_is_not_finite_shows_in_its_length() -> None:
    p, g = draw(4, 6000), draw(4, 6000, seed=1)
    g[1, 5999], g[2, 0] = torch.nan, -torch.inf
    rates = torch.tensor([1.0, 1.0, 1.0, 1e308], dtype=torch.float64)[:, None]
    assert kernels.length(g, rates, None).isfinite().tolist() == [True, False, False, False]
    g[3] = 0.0
    p[3, 7], g[3, 7] = 1.5e308, -1.0  # finite, but not together
    before = p.clone()
    assert kernels.length(g, rates, None).isfinite().tolist() == [True, False, False, True]
    kernels.sgd_step(p, g, rates, None, torch.tensor([True, False, False, True]))
    assert p.isfinite().all()
    assert torch.equal(p[3], before[3])
    pull = torch.full((1, 6000), torch.nan), torch.tensor([[0.0], [1.0], [1.0], [2.0]]), torch.ones(6000)
    g.zero_()
    assert kernels.length(g, rates, pull).isfinite().tolist() == [True, False, False, False]  # the first is not pulled


def test_the_last_word_of_a_step() -> None:
    """Six lanes: going; done; not finite before; a loss that is none; a sum that is none; going, at another step."""
    counts, at = torch.tensor([5, 3, 5, 5, 5, 9]), torch.tensor([3, 3, 3, 3, 3, 8])
    finite = torch.tensor([True, True, False, True, True, True])
    losses, total = torch.arange(6.0), torch.ones(6)
    losses[3], total[4] = torch.inf, torch.nan
    trace = torch.full((10, 8), torch.nan)[:, :6]
    moves = kernels.settle(counts, at, finite, losses, total, trace)
    assert moves.tolist() == [True, False, False, False, False, True]
    assert finite.tolist() == [True, True, False, False, False, True]
    assert at.tolist() == [4, 3, 4, 4, 4, 9]
    assert trace[3].nan_to_num(-1, posinf=-2).tolist() == [0.0, -1.0, 2.0, -2.0, 4.0, -1.0]
    assert float(trace[8, 5]) == 5.0
    assert int((~trace.isnan()).sum()) == 5
