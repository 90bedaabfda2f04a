"""The experiments as data: named runs, which of them train together, and what is chosen between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from perada.config import resolve
from perada.data import VALIDATION
from perada.methods import REGISTRY, grids

from .private import private_experiments
from .studies import FIRST_RECIPE, THRICE, WIDE, first_study, settle
from .trials import (
    CIFAR10,
    DISTILLING,
    GPU,
    GUARDLESS,
    LITE0_SECONDS,
    LITERALLY,
    SECONDS,
    SELDOM,
    SHIFTS,
    SMALL_SECONDS,
    Choice,
    Experiment,
    Settings,
    Trial,
)

MAIN = ("perada", "perada-no-kd", "ditto", "fedavg-ft", "standalone")  # the methods in every table


# The main table's runs of adapters. `perada` is the preset, `perada-recipe` what the first study settled, and
# `perada-wide` the control of `settle`: larger initial adapters without distillation.
ADAPTERS: dict[str, Settings] = {
    "perada": {"method.name": "perada", **THRICE},
    "perada-no-kd": {"method.name": "perada-no-kd"},
    "perada-no-kd-lam2": {"method.name": "perada-no-kd", "method.lam": 2.0},  # its own best in `settle`
    "perada-wide": WIDE,
    "perada-recipe": {"method.name": "perada"},
    "perada-unguarded": GUARDLESS,
}


def main_trials(
    preset: str,
    seeds: Sequence[int],
    adapters: Mapping[str, Settings] | None = None,
    others: Sequence[str] = ("ditto", "fedavg-ft", "standalone"),
) -> tuple[Trial, ...]:
    """Returns the runs of the five methods, and of PerAda without its guard where the preset has one.

    Runs that share their steps train together, six at once on a GPU, because a lane costs less among many. Adapters
    come first, since distillation is judged by them, then Ditto with two full models per client, then the others.
    """
    if adapters is None:
        adapters = {m: {"method.name": m} for m in ("perada", "perada-no-kd")}
        if resolve(preset, {}).distill.guard != "none":
            adapters["perada-guard-none"] = GUARDLESS
    variants = {m: {"method.name": m} for m in MAIN} | dict(adapters)
    groups = {"adapters": tuple(adapters), "ditto": ("ditto",), "full": ("fedavg-ft", "standalone")}
    return tuple(
        Trial(f"{name}-{seed}", group, {**variants[name], **({} if group == "adapters" else SELDOM), "run.seed": seed})
        for group, names in groups.items()
        for seed in seeds
        for name in names
        if group == "adapters" or name in others
    )


def points(preset: str, method: str, rates: Sequence[float]) -> list[Settings]:
    """Returns a small grid: the preset's settings, then one of them changed at a time."""
    keys: dict[str, Sequence[Any]] = {"train.lr": rates}
    keys |= {f"method.{k}": values for k, values in grids(method).items()}
    if REGISTRY[method]().parts.distils:
        keys["distill.lr"] = (1e-3, 1e-4)
    own = resolve(preset, {"method.name": method}).flat()
    changed = [{key: value} for key, values in keys.items() for value in values if value != own[key]]
    return [{**base_of(method), **settings} for settings in ({}, *changed)]


def base_of(method: str) -> Settings:
    """Returns a method's own settings. FedDF distils in every round, PerAda in the preset's first ones."""
    return {"method.name": method} | ({"distill.pull": 0.0, "distill.rounds": 0} if method == "feddf" else {})


def tuned_trials(
    preset: str, methods: Sequence[str], rates: Sequence[float], rounds: int
) -> tuple[tuple[Trial, ...], tuple[Choice, ...]]:
    """Returns per method its grid for a few rounds on validation data, then the run that is tested.

    They go method by method, so that an early stop leaves complete methods.
    """
    trials, choices = list[Trial](), list[Choice]()
    for method in methods:
        grid = [
            Trial(f"{method}-point-{i}", f"{method}-grid", {**settings, "train.rounds": rounds}, tested=False)
            for i, settings in enumerate(points(preset, method, rates))
        ]
        trials += [*grid, Trial(method, method, base_of(method), follows=method)]
        choices.append(Choice(method, tuple(t.name for t in grid)))
    return tuple(trials), tuple(choices)


def _others() -> Experiment:
    trials, choices = tuned_trials("cifar10", [m for m in REGISTRY if m not in MAIN], (1e-3, 5e-3), 10)
    return Experiment(
        name="others",
        preset="cifar10",
        settings={**CIFAR10, **SHIFTS, "train.rounds": 50},
        trials=trials,
        choices=choices,
        seconds=SECONDS,
        distilling=DISTILLING,
    )


def _vit() -> Experiment:
    """Returns the runs on a ViT-S with patches of 4, whose weights `experiments/train_vit.py` makes.

    They have seen CIFAR-100, which is also what is distilled on. Their times are guesses until they are measured.
    """
    trials, choices = tuned_trials("cifar10", MAIN, (5e-2, 2e-1), 10)
    model = {"model.backbone": "vit_small_patch4", "model.adapter": "lora", "model.rank": 8}
    return Experiment(
        name="vit",
        preset="cifar10",
        settings={**CIFAR10, **model, "train.rounds": 50},
        trials=trials,
        choices=choices,
        seconds={"perada": 4.0, "perada-no-kd": 4.0, "": 8.0},
        distilling=DISTILLING,
    )


