"""Who trains: a cohort takes a broadcast and returns uploads. `LocalCohort` trains all clients here, as lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from ..data import Federation
from ..errors import InputError
from ..lanes import LaneModel, State, bytes_per_lane, gather, repeat, scatter
from ..lanes.machine import free_memory, precision_of
from ..methods import Finisher, Judge, Method, check_upload, copy_epochs
from ..privacy import Privacy
from ..server.aggregate import ABSURD, Norms, Rule
from .scores import Scores, personal_scores
from .trainer import Train, Trainer

if TYPE_CHECKING:
    from ..runs.moment import Moment
    from ..runs.options import RunOptions

TOOK_PART = "took_part"  # the counter of clients that took part, summed over the rounds
SPLITS = ("local", "val", "global")  # what is evaluated during training


@dataclass(frozen=True)
class Report:
    """How a round's training went."""

    loss: float | None = None  # the mean over its clients
    failed: tuple[str, ...] = ()  # clients whose training stopped being finite; they have no upload
    absent: tuple[str, ...] = ()  # sampled sites that sent nothing
    refused: Mapping[str, str] = field(default_factory=dict)  # sites whose upload was refused, and why

    def as_note(self) -> dict[str, object]:
        """Returns what a checkpoint and a row of metrics.jsonl keep of it, without empty parts."""
        parts = {"failed": sorted(self.failed), "absent": list(self.absent), "refused": dict(self.refused)}
        return {name: value for name, value in parts.items() if value}


@dataclass(frozen=True)
class Uploads:
    """What a round's clients sent. A client whose training stopped being finite has no part in it."""

    states: State  # one lane per client, in the order of the guard's judges
    names: Sequence[str]  # of those clients; none if nobody's training stayed finite
    report: Report
    weights: Sequence[float] | None = None  # samples per client, if the mean is weighted
    kept: State | None = None  # what all clients keep now, if they are on this machine
    scores: Mapping[str, Scores] | None = None  # of the broadcast, if they came with the uploads
    spent: bool = False  # whether nobody could train: the privacy budget of every sampled site is spent

    @property
    def clients(self) -> int:
        return len(self.names)

    def admitted(self, rule: Rule, reference: State, norms: Norms) -> tuple[Uploads, Norms, Mapping[str, str]]:
        """Returns the uploads as the rule lets them take part, new norms, and who is left out and why.

        Those who are left out are in the report, and nowhere else.
        """
        admission = rule.admit(self.states, reference, norms)
        out = {self.names[k]: why for k, why in admission.left_out.items()}
        stay, weights = [k for k in range(self.clients) if k not in admission.left_out], rule.weights(self.weights)
        uploads = replace(
            self,
            states=admission.states,
            names=[self.names[k] for k in stay],
            weights=weights and [weights[k] for k in stay],
            report=replace(self.report, refused={**self.report.refused, **out}),
        )
        return uploads, admission.norms, out

    def counters(
        self, before: Mapping[str, int], received: State, broadcast: State, log: Mapping[str, Any] | None, judges: bool
    ) -> dict[str, int]:
        """Returns the bytes sent so far, and how often distillation ran and the guard accepted it.

        received: what these clients trained from. judges: whether they scored the candidates for the new broadcast.
        """
        down = received.bytes_per_lane() * (self.clients + len(self.report.failed))
        if log and "guard_chose" in log and judges:
            down += len(log["guard_steps"]) * broadcast.bytes_per_lane() * self.clients
        return {
            "bytes_up": before["bytes_up"] + self.states.bytes_per_lane() * self.clients,
            "bytes_down": before["bytes_down"] + down,
            "distilled": before["distilled"] + int(log is not None and not log.get("diverged")),
            "accepted": before["accepted"] + int(bool(log and log.get("guard_chose"))),
            **({TOOK_PART: before[TOOK_PART] + self.clients} if TOOK_PART in before else {}),
        }


class Cohort(Protocol):
    """The clients of an experiment: on this machine, or behind a network."""

    @property
    def names(self) -> tuple[str, ...]:
        """All clients, sampled or not."""

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        """Trains the sampled clients from the broadcast."""

    def left_out(self, why: Mapping[str, str]) -> None:
        """Is told which of the clients that trained last the server left out, and why: they judge nothing."""

    def score(self, now: Moment, candidates: State) -> Tensor:
        """Returns the losses `[candidates, judges]` of the clients that trained last; NaN means no opinion.

        A judge has a number, at most `ABSURD`, for each candidate, or NaN for all.
        """

    def evaluate(self, now: Moment, splits: Sequence[str], last: bool) -> Mapping[str, Scores] | None:
        """Returns every client's scores; None if they come with the next uploads, which the last ones never do."""

    def finish(self, now: Moment) -> tuple[State, Report]:
        """Runs the method's last stage at every client; returns what they keep."""


