"""The experiments as data: named runs, which of them are trained together, and what is chosen between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from perada.config import resolve
from perada.data import VALIDATION
from perada.methods import REGISTRY, grids

MAIN = ("perada", "perada-no-kd", "ditto", "fedavg-ft", "standalone")  # the methods that every table has
GUARDLESS: dict[str, str] = {
    "method.name": "perada",
    "distill.guard": "none",
}  # every student is broadcast, as in Algorithm 1: always a row of its own
LITERALLY: dict[str, Any] = {  # the paper's text, as it reads
    **GUARDLESS,
    "distill.teacher_norm": "running",
    "distill.keep_stats": "student",
    "distill.steps": 500,
    "distill.lr": 1e-3,
}
Settings = Mapping[str, Any]
TITLES = {  # in the order of their worth
    "distill-study": "Which distillation: CIFAR-10, 40 rounds, one seed, chosen by validation data",
    "settle": "Distillation settled: CIFAR-10, 50 rounds, two seeds, judged against the noise of equal runs",
    "main": "The main table: CIFAR-10, 200 rounds, 3 seeds",
    "others": "The other 16 methods: CIFAR-10, one seed, 50 rounds, each tuned on validation data",
    "ablations": "Ablations: distillation steps, images and sets, λ, initialisation; CIFAR-10, one seed, 50 rounds",
    "pacs": "One domain a client: PACS at 64 pixels in the place of Office-Home, 100 rounds, 3 seeds",
    "xrays": "Chest X-rays: 5 labels, AUC, 4,999 NIH images in the place of CheXpert, 30 rounds, 3 seeds",
    "digits": "The machinery itself: embedded digits, 3 rounds, 2 seeds, on a CPU in half a minute; no result",
}
NAMES = tuple(TITLES)
REPORTED = NAMES[:-1]  # those that the document is about


@dataclass(frozen=True)
class Trial:
    """One run. `settings` stand over the experiment's; where it `follows` a choice, over what that chose."""

    name: str
    group: str  # the runs of a group are trained together, and before a run of the next group is begun
    settings: Settings
    follows: str = ""
    tested: bool = True  # False: evaluated on validation data alone, and its folder goes when its result is written
    variant: str = ""  # rule "settle": runs of one variant differ in their seed alone; equal seeds measure the noise


@dataclass(frozen=True)
class Choice:
    """What is settled by validation data when all of `among` are done; the winner of `before` stands for election,
    too. `study.py` has the rules.

    Under the rule "settle" `among`, `reference` and `shown` name variants, not runs.
    """

    name: str
    among: tuple[str, ...]
    rule: Literal["local", "study", "settle"] = "local"
    before: str = ""
    reference: str = ""  # the run or variant that no candidate may fall behind in Local
    shown: tuple[str, ...] = ()  # controls and diagnoses: compared with the reference, never chosen


@dataclass(frozen=True)
class Experiment:
    """A list of runs on one split. `file` is what is looked for in the folder that is given as --data.

    Of a round on one H200, as far as measured, else estimated: `seconds` of its training by method ("" for others);
    `distilling`, the seconds of the teachers and the guard, and those of one step.
    """

    name: str
    preset: str
    settings: Settings
    trials: tuple[Trial, ...]
    choices: tuple[Choice, ...] = ()
    file: str = ""
    needs_weights: bool = True
    seconds: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    distilling: tuple[float, float] = (0.0, 0.0)

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
# To take a checkpoint of 20 full models stops, for a second or two, all runs that are trained together.
SELDOM: Settings = {"run.checkpoint_every": 50}
SHIFTS: Settings = {"run.shifts": True}
CIFAR10: Settings = {**GPU, "data.min_per_class": 2}  # as the authors' code has it; the paper names Dir(0.1) alone
# docs/performance.md for adapters (three runs in a pool); full models by the ratio of measured steps (16 lanes: 4.4 ms
# to 1.65 ms; 8 lanes, where a client has one model: 2.8 ms).
SECONDS = {"perada": 0.8, "perada-no-kd": 0.8, "ditto": 2.2, "pfedme": 3.6, "apfl": 2.4, "": 1.4}
DISTILLING = (0.17, 0.0023)
SMALL_SECONDS = {"perada": 0.4, "perada-no-kd": 0.4, "ditto": 1.2, "": 0.7}


