"""The experiments that are planned, before any is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_close_norm
from small import after

from experiments import plans, results
from experiments.networks import lite0_96
from experiments.plans import MAIN, experiments
from experiments.study import settings_of
from experiments.trials import NAMES, Experiment
from perada.adapters import Residual
from perada.config import resolve
from perada.methods import REGISTRY
from perada.models import backbone


@pytest.mark.parametrize("name", NAMES)
def test_every_run_resolves_and_no_two_are_the_same(name: str) -> None:
    """Whatever a choice would come to: here everybody is a tie, so that the first of each wins."""
    found = experiments()[name]
    assert found.name == name
    names = [t.name for t in found.trials]
    assert len(set(names)) == len(names)
    for choice in found.choices:
        settles = choice.rule == "settle"
        runs = [run for v in choice.among for run in (found.runs_of(v) if settles else [v])]
        assert set(runs) <= set(names), choice.name
        assert len(runs) >= len(choice.among)
        assert not any(found.trial(n).tested for n in runs), "what stands for election touches no test data"
    configs = [resolve(found.preset, {**found.settings, **t.settings}) for t in found.trials]
    free = [c for c, t in zip(configs, found.trials, strict=True) if not t.follows]
    replicates = len([t for t in found.trials if t.name[-1] in "bc" and t.variant])
    assert len({results.digest(c) for c in free}) == len(free) - replicates
    assert len({c.data for c in configs}) == 1, "one split"


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_is_made_of_runs_that_stand_before_those_that_follow_it(name: str) -> None:
    found = experiments()[name]
    at = {t.name: i for i, t in enumerate(found.trials)}
    for trial in found.trials:
        if trial.follows:
            assert max(at[n] for n in found.choice(trial.follows).among) < at[trial.name]


def test_the_main_table_has_the_five_methods_the_recipe_and_the_control() -> None:
    main = experiments()["main"]
    configs = {t.name: resolve(main.preset, {**main.settings, **t.settings}) for t in main.trials}
    more = {"perada-no-kd-lam2", "perada-wide", "perada-recipe", "perada-unguarded"}
    assert {n.rpartition("-")[0] for n in configs} == {*MAIN, *more}
    assert all({f"{m}-{seed}" for seed in (0, 1, 2)} <= configs.keys() for m in MAIN)
    assert {c.train.rounds for c in configs.values()} == {200}
    assert all(c.run.shifts and c.run.severities == (1, 2, 3, 4, 5) for c in configs.values())
    assert configs["perada-0"].distill == resolve("cifar10", {}).distill, "the preset"
    recipe, free = configs["perada-recipe-0"].distill, configs["perada-unguarded-0"].distill
    assert (recipe.guard, free.guard) == ("clients", "none")
    assert replace(free, guard="clients") == recipe
    wide, plain = configs["perada-wide-0"], configs["perada-no-kd-0"]
    assert replace(wide, model=replace(wide.model, adapter_std=1e-4)) == plain


def test_the_others_are_the_other_seventeen_each_with_a_grid() -> None:
    others = experiments()["others"]
    assert sorted(t.name for t in others.trials if t.tested) == sorted(set(REGISTRY) - set(MAIN))
    assert {c.name for c in others.choices} == set(REGISTRY) - set(MAIN)
    assert all(len(c.among) >= 3 for c in others.choices)
    assert len([t for t in others.trials if t.tested]) == 17
    names = [t.name for t in others.trials]
    last = [others.choice(t.name).among[-1] for t in others.trials if t.tested]
    assert all(names[names.index(n) + 1] in REGISTRY for n in last), "each is tested when it is tuned: no slice is lost"


def test_the_main_table_trains_all_seeds_of_what_shares_its_steps_together() -> None:
    """What distillation is judged by stands first, and a seed's runs stand together: six at once are two seeds."""
    main = experiments()["main"]
    assert main.groups == ["adapters", "ditto", "full"]
    for group in main.groups:
        several = [t for t in main.trials if t.group == group]
        names = {t.name.rpartition("-")[0] for t in several}
        assert all(n.startswith("perada") for n in names) == (group == "adapters")
        assert {t.name for t in several} == {f"{n}-{seed}" for n in names for seed in (0, 1, 2)}
        seeds = [t.settings["run.seed"] for t in several]
        assert seeds == sorted(seeds)


