"""The two studies of distillation: what they vary, and where they begin."""

from __future__ import annotations

from .trials import CIFAR10, DISTILLING, LITERALLY, SECONDS, SELDOM, Choice, Experiment, Settings, Trial

# Where the first study begins: teachers normalised by the public data, a guard at the clients, 150 steps at 1e-4. The
# paper's 500 steps cost more than a round's training, so they are a run of their own. So is the paper's rate, 1e-3:
# adapters begin at 1e-4, and Adam at 1e-3 makes them too large for the averaged statistics (`benchmarks/distilled.py`;
# one run had all 200 students refused). All keys are written out, so that a new preset does not change the study.
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
    "distill.schedule": "cosine",
}


# Each stage varies what the stage before chose. The last one adds two runs without a guard: one distils gently, one in
# the first ten rounds only.
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


def first_study() -> Experiment:
    """Returns the first study: its stages, no distillation, and the paper's text read literally (only shown)."""
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


# The recipe that the first study settled, written out, because the `cifar10` preset has that of the second.
FIRST_RECIPE: Settings = {
    **BEGINNING,
    "distill.pull": 0.1,
    "distill.temperature": 1.0,
    "distill.batch": 2048,
    "distill.data": "cifar100",
    "distill.size": 0,
}
FREE: Settings = {"distill.guard": "none", "distill.pull": 0.0}  # every student is broadcast, without a pull
HARD: Settings = {**FREE, "distill.lr": 1e-3, "distill.steps": 60, "distill.schedule": "constant"}
THRICE: Settings = {**HARD, "distill.rounds": 3}  # what `settle` elected; the preset `cifar10` has it
NO_KD: Settings = {"method.name": "perada-no-kd"}
WIDE: Settings = {**NO_KD, "model.adapter_std": 6e-3}  # the control: as large as one hard step makes the adapters
DITTO: Settings = {"method.name": "ditto", **SELDOM}
VARIANTS: dict[str, Settings] = {
    "no-kd": NO_KD,
    "once": {**HARD, "distill.rounds": 1},
    "wide": WIDE,
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
    "thrice": THRICE,
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
# Group -> its runs. Runs of a group share a process. Equal runs are in different groups: in one process they would add
# in the same order and differ too little.
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


def settle() -> Experiment:
    """Returns the second study, by the rule `settle`: every variant over two seeds, no distillation five times.

    The most important groups come first, so that a session that ends early leaves complete comparisons.
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
            Choice("distillation", distillation, "settle", "", "no-kd", ("wide", "authors"), "wide"),
            *(tuned(method) for method in ("no-kd", "recipe", "ditto")),
        ),
        seconds=SECONDS,
        distilling=DISTILLING,
    )
