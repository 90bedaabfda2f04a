"""The plans of differential privacy: accuracy against ε on CIFAR-10, over two backbones.

The rule, written down on 19 November 2026 before any run. Everybody takes part in each of 10 rounds, one local epoch
each, a clip of 1, and noise 0.8, 1 and 1.5, as in the paper; ε is each client's own. A method's rate is tuned twice, by
three rounds on validation data alone (rule "local"): without noise for ε = ∞, and with noise 1 for all three noise
levels. PerAda's distillation rate is tuned beside it. No test number is read before all rates are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .trials import Choice, Experiment, Settings, Trial

METHODS = ("perada-no-kd", "perada", "ditto")
NOISES = (0.8, 1.0, 1.5)  # the paper's
TUNING = 3  # rounds of a tuning run
COMMON: dict[str, Any] = {
    "run.precision": "bf16",
    "run.checkpoint_every": 10,
    "run.eval_every": 5,
    "data.min_per_class": 2,
    "data.augment": "none",
    "train.rounds": 10,
    "train.cohort": 0,
    "train.epochs": 1,
    "distill.guard": "none",
    "distill.rounds": 0,
    "distill.steps": 100,
    "distill.batch": 32,
    "distill.size": 3200,
    "distill.schedule": "constant",
    # Norms keep the backbone's statistics, at the server as at the clients.
    "distill.teacher_norm": "running",
    "distill.student_norm": "frozen",
    "distill.keep_stats": "average",
}
VIT: Settings = {"model.backbone": "vit_small_patch4", "model.adapter": "lora", "model.rank": 8}
LITE0: Settings = {
    "model.backbone": "experiments.networks:lite0_96",
    "model.weights": "random",  # the function loads them
    "model.adapt_from": "stage7",
    "data.normalise": "backbone",
}


def rates(method: str, private: bool) -> list[Settings]:
    """Returns the points of a method's grid; the paper's rates with noise are 0.2, 0.1 and 0.05."""
    full = method == "ditto"  # which trains whole models
    found = (0.01, 0.05) if full else (0.05, 0.2) if private else (0.02, 0.1)
    if method != "perada":
        return [{"train.lr": lr} for lr in found]
    return [{"train.lr": lr, "distill.lr": rate} for lr in found for rate in (5e-3, 5e-4)]


def private_trials(methods: Sequence[str] = METHODS) -> tuple[tuple[Trial, ...], tuple[Choice, ...]]:
    """Returns per method its two grids, each before the runs that follow its choice."""
    trials, choices = list[Trial](), list[Choice]()
    for method in methods:
        for words, private in (("open", False), ("noisy", True)):
            name, noise = f"{method}-{words}", 1.0 if private else 0.0
            base: dict[str, Any] = {"method.name": method, "privacy.noise": noise}
            grid = [
                Trial(f"{name}-{i}", f"{name}-grid", {**base, **point, "train.rounds": TUNING}, tested=False)
                for i, point in enumerate(rates(method, private))
            ]
            levels = NOISES if private else (0.0,)
            runs = [
                Trial(f"{method}-{level:g}", name, {**base, "privacy.noise": level}, follows=name) for level in levels
            ]
            trials += [*grid, *runs]
            choices.append(Choice(name, tuple(t.name for t in grid)))
    return tuple(trials), tuple(choices)


def private_experiments() -> tuple[Experiment, Experiment]:
    """Returns the table on EfficientNet-Lite0 with ImageNet weights, and that on a ViT-S of `train_vit.py`."""
    trials, choices = private_trials()
    lite0 = Experiment(
        name="dp-lite0",
        preset="cifar10",
        settings={**COMMON, **LITE0},
        trials=trials,
        choices=choices,
        needs_weights=False,
        seconds={"": 2.0, "ditto": 4.0},
        distilling=(1.0, 0.005),
    )
    vit = Experiment(
        name="dp-vit",
        preset="cifar10",
        settings={**COMMON, **VIT},
        trials=trials,
        choices=choices,
        seconds={"": 6.0, "ditto": 20.0},
        distilling=(1.0, 0.01),
    )
    return lite0, vit