def test_a_preset_that_is_settled_without_a_guard_has_no_second_row_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for guard, rows in (("clients", ["perada-guard-none-0"]), ("none", [])):
        monkeypatch.setattr(plans, "resolve", lambda source, more, g=guard: resolve(source, {"distill.guard": g}))
        assert [t.name for t in plans.main_trials("cifar10", (0,)) if "guard" in t.name] == rows


def test_the_ablations_have_every_axis_that_the_issue_asks_for() -> None:
    found = experiments()["ablations"]
    assert {"steps", "images", "sets", "lam", "start"} <= set(found.groups)
    own = resolve(found.preset, found.settings).distill
    for group in ("images", "sets"):
        sizes = {t.settings["distill.size"] for t in found.trials if t.group == group}
        assert all(n % own.batch == 0 for n in sizes), "whole batches"
    assert len({t.settings["distill.data"] for t in found.trials if t.group == "sets"}) == 3
    equal = {t.settings["distill.size"] for t in found.trials if t.group == "images"}
    assert {t.settings["distill.size"] for t in found.trials if t.group == "sets"} <= equal, "CIFAR-100 beside them"


def test_the_text_read_literally_has_nothing_that_the_text_has_not() -> None:
    """SPEC, sections 3 and 7: Adam at 1e-3, 500 steps of 2,048 images in every round, every student broadcast."""
    found = experiments()["ablations"]
    o = resolve(found.preset, {**found.settings, **found.trial("as-written").settings}).distill
    assert (o.steps, o.batch, o.lr, o.rounds, o.guard) == (500, 2048, 1e-3, 0, "none")
    assert (o.pull, o.weight_decay, o.schedule, o.temperature) == (0, 0, "constant", 1)
    assert (o.teacher_norm, o.student_norm, o.keep_stats) == ("running", "batch", "student")


def test_the_run_of_statistics_alone_has_those_of_the_students_and_learns_nothing() -> None:
    """The recipe's own statistics, batches and all, and a rate at which no weight moves; that, on a small run."""
    found = experiments()["ablations"]
    o, own = (
        resolve(found.preset, {**found.settings, **found.trial(n).settings}).distill for n in ("statistics", "perada")
    )
    assert replace(o, lr=own.lr, guard=own.guard) == own
    assert (o.guard, o.keep_stats) == ("none", "student")
    still = {"distill__lr": o.lr, "distill__guard": o.guard, "distill__keep_stats": o.keep_stats}
    plain, distilled = after(1, method__name="perada-no-kd").now.broadcast, after(1, **still).now.broadcast
    for name, tensor in plain.params.items():
        assert_close_norm(distilled.params[name], tensor, 1e-6, what=name)
    assert any(not t.equal(plain.buffers[n]) for n, t in distilled.buffers.items())


def test_feddf_distils_in_every_round_without_a_pull() -> None:
    found = experiments()["others"]
    settings = [resolve(found.preset, {**t.settings}).distill for t in found.trials if t.name.startswith("feddf")]
    assert {(o.pull, o.rounds) for o in settings} == {(0.0, 0)}


def test_the_study_varies_every_setting_of_the_design_space() -> None:
    study = experiments()["distill-study"]
    assert len(study.trials) == 18
    varied = {k for t in study.trials for k, v in t.settings.items() if study.settings.get(k) != v}
    keys = ("teacher_norm", "student_norm", "keep_stats", "guard", "candidates", "lr", "steps", "rounds", "pull")
    assert {f"distill.{k}" for k in (*keys, "weight_decay")} <= varied
    assert {t.settings.get("distill.guard", "clients") for t in study.trials} == {"none", "server", "clients"}


def test_settling_the_preset_does_not_change_what_the_study_was() -> None:
    """Each of its runs says itself how it distils."""
    study = experiments()["distill-study"]
    distil = {k for k in resolve("cifar10", {}).flat() if k.startswith("distill.")}
    free = {"distill.data", "distill.size", "distill.batch", "distill.temperature", "distill.schedule"}
    assert distil - free <= set(study.settings)


