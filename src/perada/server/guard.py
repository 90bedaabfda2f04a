"""What a method sees of the server in a round, and the choice between distilled candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..lanes import Front, LaneModel, State, flattened, key_of, stack
from .aggregate import MEAN, Rule
from .distill import Distill, distill


@dataclass(frozen=True)
class Candidates:
    """What a distillation proposes: the plain average, then the student after some numbers of steps."""

    states: State  # one lane per candidate
    steps: tuple[int, ...]  # of each
    trace: Tensor  # the KL of every step
    options: Distill
    rule: Rule = MEAN  # how the judges' losses become one

    def choose(self, losses: Tensor | None) -> tuple[int, dict[str, Any]]:
        """Returns the chosen candidate and what metrics.jsonl says about it.

        losses: `[candidates, judges]`, NaN where a judge has no data; None without a guard, which takes the last
        candidate unless it diverged. On a GPU this waits for the round's work.
        """
        finite = torch.stack([t.isfinite().all(1) for t in flattened(self.states).flat or ()]).all(0).cpu()
        first, last = float(self.trace[0]), float(self.trace[-1])
        log: dict[str, Any] = {"kl_first": _known(first), "kl_last": _known(last)}
        if losses is None:
            return (-1 if finite[-1] else 0), {**log, "diverged": not bool(finite[-1])}
        scores = self.rule.losses(losses, finite)
        best = 0 if scores is None else int(scores.argmin())  # of equals the first, which is the plain average
        known = [None] * len(self.steps) if scores is None else [_known(x) for x in scores.tolist()]
        log |= {"guard_steps": list(self.steps), "guard_losses": known, "guard_chose": self.steps[best]}
        if not finite[1:].any():
            log["diverged"] = True
        if self.options.keep_stats == "student":  # 0 steps: the average, or the average with public statistics
            log["guard_index"] = best
        return best, log

    def pick(self, state: State, best: int) -> State:
        """Returns the chosen lane of a state with one lane per candidate; any other state as it is."""
        if state.lanes != self.states.lanes:
            return state
        return state.map(lambda t: t[best % len(t) : best % len(t) + 1].clone())


def _known(value: float) -> float | None:
    """Returns a number as JSON can hold it."""
    return value if math.isfinite(value) else None


@dataclass
class Server:
    """What a method sees of the server in one round: weights for the mean, and the public data."""

    model: LaneModel
    images: Sequence[Front]  # prepared public chunks; empty where there are none
    options: Distill
    multilabel: bool
    round: int
    seed: int
    clients: int = 1  # sampled or not
    weights: Sequence[float] | None = None  # sample counts of the uploads, with Train.weighting=samples
    lanes_at_once: int = 0  # teachers in one pass; 0 is all
    rule: Rule = MEAN  # how uploads become one
    candidates: Candidates | None = None  # what a distillation proposed

    def mean(self, uploads: State, weighted: bool = True) -> State:
        """Returns the uploads, or a part of them, as one lane, by the rule of `Train.aggregate`.

        weighted: whether sample counts weigh it, with Train.weighting=samples.
        """
        return self.rule.mean(uploads, self.weights if weighted else None)

    def distill(self, student: State, teachers: State) -> State:
        """Returns the candidates, one lane each: the student before and after R steps.

        The round lets the guard choose one of them. Without distillation in this round, returns the student alone.
        """
        o = self.options
        if o.steps == 0 or (o.rounds and self.round >= o.rounds):
            return student
        if not self.images:
            raise ValueError("distillation needs public images: give some, or set Distill.steps to 0")
        key = key_of(self.seed, self.round, "distill")
        states, trace = distill(
            self.model,
            student,
            teachers,
            self.images,
            o,
            self.multilabel,
            key,
            self.lanes_at_once,
            self.round,
            self.rule,
        )
        if o.guard == "none":  # the average replaces a student that diverged
            states = stack(student, states)
        self.candidates = Candidates(states, (0, o.steps) if o.guard == "none" else o.judged(), trace, o, self.rule)
        return states