class LocalCohort:
    """All clients of a federation on this machine, trained as lanes of one batch."""

    def __init__(
        self,
        model: LaneModel,
        federation: Federation,
        method: Method,
        train: Train,
        seed: int,
        privacy: Privacy = Privacy(),
    ) -> None:
        self.model, self.federation, self.method = model, federation, method
        self.options, self.seed, self.privacy = train, seed, privacy
        self.lanes = 0  # most lanes at once; 0 is all
        self.trainer: Trainer | None = None  # of the last round

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.federation.clients)

    def trainer_of(self, clients: Sequence[int], round: int) -> Trainer:
        """Returns what the method sees of these clients in a round."""
        words = (self.model, self.federation, clients, round, self.seed, self.options, self.lanes, self.privacy)
        return Trainer(*words, copy_epochs(self.method, self.options.epochs))

    def fit_lanes(self, options: RunOptions) -> str:
        """Chooses how many lanes train at once, by the free memory; returns a line that says so."""
        device = self.model.device
        height, width = self.federation.images.shape[-2:]
        each, free = bytes_per_lane(self.model, (int(height), int(width)), self.options.batch), free_memory(device)
        lanes = self.method.parts.copies * (self.options.cohort or len(self.names))
        fit = self.model.room = int(0.9 * free / each)
        if fit < 1:
            raise InputError(
                f"one lane takes about {each / 2**30:.1f} GiB and {device.type} has {free / 2**30:.1f} free: lower "
                "Train.batch, or take a machine with more memory"
            )
        chosen = min(options.lanes or fit, lanes)
        self.lanes = chosen if chosen < lanes else 0
        count, precision = "1 lane" if chosen == 1 else f"{chosen} lanes", precision_of(options.precision, device)
        turns = f"; {lanes} lanes take turns" if chosen < lanes else ""
        return (
            f"{count} at once in {precision}, about {chosen * each / 2**30:.1f} GiB of {free / 2**30:.1f} free{turns}"
        )

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        trainer, before = self.trainer_of(sampled, now.round), gather(now.kept, sampled)
        states, kept = self.method.client_update(trainer, now.broadcast, before)
        check_upload(self.method, self.model, states)
        losses, finite = trainer.outcome(states)
        good, bad = [k for k, one in enumerate(finite) if one], [k for k, one in enumerate(finite) if not one]
        if bad:  # their uploads are dropped, and what they keep is again what it was
            states = gather(states, good) if good else State()
            trainer = self.trainer_of([sampled[k] for k in good], now.round)
            kept = scatter(kept, bad, gather(before, bad)) if kept.lanes else kept
        self.trainer = trainer
        sizes = [float(len(self.federation.clients[c].train)) for c in trainer.clients]
        loss = float(np.mean([losses[k] for k in good])) if good else None
        return Uploads(
            states,
            [self.names[c] for c in trainer.clients],
            Report(loss, tuple(self.names[sampled[k]] for k in bad)),
            sizes if self.options.weighting == "samples" else None,
            scatter(now.kept, sampled, kept) if kept.lanes else now.kept,
        )

    def left_out(self, why: Mapping[str, str]) -> None:
        assert self.trainer is not None
        stay = [c for c in self.trainer.clients if self.names[c] not in why]
        self.trainer = self.trainer_of(stay, self.trainer.round)

    def score(self, now: Moment, candidates: State) -> Tensor:
        assert self.trainer is not None
        return self.losses(self.trainer, candidates)

    def losses(self, trainer: Trainer, candidates: State) -> Tensor:
        """Returns the losses of these clients, as `score` does."""
        if not isinstance(self.method, Judge):
            raise ValueError(f"{type(self.method).__name__} has no client_score: use another Distill.guard")
        losses = self.method.client_score(trainer, candidates)
        bounded = losses.nan_to_num(nan=ABSURD, posinf=ABSURD).clamp(max=ABSURD)
        return losses.where(losses.isnan().all(0), bounded)  # of no data, or of nothing but NaN: no opinion

    def evaluate(self, now: Moment, splits: Sequence[str], last: bool) -> Mapping[str, Scores]:
        return personal_scores(self.model, self.method.personal(now.broadcast, now.kept), self.federation, splits)

    def finish(self, now: Moment) -> tuple[State, Report]:
        assert isinstance(self.method, Finisher)
        trainer = self.trainer_of(range(len(self.federation.clients)), now.round)
        kept = self.method.finish(trainer, now.broadcast, now.kept)
        bad = [k for k, one in enumerate(trainer.outcome(kept)[1]) if not one]
        before = self.method.personal(now.broadcast, now.kept)
        if bad and before.params.keys() == kept.params.keys():  # they predict with what they had before
            before = before if before.lanes == kept.lanes else repeat(before, kept.lanes)
            kept = scatter(kept, bad, gather(before, bad))
        return kept, Report(failed=tuple(self.names[k] for k in bad))
