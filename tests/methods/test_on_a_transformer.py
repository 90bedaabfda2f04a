"""All 22 methods on a small vision transformer: two rounds of float64 against the plain loops, with LoRA and without.

Of the methods' parts there are here: `input` (patches, class token, positions), head, adapters. There are no batch
norms: FedBN shares everything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from small import experiment, small

from perada.adapters import Bottleneck, Lora
from perada.errors import InputError
from perada.experiment import Experiment
from perada.methods import MORE, REGISTRY
from perada.models.vit import Shape, ViT

from . import reference as ref
from .reference import Held, Reference, World
from .test_references import REFERENCES
from .tiny import CLASSES, RUN, assert_same, federation, public, world


@cache
def network() -> ViT:
    draw = torch.Generator().manual_seed(3)
    net = ViT(Shape(8, 1, 2), 8, 4, CLASSES)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=draw))
    return net


def of_head(name: str) -> bool:
    return name.startswith("head.")


def of_input(name: str) -> bool:
    return name.startswith("patch_embed.") or name in ("cls_token", "pos_embed")


def of_adapter_set(name: str) -> bool:
    return ".adapter." in name or of_head(name) or "norm" in name


def perada(of: World, distils: bool) -> Reference:
    """The reference's server holds what it broadcasts."""
    return (replace(h, server=h.broadcast) for h in ref.ditto(of, part=of_adapter_set, distils=distils))


OWN: dict[str, Any] = {  # the references whose rules are about names
    "fedbn": ref.fedavg,
    "fedalt-input": lambda world, **s: ref.in_turn(world, of_input, **s),
    "fedsim-input": lambda world: ref.together(world, of_input),
    "lg-fedavg": lambda world: ref.together(world, ref.rest(of_head)),
    "fedrep": lambda world, **s: ref.in_turn(world, of_head, **{"shared_epochs": 1, **s}),
    "fedalt-output": lambda world, **s: ref.in_turn(world, of_head, **s),
    "fedsim-output": lambda world: ref.together(world, of_head),
    "perada-no-kd": lambda world: perada(world, distils=False),
    "perada": lambda world: perada(world, distils=True),
}


def simulation(method: str, adapter: Any, **set: Any) -> Experiment:
    config = small(method__name=method, **{**RUN, **set})
    return experiment(network(), federation(), config, adapter=adapter, public=public())


def on_transformer(sim: Experiment) -> World:
    """The run for a reference, whose adapters are the plain layers that tests/adapters compare with PEFT's."""
    adapted = sim.method.parts.adapters
    net = sim.model.plain(sim.model.initial()).requires_grad_() if adapted else network().double()
    return replace(world(sim), net=net)


def reference(method: str, of: World) -> Reference:
    return {**REFERENCES, **OWN}[method](of)


@pytest.mark.parametrize("method", REGISTRY)
def test_every_method_equals_its_plain_loop(method: str) -> None:
    sim = simulation(method, Lora(rank=2))
    rounds = reference(method, on_transformer(sim))
    for _ in range(2):
        sim.round()
        assert_same(sim, next(rounds))


@pytest.mark.parametrize("adapter", [Bottleneck(reduction=2), Lora(rank=1, target_modules="all-linear")], ids=repr)
@pytest.mark.parametrize("method", ["perada", "fedsim-adapter"])
def test_other_adapters_do_too(method: str, adapter: Any) -> None:
    sim = simulation(method, adapter)
    rounds = reference(method, on_transformer(sim))
    for _ in range(2):
        sim.round()
        assert_same(sim, next(rounds))


# FedSA and FFA: what is averaged of LoRA.


def of_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")


def fedsa(of: World) -> Reference:
    """Both matrices are trained on the round's batches; A, norms and head are averaged, B stays."""
    start = ref.some(of.start(), of_adapter_set)
    u, v = ref.some(start, ref.rest(of_b)), [ref.some(start, of_b) for _ in of.clients]
    for round in count():
        cohort, uploads = of.cohort(round), []
        for m in cohort:
            found = of.sgd({**u, **v[m]}, of.data(round, m), of_adapter_set)
            v[m] = ref.some(found, of_b)
            uploads.append({n: found[n] for n in u})
        u = of.mean(uploads, cohort)
        yield Held(u, list(v), [{**u, **one} for one in v])


def test_fedsa_shares_a_and_keeps_b() -> None:
    assert MORE.keys() == {"fedsa"}
    sim = simulation("fedsa", Lora(rank=2))
    rounds = fedsa(on_transformer(sim))
    for _ in range(2):
        sim.round()
        assert_same(sim, next(rounds))
    assert sim.now.kept.params.keys() == {"blocks.0.attn.qkv.adapter.lora_B.weight"}
    with pytest.raises(InputError, match="no parameter group 'lora_b'"):
        simulation("fedsa", Bottleneck())


def test_a_frozen_a_makes_the_average_of_products_the_product_of_averages() -> None:
    """FFA: with one A for all, mean(B_m A) = mean(B_m) A. With trained A it is not."""
    kept = {}
    for frozen in (True, False):
        sim = simulation("perada-no-kd", Lora(rank=2, freeze_a=frozen))
        uploads = sim.gather()
        place = "blocks.0.attn.qkv.adapter"
        b = uploads.states.params[f"{place}.lora_B.weight"]
        fixed = sim.model.module.get_submodule(f"{place}.lora_A").weight.expand(len(b), -1, -1)
        a = uploads.states.params.get(f"{place}.lora_A.weight", fixed)
        kept[frozen] = ((b @ a).mean(0) - b.mean(0) @ a.mean(0)).norm() / (b @ a).mean(0).norm()
        sim.update(uploads)
    assert kept[True] < 1e-12 < 1e-3 < kept[False]