def main_trials(preset: str, seeds: Sequence[int]) -> tuple[Trial, ...]:
    """The five methods and PerAda without its guard, where the preset has one.

    Seeds of what shares its steps are trained together, on a GPU six runs at once, since the more lanes there are the
    less each costs: the adapters first, which are what distillation is judged by, then Ditto with its two full models a
    client, then the others. A session on a borrowed GPU should end with complete runs: where its time is too short for
    a group, --only names some of it.
    """
    variants = {m: {"method.name": m} for m in MAIN} | {"perada-guard-none": GUARDLESS}
    groups: dict[str, tuple[str, ...]] = {"adapters": ("perada", "perada-no-kd", "perada-guard-none")}
    groups |= {"ditto": ("ditto",), "full": ("fedavg-ft", "standalone")}
    if resolve(preset, {}).distill.guard == "none":
        groups["adapters"] = groups["adapters"][:2]
    return tuple(
        Trial(f"{name}-{seed}", group, {**variants[name], **({} if group == "adapters" else SELDOM), "run.seed": seed})
        for group, names in groups.items()
        for seed in seeds
        for name in names
    )


# Where the study begins: teachers normalised by the public data, a guard at the clients, and 150 steps: the paper's 500
# cost more than all training of a round, so they are a run of their own. So is the paper's rate, 1e-3: the adapters'
# weights begin at 1e-4, and Adam at that rate makes them so much larger that the averaged statistics are nonsense for
# them (`benchmarks/distilled.py`; all 200 rounds of a run were refused). Written out, so that settling a preset by the
# study does not change what the study was.
BEGINNING: Settings = {
    "distill.steps": 150,
    "distill.lr": 1e-4,
    "distill.rounds": 0,
    "distill.teacher_norm": "public",
    "distill.student_norm": "batch",
    "distill.keep_stats": "student",
    "distill.guard": "clients",
    "distill.candidates": [20, 60, 150],
    "distill.pull": 0.0,
    "distill.weight_decay": 0.0,
}


# Stage by stage: what a stage chose is what the next one varies. The last stage has two more without a guard, that
# distil gently, or in the first rounds alone.
STAGES: dict[str, dict[str, Settings]] = {
    "norms": {
        "default": {},
        "teacher-running": {"distill.teacher_norm": "running"},
        "student-frozen": {"distill.student_norm": "frozen"},
        "stats-average": {"distill.keep_stats": "average"},
    },
    "guard": {
        "guard-none": {"distill.guard": "none"},
        "guard-server": {"distill.guard": "server"},
        "candidates-early": {"distill.candidates": [5, 10, 20, 40]},
    },
    "rate": {
        "lr-1e-3": {"distill.lr": 1e-3},
        "lr-3e-5": {"distill.lr": 3e-5},
        "steps-500": {"distill.steps": 500},
    },
    "hold": {
        "rounds-10": {"distill.rounds": 10},
        "pull-weak": {"distill.pull": 0.01},
        "pull-strong": {"distill.pull": 0.1},
        "decay": {"distill.weight_decay": 1e-3},
        "none-gentle": {"distill.guard": "none", "distill.lr": 3e-5, "distill.steps": 50, "distill.pull": 0.1},
        "none-rounds-10": {"distill.guard": "none", "distill.rounds": 10},
    },
}


