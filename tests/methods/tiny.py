"""A federation of four unequal clients and a network of two blocks, for a simulation and for its reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from helpers import assert_close_norm
from lanes import oracle
from small import experiment, small
from torch import Tensor

from perada.adapters import Residual
from perada.data import Client, Federation
from perada.experiment import Experiment
from perada.lanes import State
from perada.models.resnet import ResNet
from perada.server.distill import chunks_of

from .reference import Held, Values, World

SIZES = (5, 19, 11, 27)  # with batches of eight: 1, 3, 2 and 4 steps an epoch
CLASSES = 3
MEAN, STD = 0.4, 0.3

# [train], and the [distill] section of the two methods that have one, unless a test says otherwise.
RUN: dict[str, Any] = {
    "train__rounds": 3,
    "train__cohort": 2,
    "train__epochs": 2,
    "train__batch": 8,
    "train__lr": 0.05,
    "distill__batch": 10,
    "distill__steps": 3,
    "distill__lr": 2e-3,
    "distill__guard": "none",
    "distill__teacher_norm": "public",
    "distill__student_norm": "batch",
    "distill__keep_stats": "average",
    "run__precision": "fp64",
    "run__seed": 5,  # cohorts (1, 2), (2, 3), (0, 2): one client again and again, the others once
}


@cache
def federation() -> Federation:
    """Noise around a pattern for each class; every client has its own mixture of classes."""
    draw = np.random.default_rng(7)
    total = sum(SIZES)
    shares = draw.dirichlet([0.7] * CLASSES, len(SIZES))
    targets = np.concatenate([draw.choice(CLASSES, n, p=p) for n, p in zip(SIZES, shares, strict=True)])
    patterns = draw.normal(size=(CLASSES, 1, 8, 8))
    images = 110 + 40 * patterns[targets] + 45 * draw.normal(size=(total, 1, 8, 8))
    owned = np.split(draw.permutation(total), np.cumsum(SIZES)[:-1])
    none = np.zeros(0, np.int64)
    return Federation(
        name="tiny",
        images=torch.from_numpy(images.clip(0, 255).astype(np.uint8)),
        targets=torch.from_numpy(targets.astype(np.int64)),
        classes=tuple("abc"),
        clients=tuple(Client(f"site-{m}", train, none, none) for m, train in enumerate(owned)),
        mean=(MEAN,),
        std=(STD,),
    )


@cache
def network() -> ResNet:
    """Stem, a plain block, a block with a downsample norm, a head: statistics and affines of no special value."""
    draw = torch.Generator().manual_seed(3)
    net = ResNet((1, 1), (4, 6), CLASSES, small_stem=True)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draw)
                if tensor.dim() > 1:
                    tensor.copy_(noise * tensor[0].numel() ** -0.5)
                elif name.endswith(("running_var", "weight")):
                    tensor.copy_(1 + 0.2 * noise.tanh())
                else:
                    tensor.copy_(0.2 * noise)
    return net


def prepared(grey: Tensor) -> Tensor:
    return ((grey.double() / 255 - MEAN) / STD).repeat(1, 3, 1, 1)


@cache
def public() -> Tensor:
    """Twenty images: two chunks of ten."""
    draw = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8, generator=draw)


def simulation(method: str, settings: dict[str, Any] | None = None, **set: Any) -> Experiment:
    given = {f"method__{k}": v for k, v in (settings or {}).items()}
    config = small(method__name=method, **{**RUN, **given, **set})
    return experiment(network(), federation(), config, adapter=Residual(dropout=0.0), public=public())


def world(sim: Experiment, **other: Any) -> World:
    """The same run for a reference. Only the new adapters' values are taken from the experiment's model."""
    net = network()
    if sim.method.parts.adapters:
        net = oracle.with_adapters(net)
        held = sim.model.module.state_dict()
        net.load_state_dict({n: held[n] for n in net.state_dict() if ".adapter." in n and n in held}, strict=False)
    train, distill, f = sim.train, sim.distill, sim.federation
    told = {k: getattr(train, k) for k in ("epochs", "batch", "lr", "momentum", "weight_decay", "clip", "weighting")}
    told |= {"distill_steps": distill.steps, "distill_lr": distill.lr, "temperature": distill.temperature}
    return World(
        net=net.double(),
        images=prepared(f.images),
        targets=f.targets,
        clients=[(c.name, c.train) for c in f.clients],
        cohort=sim.sampled,
        public=[prepared(public()[chunk]) for chunk in chunks_of(len(public()), distill, f.seed)],
        seed=sim.options.seed,
        **{**told, **other},
    )


def lane(state: State, k: int = 0) -> Values:
    return {n: t[k] for n, t in {**state.params, **state.buffers}.items()}


def assert_values(found: State, wanted: list[Values], what: str) -> None:
    """Lane by lane the same names and, to 1e-9 of each tensor's norm, the same values."""
    assert found.lanes == sum(1 for one in wanted if one), f"{what}: {found.lanes} lanes"
    for k, values in enumerate(wanted if found.lanes else []):
        assert lane(found, k).keys() == values.keys(), f"{what} {k}: other names"
        for name, tensor in lane(found, k).items():
            assert_close_norm(tensor, values[name], 1e-9, f"{what} {k}: {name}")


def assert_same(sim: Experiment, held: Held) -> None:
    round = f"after round {sim.now.round},"
    assert_values(sim.now.broadcast, [held.broadcast], f"{round} broadcast")
    assert_values(sim.now.server, [held.server], f"{round} server")
    assert_values(sim.now.kept, held.kept, f"{round} kept by client")
    assert_values(sim.personal(), held.personal, f"{round} personal model of client")
