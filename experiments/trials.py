"""What an experiment is made of: named runs in groups, and choices between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = Mapping[str, Any]
TITLES = {  # most important first
    "distill-study": "Which distillation: CIFAR-10, 40 rounds, one seed, chosen on validation data",
    "settle": "Distillation settled: CIFAR-10, 50 rounds, two seeds, judged against the noise of equal runs",
    "main": "The main table: CIFAR-10, 200 rounds, 3 seeds",
    "others": "The other 17 methods: CIFAR-10, one seed, 50 rounds, each tuned on validation data",
    "vit": "A vision transformer with LoRA: CIFAR-10, one seed, 50 rounds, the five methods tuned on validation data",
    "ablations": "Ablations: distillation steps, images and sets, λ, initialisation; CIFAR-10, one seed, 50 rounds",
    "pacs": "One domain per client: PACS at 64 pixels instead of Office-Home, 100 rounds, 3 seeds",
    "xrays": "Chest X-rays: 5 labels, AUC, 4,999 NIH images instead of CheXpert, 30 rounds, 3 seeds",
    "drift": "Predictions that notice drift: CIFAR-10, 200 rounds, 3 seeds, PerAda, PerAda w/o KD and Ditto",
    "dp-lite0": "Differential privacy: CIFAR-10 at 96 pixels, EfficientNet-Lite0, 10 rounds, one seed",
    "dp-vit": "Differential privacy: CIFAR-10, a vision transformer with LoRA, 10 rounds, one seed",
    "lite0": "An ImageNet backbone: CIFAR-10 at 96 pixels, EfficientNet-Lite0, 50 rounds, one seed",
    "digits": "A check of the code: embedded digits, 3 rounds, 2 seeds, half a minute on a CPU; not a result",
}
NAMES = tuple(TITLES)
REPORTED = tuple(n for n in NAMES if n != "digits")  # in the document; what `drift` measures has a table of its own


@dataclass(frozen=True)
class Trial:
    """One run. Its settings override the experiment's, and those of the choice that it follows."""

    name: str
    group: str  # runs of one group train together, before the next group begins
    settings: Settings
    follows: str = ""
    tested: bool = True  # False: evaluated on validation data alone; its folder is removed after its result is written
    variant: str = ""  # rule "settle": runs of one variant differ in their seed alone; equal seeds measure the noise


@dataclass(frozen=True)
class Choice:
    """A choice by validation data between the runs `among` and the winner of the choice `before`.

    It is made when all of them are done; `study.py` has the rules. Under the rule "settle" `among`, `reference` and
    `shown` name variants instead of runs.
    """

    name: str
    among: tuple[str, ...]
    rule: Literal["local", "study", "settle"] = "local"
    before: str = ""
    reference: str = ""  # the run or variant that candidates are compared with
    shown: tuple[str, ...] = ()  # controls and diagnoses: compared with the reference, never chosen
    control: str = ""  # the one of `shown` that a winner has to beat, too: item 10 of the rule


@dataclass(frozen=True)
class Experiment:
    """A list of runs on one split.

    Times are for one round on one H200, measured where possible. They give the minutes left in `list`.
    """

    name: str
    preset: str
    settings: Settings
    trials: tuple[Trial, ...]
    choices: tuple[Choice, ...] = ()
    file: str = ""  # the data set's file in the folder that --data names
    needs_weights: bool = True
    seconds: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})  # of training, by method; "" for others
    distilling: tuple[float, float] = (0.0, 0.0)  # seconds of the teachers and the guard, and of one step

    @property
    def title(self) -> str:
        return TITLES[self.name]

    def trial(self, name: str) -> Trial:
        return next(t for t in self.trials if t.name == name)

    def choice(self, name: str) -> Choice:
        return next(c for c in self.choices if c.name == name)

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(t.group for t in self.trials))

    def runs_of(self, variant: str) -> list[str]:
        """Returns the names of a variant's runs, replicates included."""
        return [t.name for t in self.trials if t.variant == variant]


GPU: Settings = {"run.precision": "bf16", "run.checkpoint_every": 10}
# A checkpoint of 20 full models stops all runs of a group for a second or two.
SELDOM: Settings = {"run.checkpoint_every": 50}
SHIFTS: Settings = {"run.shifts": True}
CIFAR10: Settings = {**GPU, "data.min_per_class": 2}  # as in the authors' code; the paper names Dir(0.1) alone
# Adapters: docs/performance.md, three runs in a pool. Full models: by the ratio of measured steps (16 lanes 4.4 ms to
# 1.65 ms; 8 lanes, one model per client, 2.8 ms).
SECONDS = {"perada": 0.8, "perada-no-kd": 0.8, "ditto": 2.2, "pfedme": 3.6, "apfl": 2.4, "": 1.4}
DISTILLING = (0.17, 0.0023)
LITE0_SECONDS = {"perada": 20.0, "perada-no-kd": 20.0, "ditto": 20.0, "": 10.0}  # a guess, not measured yet
SMALL_SECONDS = {"perada": 0.4, "perada-no-kd": 0.4, "ditto": 1.2, "": 0.7}


# Every student is broadcast, as in Algorithm 1: always a row of its own.
GUARDLESS: dict[str, str] = {"method.name": "perada", "distill.guard": "none"}
LITERALLY: dict[str, Any] = {  # the paper's text, read literally
    **GUARDLESS,
    "distill.teacher_norm": "running",
    "distill.keep_stats": "student",
    "distill.steps": 500,
    "distill.lr": 1e-3,
}