def test_settle_has_two_seeds_of_all_but_the_diagnosis_and_five_runs_without_distillation() -> None:
    settle = experiments()["settle"]
    configs = {t.name: resolve(settle.preset, {**settle.settings, **t.settings}) for t in settle.trials}
    assert {c.train.rounds for c in configs.values()} == {50}
    assert {c.run.eval_every for c in configs.values()} == {2}
    seeds: dict[str, list[int]] = {}
    for trial in settle.trials:
        seeds.setdefault(trial.variant, []).append(configs[trial.name].run.seed)
    assert seeds.pop("no-kd") == [0, 1, 0, 0, 1]
    assert seeds.pop("authors") == [0]
    assert set(map(tuple, seeds.values())) == {(0, 1)}
    equal = [t for t in settle.trials if t.variant == "no-kd"]
    assert len({results.digest(configs[t.name]) for t in equal}) == 2
    by_seed = [{t.group for t in equal if configs[t.name].run.seed == s} for s in (0, 1)]
    assert [len(groups) for groups in by_seed] == [3, 2], "equal runs never share a process"


def test_settle_has_the_candidates_that_the_specification_lists() -> None:
    """SPEC 13: one early hard step, three rounds, thirty at 3e-4, its control, and no guard with no pull."""
    settle = experiments()["settle"]

    def of(run: str) -> Any:
        return resolve(settle.preset, {**settle.settings, **settle.trial(run).settings})

    once = of("once-0").distill
    assert (once.rounds, once.lr, once.steps, once.schedule, once.guard, once.pull) == (
        1,
        1e-3,
        60,
        "constant",
        "none",
        0,
    )
    assert once.teacher_norm == "public"
    assert replace(of("thrice-0").distill, rounds=1) == once
    assert replace(of("thirty-0").distill, rounds=1, lr=1e-3) == once
    wide, plain = of("wide-0"), of("no-kd-0")
    assert replace(wide, model=replace(wide.model, adapter_std=1e-4)) == plain
    free, recipe = of("free-1"), of("recipe-1")
    assert replace(free.distill, guard=recipe.distill.guard, pull=recipe.distill.pull) == recipe.distill
    assert (free.distill.guard, free.distill.pull) == ("none", 0)
    searched = [
        (of(f"{m}-lam2-0").method["lam"], of(f"{m}-lam4-0").method["lam"], of(f"{m}-slow-0").train.lr)
        for m in ("no-kd", "recipe", "ditto")
    ]
    assert set(searched) == {(2.0, 4.0, 5e-3)}, "the same search for all three"


def small() -> Experiment:
    return experiments()["digits"]


def test_a_digest_is_of_the_settings_and_of_nothing_else() -> None:
    settings = settings_of(small(), small().trials[0], {})
    assert settings is not None

    def digest(**more: object) -> str:
        return results.digest(resolve("digits", {**settings, **{k.replace("__", "."): v for k, v in more.items()}}))

    assert digest() == digest(run__device="cpu", run__lanes=3, run__eval_every=7, run__checkpoint_every=5)
    assert len({digest(), digest(run__seed=9), digest(distill__lr=0.5), digest(distill__pull=0.1)}) == 4
    assert digest() == digest(distill__pull=0.0), "off, as by default"
    weights = [digest(model__weights=w) for w in ("/a/one.safetensors", "/b/two.safetensors", "random")]
    assert weights[0] == weights[1] != weights[2]


def test_the_imagenet_backbone_sees_enlarged_images() -> None:
    """CIFAR-10 stays at 32 pixels; adapters and stages are those of the network itself."""
    made, plain = lite0_96(10), backbone("efficientnet_lite0", 10)
    plain.load("package")
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    large = torch.nn.functional.interpolate(x, (96, 96), mode="bilinear", align_corners=False)
    with torch.no_grad():
        assert torch.equal(made.net.eval()(x), plain.net.eval()(large))
    assert (made.mean, made.std) == (plain.mean, plain.std)
    assert Residual().places(made.net) == Residual().places(plain.net)
    found = experiments()["lite0"]
    assert {resolve(found.preset, {**found.settings, **t.settings}).method_name for t in found.trials} == set(MAIN)
    assert not found.needs_weights
