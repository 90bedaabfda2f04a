"""The kernels that step on all parameters at once, run by Triton's interpreter on the CPU, against plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_close_norm

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes.ops import PLAIN, AdamPlan, Change, Ops, Pulled

from .test_triton import TRITON, K, draw, refused


def test_lanes_that_do_not_move_stay() -> None:
    old, new = draw(K, 1500), draw(K, 1500, seed=1)
    new[1] = torch.nan
    before = old.clone()
    TRITON.replace(old, new).write(torch.tensor([True, False, True]))
    assert torch.equal(old, torch.stack([new[0], before[1], new[2]]))


def test_adam_is_torchs() -> None:
    """Two lanes, the second of which has done a step more."""
    betas, ahead = (0.9, 0.999), (0, 1)
    table = torch.tensor([[0.1 / (1 - 0.9**t), (1 - 0.999**t) ** 0.5] for t in range(1, 5)]).double()
    p, done = draw(2, 1500), torch.tensor([[0.0, 7.0], [1.0, 7.0]]).double()[:, :1]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    leaves = [p[k].clone().requires_grad_() for k in range(2)]
    plain = [torch.optim.Adam([leaf], lr=0.1, betas=betas, eps=1e-8) for leaf in leaves]
    for k in range(2):
        for _ in range(ahead[k]):  # a step that moves nothing
            leaves[k].grad = torch.zeros_like(leaves[k])
            plain[k].step()
    for t in range(1, 4):
        g = draw(2, 1500, seed=t)
        for k in range(2):
            leaves[k].grad = g[k].clone()
            plain[k].step()
        (change,) = TRITON.adam([p], [g], [m], [v], done, AdamPlan(table, betas, 1e-8))
        total = change.total
        change.write(torch.tensor([True, True]))
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
    given = None if towards is None else Pulled([towards], pull, where)
    far = 0 if towards is None else (pull * towards * where).abs()
    (change,) = TRITON.sgd([p], [g], rates, given, 0.0, [])
    assert_close_norm(change.total, (rates.abs() * (g.abs() + far)).sum(1), 1e-12)
    assert torch.equal(p, before), "nothing is written yet"
    change.write(torch.tensor([True, False, True]))
    assert_close_norm(p, wanted, 1e-14)
    assert torch.equal(p[1], before[1])


@np.errstate(all="ignore")  # the interpreter computes with numpy
def test_a_step_that_is_not_finite_shows_in_its_length() -> None:
    p, g = draw(4, 6000), draw(4, 6000, seed=1)
    g[1, 5999], g[2, 0] = torch.nan, -torch.inf
    rates = torch.tensor([1.0, 1.0, 1.0, 1e308], dtype=torch.float64)[:, None]

    def finite(pull: Pulled | None = None) -> list[bool]:
        return TRITON.sgd([p], [g], rates, pull, 0.0, [])[0].total.isfinite().tolist()

    assert finite() == [True, False, False, False]
    g[3] = 0.0
    p[3, 7], g[3, 7] = 1.5e308, -1.0  # finite, but not together
    before = p.clone()
    assert finite() == [True, False, False, True]
    TRITON.sgd([p], [g], rates, None, 0.0, [])[0].write(torch.tensor([True, False, False, True]))
    assert p.isfinite().all()
    assert torch.equal(p[3], before[3])
    centre, strength = torch.full((1, 6000), torch.nan), torch.tensor([[0.0], [1.0], [1.0], [2.0]])
    g.zero_()
    assert finite(Pulled([centre], strength, torch.ones(6000))) == [True, False, False, False], "the first has no pull"


def test_the_last_word_of_a_step() -> None:
    """Six lanes: going; done; not finite before; a loss that is none; a sum that is none; going, at another step."""
    counts, at = torch.tensor([5, 3, 5, 5, 5, 9]), torch.tensor([3, 3, 3, 3, 3, 8])
    finite = torch.tensor([True, True, False, True, True, True])
    losses, total = torch.arange(6.0), torch.ones(6)
    losses[3], total[4] = torch.inf, torch.nan
    trace = torch.full((10, 8), torch.nan)[:, :6]
    plain = [t.clone() for t in (counts, at, finite, losses, total, trace)]
    moves = TRITON.settle(counts, at, finite, losses, total, trace)
    assert torch.equal(PLAIN.settle(*plain), moves)
    for a, b in zip((at, finite, trace), (plain[1], plain[2], plain[5]), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert moves.tolist() == [True, False, False, False, False, True]
    assert finite.tolist() == [True, True, False, False, False, True]
    assert at.tolist() == [4, 3, 4, 4, 4, 9]
    assert trace[3].nan_to_num(-1, posinf=-2).tolist() == [0.0, -1.0, 2.0, -2.0, 4.0, -1.0]
    assert float(trace[8, 5]) == 5.0
    assert int((~trace.isnan()).sum()) == 5


def changed(ops: Ops, tensors: list[torch.Tensor], how: Callable[..., list[Change]], moves: list[bool]) -> list:
    """The tensors after the lanes that move have changed, and which lanes' totals are finite."""
    own = [t.clone() for t in tensors]
    changes = how(ops, *own)
    for change in changes:
        change.write(torch.tensor(moves))
    total = torch.stack([c.total for c in changes]).sum(0)
    return [*own, total.isfinite()]


def same(tensors: list[torch.Tensor], how: Callable[..., list[Change]], kernels: bool) -> None:
    """The same changes by both operations; whether Triton does them in kernels alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sgd", "adam", "write") if kernels else ():
            patch.setattr(Ops, name, refused)
        found = changed(TRITON, tensors, how, [True, False, True])
    wanted = changed(PLAIN, tensors, how, [True, False, True])
    for a, b, before in zip(found[:-1], wanted[:-1], tensors, strict=True):
        assert_close_norm(a, b, 1e-12)
        assert torch.equal(a[1], before[1])
    assert torch.equal(found[-1], wanted[-1])


@np.errstate(all="ignore")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("shape", [(70,), (4, 5)])
def test_sgd(momentum: float, pulled: bool, shape: tuple[int, ...]) -> None:
    """Momentum, and parameters that do not lie in one tensor, take plain torch. The third lane's gradient is not a
    number."""
    p, g, v, rates = (draw(K, *s, seed=i) for i, s in enumerate([shape, shape, shape, (1,)]))
    g[2] = torch.nan
    flat = shape == (70,)
    pull = Pulled([draw(1, *shape, seed=5)], draw(K, 1, seed=6), (torch.arange(70) % 2).double() if flat else None)

    def step(ops: Ops, p: torch.Tensor, v: torch.Tensor) -> list[Change]:
        changes = ops.sgd([p], [g], rates, pull if pulled else None, momentum, [v] if momentum else [])
        return [c._replace(write=lambda moves, c=c: c.write(moves & c.total.isfinite())) for c in changes]

    same([p, v], step, kernels=flat and not momentum)


@pytest.mark.parametrize("shape", [(1500,), (4, 5)])
def test_adam(shape: tuple[int, ...]) -> None:
    p, g, m, v = (draw(K, *shape, seed=i) for i in range(4))
    table = torch.tensor([[0.1, 0.7], [0.2, 0.8], [0.0, 0.9]]).double()
    done = torch.tensor([[0.0], [1.0], [9.0]]).double()

    def step(ops: Ops, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, done: torch.Tensor) -> list[Change]:
        return ops.adam([p], [g], [m], [v], done, AdamPlan(table, (0.9, 0.999), 1e-8))

    same([p, m, v.square(), done], step, kernels=len(shape) == 1)
