"""All 22 methods against plain loops: three rounds of float64, every parameter and running statistic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from perada.experiment import Experiment
from perada.methods import REGISTRY

from . import reference as ref
from .reference import Held, Reference, World
from .tiny import SIZES, assert_same, assert_values, network, simulation, world

REFERENCES: dict[str, Callable[..., Reference]] = {
    "standalone": ref.standalone,
    "mtl": ref.mtl,
    "fedavg-ft": lambda world, **last_stage: ref.fedavg(world),
    "pfedme": ref.pfedme,
    "apfl": ref.apfl,
    "ditto": ref.ditto,
    "fedbn": lambda world: ref.together(world, ref.of_batch_norms),
    "fedalt-input": lambda world, **s: ref.in_turn(world, ref.of_input, **s),
    "fedsim-input": lambda world: ref.together(world, ref.of_input),
    "lg-fedavg": lambda world: ref.together(world, ref.rest(ref.of_head)),
    "fedrep": lambda world, **s: ref.in_turn(world, ref.of_head, **{"shared_epochs": 1, **s}),
    "fedalt-output": lambda world, **s: ref.in_turn(world, ref.of_head, **s),
    "fedsim-output": lambda world: ref.together(world, ref.of_head),
    "fedalt-adapter": lambda world, **s: ref.in_turn(world, ref.of_adapter_modules, **s),
    "fedsim-adapter": lambda world: ref.together(world, ref.of_adapter_modules),
    "perada-no-kd": lambda world, **s: ref.ditto(world, part=ref.of_adapter_set, **s),
    "perada": lambda world, **s: ref.ditto(world, part=ref.of_adapter_set, distils=True, **s),
    "fedavg": ref.fedavg,
    "fedprox": lambda world, mu=0.1: ref.fedavg(world, mu=mu),
    "feddyn": ref.feddyn,
    "feddf": lambda world: ref.fedavg(world, distils=True),
    "scaffold": ref.scaffold,
}


@dataclass(frozen=True)
class Case:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)  # of [method]
    run: dict[str, Any] = field(default_factory=dict)  # of the rest of the configuration

    def __str__(self) -> str:
        words = [f"{k}={v}" for k, v in {**self.settings, **self.run}.items()]
        return " ".join([self.method, *words])

    def simulation(self) -> Experiment:
        return simulation(self.method, self.settings, **self.run)

    def reference(self, world: World, **other: Any) -> Reference:
        return REFERENCES[self.method](world, **{**self.settings, **other})


OWN = {"personal_epochs": 3, "personal_lr": 0.03}
FIRM = {"train__weight_decay": 0.02, "train__clip": 0.4}
FAST = {"train__momentum": 0.8}
THREE = {"train__cohort": 3, "train__epochs": 1}

CASES = [
    *(Case(name) for name in REGISTRY),
    *(Case(name, {}, {"train__weighting": "samples"}) for name in REGISTRY),
    Case("standalone", {}, FIRM | FAST),
    Case("mtl", {"lam": 0.3}, THREE | FIRM),
    Case("fedavg-ft", OWN, FIRM | FAST),
    Case("pfedme", {"lam": 2.0, "inner_steps": 3, "eta": 0.3, "beta": 0.6, "personal_lr": 0.07}, FIRM),
    Case("pfedme", {"lam": 0.5, "inner_steps": 2, "eta": 0.8}, THREE),
    Case("apfl", {"alpha": 0.3}, FIRM),
    Case("apfl", {"alpha": 0.3, "adaptive": True}, FIRM | {"train__lr": 0.1}),
    Case("apfl", {"alpha": 0.05, "adaptive": True}, THREE | {"train__lr": 0.1}),
    Case("apfl", {"alpha": 0.999, "adaptive": True}, THREE | {"train__lr": 0.2}),
    Case("ditto", {"lam": 0.4, **OWN}, FIRM),
    Case("ditto", {"lam": 0.4, "personal_epochs": 1}, FAST | {"train__weighting": "samples"}),
    Case("fedbn", {}, THREE | FIRM | FAST),
    Case("fedalt-input", OWN, FIRM),
    Case("fedsim-input", {}, THREE | FIRM | FAST),
    Case("lg-fedavg", {}, THREE | FIRM),
    Case("fedrep", {"shared_epochs": 2, **OWN}, FAST | THREE),
    Case("fedrep", {"shared_epochs": 3}, FIRM),
    Case("fedalt-output", OWN, FIRM),
    Case("fedsim-output", {}, FIRM | {"train__weighting": "samples"}),
    Case("fedalt-adapter", OWN, FIRM | FAST),
    Case("fedsim-adapter", {}, THREE | FIRM),
    Case("perada-no-kd", {"lam": 0.4, **OWN}, FIRM | FAST),
    Case("perada", {"lam": 0.4, **OWN}, THREE | {"distill__temperature": 2.0}),
    Case("perada", {}, {"distill__steps": 1}),  # of two chunks one a round
    Case("fedprox", {"mu": 0.7}, FAST),
    Case("feddyn", {"alpha": 0.3}, THREE | {"train__weight_decay": 0.02}),
    Case("feddf", {}, THREE | {"distill__temperature": 2.0}),
    Case("scaffold", {"server_lr": 0.6}, FIRM),
    Case("scaffold", {"server_lr": 1.3}, THREE | {"train__weighting": "samples", "train__weight_decay": 0.02}),
]


def test_every_method_has_a_reference() -> None:
    assert REFERENCES.keys() == REGISTRY.keys()
    assert {c.method for c in CASES if not c.settings and not c.run} == REGISTRY.keys()


def test_the_cohorts_leave_clients_out_and_call_others_again() -> None:
    """So that what a client keeps matters, also while it is away; and clients have 1 to 4 steps an epoch."""
    for case in (Case("fedavg"), Case("fedavg", {}, THREE)):
        sim = case.simulation()
        cohorts = [sim.sampled(r) for r in range(3)]
        assert all(len(c) < len(SIZES) for c in cohorts)
        often = [sum(m in c for c in cohorts) for m in range(len(SIZES))]
        assert max(often) > 1
        assert min(often) < 3
        assert [len(world(sim).data(0, m, 1)) for m in range(len(SIZES))] == [1, 3, 2, 4]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_rounds_equal_the_plain_loop(case: Case) -> None:
    sim = case.simulation()
    rounds = case.reference(world(sim))
    for _ in range(3):
        sim.round()
        assert_same(sim, next(rounds))


@pytest.mark.parametrize("case", [c for c in CASES if c.method == "fedavg-ft"], ids=str)
def test_fine_tuning_at_every_client_equals_the_plain_loop(case: Case) -> None:
    """The batches are those of a round after the last."""
    sim = case.simulation()
    for _ in range(3):
        sim.round()
    last = [held for held, _ in zip(case.reference(world(sim)), range(3), strict=False)][-1]
    sim.finish()
    wanted = ref.fine_tuned(world(sim), last.broadcast, 3, **case.settings)
    assert_same(sim, Held(last.broadcast, wanted, wanted))


def test_lanes_one_at_a_time_equal_the_plain_loop_too() -> None:
    """Methods with a step or a number of their own for each lane."""
    names = ("pfedme", "feddyn", "scaffold")
    for case in (Case("apfl", {"adaptive": True}), Case("perada", OWN), *map(Case, names)):
        sim = simulation(case.method, case.settings, run__lanes=1)
        rounds = case.reference(world(sim))
        for _ in range(2):
            sim.round()
            assert_same(sim, next(rounds))


# The references can tell.


def distance(a: Held, b: Held) -> float:
    """The largest relative difference of a tensor."""
    pairs = [(x, y) for x, y in zip([a.broadcast, *a.kept], [b.broadcast, *b.kept], strict=True)]
    return max(float((x[n] - y[n]).norm() / y[n].norm().clamp_min(1e-12)) for x, y in pairs for n in x)


def after(rounds: Reference, number: int) -> Held:
    return [held for held, _ in zip(rounds, range(number), strict=False)][-1]


FIRST: dict[str, Held] = {}


def first_round(case: Case) -> Held:
    if str(case) not in FIRST:
        FIRST[str(case)] = next(case.reference(world(case.simulation())))
    return FIRST[str(case)]


def another(value: Any) -> Any:
    if isinstance(value, str):
        return "uniform"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 0.9


def varied() -> list[tuple[Case, str]]:
    """Each setting of each case, and the numbers of `[train]` in the cases of methods that use them their own way."""
    own_way = ("pfedme", "apfl", "ditto", "fedalt-output", "fedrep", "fedprox", "scaffold")
    numbers = ("weight_decay", "clip", "momentum", "weighting")
    settings = [(c, k) for c in CASES for k in c.settings if c.method != "fedavg-ft"]
    runs = [(c, f"train__{k}") for c in CASES if c.method in own_way for k in numbers if f"train__{k}" in c.run]
    return settings + runs


@pytest.mark.parametrize(("case", "key"), varied(), ids=str)
def test_a_reference_with_another_number_is_another(case: Case, key: str) -> None:
    """So a method that ignores or misreads one does not pass."""
    sim = case.simulation()
    if key in case.settings:
        wrong = case.reference(world(sim), **{key: another(case.settings[key])})
    else:
        wrong = case.reference(world(sim, **{key.removeprefix("train__"): another(case.run[key])}))
    assert distance(next(wrong), first_round(case)) > 1e-6


def test_a_method_with_another_setting_than_the_reference_fails() -> None:
    for name, right, wrong in (
        ("fedprox", {"mu": 0.5}, {"mu": 0.51}),
        ("pfedme", {"eta": 0.3}, {"eta": 0.31}),
        ("feddyn", {"alpha": 0.1}, {"alpha": 0.101}),
        ("apfl", {"alpha": 0.3}, {"alpha": 0.3, "adaptive": True}),
        ("scaffold", {"server_lr": 1.0}, {"server_lr": 0.99}),
    ):
        sim = simulation(name, wrong)
        sim.round()
        with pytest.raises(AssertionError, match="differs by"):
            assert_same(sim, next(REFERENCES[name](world(sim), **right)))


def test_the_comparison_sees_a_single_number_and_a_missing_name() -> None:
    sim = simulation("fedavg")
    sim.round()
    held = next(ref.fedavg(world(sim)))
    assert_same(sim, held)
    for name in ("layer2.0.downsample.1.running_var", "conv1.weight"):
        moved = {**held.broadcast, name: held.broadcast[name].clone()}
        moved[name].view(-1)[0] += 1e-6
        with pytest.raises(AssertionError, match=name):
            assert_values(sim.now.broadcast, [moved], "broadcast")
        fewer = {n: t for n, t in held.broadcast.items() if n != name}
        with pytest.raises(AssertionError, match="other names"):
            assert_values(sim.now.broadcast, [fewer], "broadcast")


def test_distillation_moves_what_is_compared() -> None:
    sim = simulation("perada")
    run = world(sim)
    with_, without = (ref.ditto(run, part=ref.of_adapter_set, distils=d) for d in (True, False))
    assert distance(next(with_), next(without)) > 1e-4


def test_adaptive_shares_move_and_stop_at_both_ends() -> None:
    """Among the cases compared above one stays inside (0, 1), one reaches 0 and one reaches 1."""
    adaptive = [c for c in CASES if c.settings.get("adaptive")]
    found = [after(c.reference(world(c.simulation())), 3) for c in adaptive]
    inside, low, high = (torch.cat([kept["own/alpha"] for kept in held.kept]) for held in found)
    assert (inside != 0.3).sum() >= 3
    assert ((inside > 0) & (inside < 1)).all()
    assert (low == 0).any()
    assert (low > 0).any()
    assert (high == 1).any()
    assert (high < 1).any()


def test_the_network_has_what_makes_methods_differ() -> None:
    names = [n for n, _ in network().named_parameters()]
    assert any("downsample.1" in n for n in names)
    assert any(n.startswith("fc.") for n in names)
    assert len([n for n, _ in network().named_buffers() if n.endswith("running_mean")]) == 6