def _study() -> Experiment:
    """The stages, the run without distillation, and the paper's text read literally, which is shown and chosen by
    nobody. Runs that distil differently part after the first round, so that there is no training that they could share
    but that one round of forty; what they do share is the pool of lanes."""
    trials = [
        Trial("no-kd", "norms", {"method.name": "perada-no-kd"}, tested=False),
        Trial("as-written", "norms", LITERALLY, tested=False),
    ]
    choices, before = list[Choice](), ""
    for stage, variants in STAGES.items():
        trials += [Trial(n, stage, {"method.name": "perada", **s}, before, False) for n, s in variants.items()]
        choices.append(Choice(stage, tuple(variants), "study", before, "no-kd"))
        before = stage
    return Experiment(
        name="distill-study",
        preset="cifar10",
        settings={**CIFAR10, **BEGINNING, "train.rounds": 40, "data.server_val": 0.05},
        trials=tuple(trials),
        choices=tuple(choices),
        seconds=SECONDS,
        distilling=DISTILLING,
    )


# The recipe that the first study settled, written out: the `cifar10` preset may change when this study ends.
FIRST_RECIPE: Settings = {
    **BEGINNING,
    "distill.pull": 0.1,
    "distill.schedule": "cosine",
    "distill.temperature": 1.0,
    "distill.batch": 2048,
    "distill.data": "cifar100",
    "distill.size": 0,
}
FREE: Settings = {"distill.guard": "none", "distill.pull": 0.0}  # every student is broadcast, nothing holds it
HARD: Settings = {**FREE, "distill.lr": 1e-3, "distill.steps": 60, "distill.schedule": "constant"}
NO_KD: Settings = {"method.name": "perada-no-kd"}
DITTO: Settings = {"method.name": "ditto", **SELDOM}
VARIANTS: dict[str, Settings] = {
    "no-kd": NO_KD,
    "once": {**HARD, "distill.rounds": 1},
    "wide": {**NO_KD, "model.adapter_std": 6e-3},
    "recipe": {},
    "free": FREE,
    "authors": {
        "distill.guard": "server",
        "distill.rounds": 30,
        "distill.lr": 1e-3,
        "distill.steps": 500,
        "distill.candidates": list(range(20, 500, 20)),
        "distill.schedule": "constant",
        "distill.pull": 0.0,
    },
    "thrice": {**HARD, "distill.rounds": 3},
    "thirty": {**HARD, "distill.rounds": 30, "distill.lr": 3e-4},
    "no-kd-lam2": {**NO_KD, "method.lam": 2.0},
    "no-kd-lam4": {**NO_KD, "method.lam": 4.0},
    "no-kd-slow": {**NO_KD, "train.lr": 5e-3},
    "recipe-lam2": {"method.lam": 2.0},
    "recipe-lam4": {"method.lam": 4.0},
    "recipe-slow": {"train.lr": 5e-3},
    "ditto": DITTO,
    "ditto-lam2": {**DITTO, "method.lam": 2.0},
    "ditto-lam4": {**DITTO, "method.lam": 4.0},
    "ditto-slow": {**DITTO, "train.lr": 5e-3},
}
# Group -> its runs. Runs of a group share one process, so equal runs are in different groups: within one process they
# would meet the same order of additions and differ too little.
SETTLE: dict[str, tuple[str, ...]] = {
    "early": ("no-kd-0", "no-kd-1", "once-0", "once-1", "wide-0", "wide-1"),
    "ditto": ("ditto-0", "ditto-1"),
    "always": ("no-kd-0b", "recipe-0", "recipe-1", "free-0", "free-1", "authors-0"),
    "longer": ("no-kd-0c", "no-kd-1b", "thrice-0", "thrice-1", "thirty-0", "thirty-1"),
    "ditto-lam2": ("ditto-lam2-0", "ditto-lam2-1"),
    "lam": ("no-kd-lam2-0", "no-kd-lam2-1", "recipe-lam2-0", "recipe-lam2-1", "no-kd-lam4-0", "no-kd-lam4-1"),
    "ditto-lam4": ("ditto-lam4-0", "ditto-lam4-1"),
    "rate": ("recipe-lam4-0", "recipe-lam4-1", "no-kd-slow-0", "no-kd-slow-1", "recipe-slow-0", "recipe-slow-1"),
    "ditto-slow": ("ditto-slow-0", "ditto-slow-1"),
}