def _ablations() -> Experiment:
    """Returns the ablations. Public images come in whole batches of 2,048, because a remainder is not used.

    PACS has 9,991 images, the X-rays 3,954 and CIFAR-10's validation data 5,000, so sets are compared at equal numbers.
    """
    perada, own = {"method.name": "perada"}, FIRST_RECIPE["distill.steps"]
    no_more = {"distill.pull": 0.0, "distill.weight_decay": 0.0, "distill.rounds": 0, "distill.schedule": "constant"}
    variants: dict[str, dict[str, Settings]] = {
        "base": {"perada": {}, "no-kd": {"method.name": "perada-no-kd"}},
        "text": {"as-written": {**LITERALLY, **no_more}},
        "statistics": {"statistics": {"distill.lr": 1e-12, "distill.guard": "none"}},
        "steps": {f"steps-{n}": {"distill.steps": n} for n in (20, 50, 150, 500) if n != own},
        "images": {f"images-{n}": {"distill.size": n} for n in (2048, 8192, 24576)},
        "sets": {f"{name}-{n}": {"distill.data": file, "distill.size": n} for name, file, n in SETS},
        "lam": {f"lam-{v:g}": {"method.lam": v} for v in (0.01, 0.1, 10.0)},
        "start": {"weights-random": {"model.weights": "random"}, "weights-fedavg": {"model.weights": "fedavg"}},
    }
    return Experiment(
        name="ablations",
        preset="cifar10",
        settings={**CIFAR10, **FIRST_RECIPE, "train.rounds": 50},
        trials=tuple(
            Trial(name, group, {**perada, **settings})
            for group, several in variants.items()
            for name, settings in several.items()
        ),
        seconds=SECONDS,
        distilling=DISTILLING,
    )


PACS, XRAYS = "pacs_64.npz", "nih_cxr14_part001_64.npz"  # in the folder of data
SETS = (("validation", VALIDATION, 2048), ("pacs", PACS, 2048), ("pacs", PACS, 8192), ("xrays", XRAYS, 2048))
FIVE_LABELS = ["Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Effusion"]  # CheXpert's, by NIH's names


LITE0: Settings = {
    "model.backbone": "experiments.networks:lite0_96",
    "model.weights": "random",  # the function loads them
    "data.normalise": "backbone",
    "run.shifts": False,
}


@lru_cache
def experiments() -> dict[str, Experiment]:
    """Returns all experiments by name, most important first."""
    seeds = (0, 1, 2)
    main = Experiment(
        name="main",
        preset="cifar10",
        settings={**CIFAR10, **SHIFTS, **FIRST_RECIPE},  # its first runs had that recipe
        trials=main_trials("cifar10", seeds, ADAPTERS),
        seconds=SECONDS,
        distilling=DISTILLING,
    )
    pacs = Experiment(
        name="pacs",
        preset="office-home",
        settings={**GPU, "data.size": 64},
        trials=main_trials("office-home", seeds),
        file=PACS,
        seconds=SMALL_SECONDS,
        distilling=DISTILLING,
    )
    xrays = Experiment(
        name="xrays",
        preset="chexpert",
        # Fewer clients and less skew than in the preset: of 20 clients most would have test images of one class only.
        settings={
            **GPU,
            "data.labels": FIVE_LABELS,
            "data.meta_min": 50,
            "data.clients": 5,
            "data.alpha": 1.0,
            "train.cohort": 0,
            "train.batch": 64,
        },
        trials=main_trials("chexpert", seeds),
        file=XRAYS,
        seconds=SMALL_SECONDS,
        distilling=DISTILLING,
    )
    lite0 = Experiment(
        name="lite0",
        preset="cifar10",
        settings={**CIFAR10, **LITE0, "train.rounds": 50},
        trials=main_trials("cifar10", (0,)),
        needs_weights=False,
        seconds=LITE0_SECONDS,
        distilling=DISTILLING,
    )
    small = {"train.rounds": 3, "train.epochs": 1, "distill.steps": 5, "distill.candidates": [2], "run.eval_every": 1}
    digits = Experiment(
        name="digits",
        preset="digits",
        settings={**small, "run.shifts": False},
        trials=main_trials("digits", (0, 1)),
        needs_weights=False,
    )
    drift = Experiment(  # the main table's runs: their folders are what the protocol measures
        name="drift",
        preset="cifar10",
        settings={**CIFAR10, **FIRST_RECIPE},
        trials=main_trials("cifar10", seeds, {n: ADAPTERS[n] for n in ("perada", "perada-no-kd")}, ("ditto",)),
        seconds=SECONDS,
        distilling=DISTILLING,
    )
    found = (
        first_study(),
        settle(),
        main,
        _others(),
        _vit(),
        _ablations(),
        pacs,
        xrays,
        drift,
        *private_experiments(),
        lite0,
        digits,
    )
    return {e.name: e for e in found}
