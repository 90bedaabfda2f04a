"""The private gradient: clipped, summed, noised and divided by a public constant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from perada.adapters import adapt
from perada.client.trainer import sample_loss
from perada.lanes import Batch, LaneModel, Options, Pull, Samples, State, Way, sgd, ways
from perada.privacy.mechanism import Mechanism
from perada.privacy.randomness import Repeatable, Secret

from .networks import FULL, MODELS, SIZE, lanes_of, record_all, samples_of

SMALL = [name for name in MODELS if name != "efficientnet_lite0"]
CPU, BATCH, LR = torch.device("cpu"), 4, 0.5


class Fixed:
    """The same samples at every step."""

    on_host = True

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __call__(self, step: int, lanes: Tensor) -> Samples:
        return replace(self.samples, step=step, lanes=tuple(lanes.tolist()))


def private(
    model: LaneModel, state: State, samples: Samples, noise: float = 0.0, clip: float = 1.0, steps: int = 1, **more
) -> State:
    slopes = Mechanism(noise, clip, BATCH, more.pop("randomness", None) or Secret(CPU), more.pop("way", Way(3)))
    rates, options = [LR] * state.lanes, more.pop("options", Options(norm="running"))
    return sgd(
        model,
        state,
        Fixed(samples),
        sample_loss,
        rates,
        [steps] * state.lanes,
        options=options,
        slopes_of=slopes,
        **more,
    ).state


def moved(before: State, after: State) -> Tensor:
    """`[K, n]`"""
    return torch.cat([(after.params[n] - p).flatten(1) for n, p in sorted(before.params.items())], 1)


def linear(inputs: int, outputs: int) -> LaneModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))
    return adapt(net, adapter=None, trained="full")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_noise_and_clipping_it_is_sgd(name, momentum):
    model = MODELS[name]()
    state, samples = lanes_of(model, 2), samples_of(SIZE, (BATCH, BATCH))
    towards = lanes_of(model, 1)
    options = Options(momentum, 0.01, norm="running")
    pull = Pull(towards.only(towards.params, ()), [0.3, 0.0])

    def plain(step: int, lanes: Tensor) -> Batch:
        keys = torch.zeros(2, dtype=torch.int64)
        return Batch(samples.images, samples.targets.view(2, BATCH), None, keys)

    expected = sgd(model, state, plain, sample_loss, [LR] * 2, [3] * 2, pull, options).state
    found = private(model, state, samples, clip=1e9, steps=3, pull=pull, options=options)
    for n, p in expected.params.items():
        torch.testing.assert_close(found.params[n], p, rtol=1e-8, atol=1e-10)
    assert all(found.buffers[n].equal(b) for n, b in state.buffers.items())


def test_noise_has_the_variance_that_was_asked_for():
    model = linear(3 * 8 * 8, 520)  # 10⁵ parameters
    state, samples = lanes_of(model, 1, torch.float32), samples_of(8, (0,), torch.float32)
    for randomness in (Secret(CPU), Repeatable([("a",)])):
        found = moved(state, private(model, state, samples, noise=1.5, clip=0.7, randomness=randomness))
        assert found.numel() > 1e5
        expected = (1.5 * 0.7 / BATCH) ** 2 * LR**2
        assert abs(float(found.var()) / expected - 1) < 0.02
        assert abs(float(found.mean())) < 5 * (expected / found.numel()) ** 0.5


def test_one_sample_moves_the_step_by_at_most_the_bound():
    model = linear(12, 3)
    state, samples = lanes_of(model, 1), samples_of(2, (3,))
    base = moved(state, private(model, state, samples_without(samples), clip=0.2))
    for by in (1.0, 1e3, 1e6):
        samples.images[2] = by * torch.randn(3, 2, 2, dtype=torch.float64)
        with_it = moved(state, private(model, state, samples, clip=0.2))
        assert float((with_it - base).norm()) <= 0.2 * LR / BATCH * (1 + 1e-9)
    assert float((with_it - base).norm()) > 0.19 * LR / BATCH


def test_no_loss_is_so_large_that_a_lane_fails():
    """A hostile server may send weights for which two of certain images would make the sum of losses infinite."""
    model = linear(12, 2)
    state, samples = lanes_of(model, 1, torch.float32), samples_of(2, (2,), torch.float32)
    next(t for n, t in state.params.items() if n.endswith("weight"))[0, 0, 0] = -2e38
    samples.images[:] = 0.0
    samples.images[:, 0, 0, 0] = 1.0
    samples.targets[:] = 0
    slopes, running = Mechanism(5.0, 1.0, BATCH, Secret(CPU), Way(3)), Options(norm="running")
    done = sgd(model, state, Fixed(samples), sample_loss, [LR], [1], options=running, slopes_of=slopes)
    assert done.finite.all()


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e300])
def test_a_sample_that_is_not_finite_counts_as_zero(value):
    model = linear(12, 3)
    state, samples = lanes_of(model, 1), samples_of(2, (3,))
    base = private(model, state, samples_without(samples), clip=0.2)
    samples.images[2] = value
    found = private(model, state, samples, clip=0.2)
    assert float((moved(state, found) - moved(state, base)).norm()) <= 0.2 * LR / BATCH * (1 + 1e-9)
    assert moved(state, found).isfinite().all()


@pytest.mark.parametrize("name", [*SMALL, *FULL])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_bound_holds_in_bfloat16(name, recorded, monkeypatch):
    if recorded:
        record_all(monkeypatch)
    model = {**MODELS, **FULL}[name]()
    state, samples = lanes_of(model, 1, torch.float32), samples_of(SIZE, (1,), torch.float32)
    model.to("cpu", torch.float32, torch.bfloat16)
    way = Way(3, ways.recordable(model, (SIZE, SIZE))) if recorded else Way(3)
    assert bool(way.recorded) == recorded
    gone = moved(state, private(model, state, samples, clip=0.1, way=way))
    assert 0.0999 <= float(gone.norm()) * BATCH / LR <= 0.1 * (1 + 1e-5)


def samples_without(samples: Samples) -> Samples:
    return replace(
        samples, images=samples.images[:-1], targets=samples.targets[:-1], keys=samples.keys[:-1], counts=(2,)
    )


def test_noise_differs_between_lanes_steps_and_parameters():
    model = linear(12, 12)
    state, samples = lanes_of(model, 2), samples_of(2, (0, 0))
    for randomness in (Secret(CPU), Repeatable([("a",), ("b",)])):
        once = moved(state, private(model, state, samples, noise=1.0, randomness=randomness))
        twice = moved(state, private(model, state, samples, noise=1.0, steps=2, randomness=randomness))
        numbers = torch.cat([once.flatten(), (twice - once).flatten()])
        if isinstance(randomness, Secret):
            numbers = torch.cat([once.flatten(), twice.flatten()])
        assert len(numbers.round(decimals=12).unique()) == len(numbers)


def test_repeatable_noise_is_the_same_for_lanes_alone_and_together():
    model = linear(12, 3)
    state, samples = lanes_of(model, 2), samples_of(2, (2, 1))
    together = private(model, state, samples, noise=1.0, steps=2, randomness=Repeatable([("a",), ("b",)]))
    alone = replace(samples, images=samples.images[2:], targets=samples.targets[2:], keys=samples.keys[2:], counts=(1,))
    one = private(model, state.map(lambda t: t[1:]), alone, noise=1.0, steps=2, randomness=Repeatable([("b",)]))
    torch.testing.assert_close(one.params, {n: p[1:] for n, p in together.params.items()}, rtol=1e-10, atol=1e-12)