def _settle() -> Experiment:
    """The second study of distillation, by the rule `settle`: every variant over two seeds, no distillation five times.

    The groups stand in the order of their worth, so that a lease that ends early leaves comparisons that are complete.
    """

    def trial(name: str, group: str) -> Trial:
        variant, _, seed = name.rpartition("-")
        settings = {"method.name": "perada", **VARIANTS[variant], "run.seed": int(seed.rstrip("bc"))}
        return Trial(name, group, settings, tested=False, variant=variant)

    def tuned(method: str) -> Choice:
        return Choice(method, tuple(f"{method}-{how}" for how in ("lam2", "lam4", "slow")), "settle", "", method)

    distillation = ("recipe", "once", "thrice", "thirty", "free")
    return Experiment(
        name="settle",
        preset="cifar10",
        settings={
            **CIFAR10,
            **FIRST_RECIPE,
            "run.checkpoint_every": 25,
            "run.eval_every": 2,
            "train.rounds": 50,
            "data.server_val": 0.05,
        },
        trials=tuple(trial(name, group) for group, names in SETTLE.items() for name in names),
        choices=(
            Choice("distillation", distillation, "settle", "", "no-kd", ("wide", "authors")),
            *(tuned(method) for method in ("no-kd", "recipe", "ditto")),
        ),
        seconds=SECONDS,
        distilling=DISTILLING,
    )


def points(preset: str, method: str, rates: Sequence[float]) -> list[Settings]:
    """A small grid: what the preset has, and one setting changed at a time."""
    keys: dict[str, Sequence[Any]] = {"train.lr": rates}
    keys |= {f"method.{k}": values for k, values in grids(method).items()}
    if REGISTRY[method]().parts.distils:
        keys["distill.lr"] = (1e-3, 1e-4)
    own = resolve(preset, {"method.name": method}).flat()
    changed = [{key: value} for key, values in keys.items() for value in values if value != own[key]]
    return [{**base_of(method), **settings} for settings in ({}, *changed)]


def base_of(method: str) -> Settings:
    """FedDF has no pull towards the average; the preset's was settled for PerAda's adapters."""
    return {"method.name": method} | ({"distill.pull": 0.0} if method == "feddf" else {})


def tuned_trials(
    preset: str, methods: Sequence[str], rates: Sequence[float], rounds: int
) -> tuple[tuple[Trial, ...], tuple[Choice, ...]]:
    """Method by method, so that what is stopped leaves whole ones: the points of its grid for a few rounds on
    validation data, together, then the run that is tested."""
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


def _ablations() -> Experiment:
    """Numbers of images are whole batches of 2,048: what is left over is not distilled on. Of PACS, the X-rays and
    CIFAR-10's validation data there are 9,991, 3,954 and 5,000, so the sets are compared at equal numbers."""
    perada, own = {"method.name": "perada"}, resolve("cifar10", {}).distill.steps
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
        settings={**CIFAR10, "train.rounds": 50},
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


@lru_cache
def experiments() -> dict[str, Experiment]:
    """All of them, in the order of their worth."""
    seeds = (0, 1, 2)
    main = Experiment(
        name="main",
        preset="cifar10",
        settings={**CIFAR10, **SHIFTS},
        trials=main_trials("cifar10", seeds),
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
        # Fewer clients and milder skew than the preset's: with 20 clients most have test images of one class only.
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
    small = {"train.rounds": 3, "train.epochs": 1, "distill.steps": 5, "distill.candidates": [2], "run.eval_every": 1}
    digits = Experiment(
        name="digits",
        preset="digits",
        settings={**small, "run.shifts": False},
        trials=main_trials("digits", (0, 1)),
        needs_weights=False,
    )
    found = (_study(), _settle(), main, _others(), _ablations(), pacs, xrays, digits)
    return {e.name: e for e in found}
