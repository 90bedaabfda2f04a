"""What a method sees of the clients that train: their data, and SGD on their lanes. The same for one client alone."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import ClientBatches, steps_of
from ..data.federation import Federation
from ..data.source import Indices
from ..errors import InputError
from ..fields import check_fields
from ..lanes import Group, LaneModel, Options, Pull, Result, State, Update, loop, ops_for, sgd
from ..privacy import Privacy
from ..privacy.training import private_sgd
from ..server.aggregate import Kind
from .scores import logits_on

TOGETHER = ("cuda",)  # where one pass for all clients is as fast as a pass for one


@dataclass(frozen=True)
class Train:
    """The `[train]` section: what every method's client training shares."""

    rounds: int = 200
    cohort: int = 0  # clients sampled each round; 0 is all of them
    epochs: int = 10
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # bound on the norm of a lane's gradient; 0 is off
    weighting: Literal["uniform", "samples"] = "uniform"  # how the server averages
    aggregate: Kind = "mean"  # how it averages; the other rules limit a hostile minority: server/aggregate.py
    trim: float = 0.2  # share of the clients that trimmed_mean leaves out of a coordinate, at each end

    def __post_init__(self) -> None:
        least = {"rounds": 1, "cohort": 0, "epochs": 1, "momentum": 0, "weight_decay": 0, "clip": 0}
        check_fields(self, {**least, "trim": 0}, positive=("lr",))
        if self.trim >= 0.5:
            raise InputError(f"Train.trim must be below 0.5, because it counts at both ends, not {self.trim}")
        if self.weighting == "samples" and self.aggregate in ("trimmed_mean", "median"):
            raise InputError(
                f"Train.aggregate={self.aggregate} counts all clients alike: set Train.weighting to uniform, or "
                "Train.aggregate to norm_clip"
            )
        if self.batch < 2:
            raise InputError(f"Train.batch must be at least 2 (batch norm needs two samples), not {self.batch}")


def sample_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss per sample `[..., B]`: cross-entropy, or for label vectors the mean binary cross-entropy.

    A label that is not known (NaN) adds nothing to the mean, and has no gradient.
    """
    if targets.is_floating_point():
        known, truth = ~targets.isnan(), targets.nan_to_num(0.0).to(logits)
        each = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        return each.where(known, 0.0).mean(-1)
    return ops_for(logits.device).cross_entropy(logits, targets)


def sample_losses(model: LaneModel, lanes: State, federation: Federation, index: Indices) -> Tensor:
    """Returns every lane's loss on every image of an index, `[K, n]`."""
    logits, targets = logits_on(model, lanes, federation, index), federation.labels(index)
    return sample_loss(logits, targets.expand(lanes.lanes, *targets.shape))


@dataclass
class Trainer:
    """A cohort in one round. Lane k of a state belongs to client `clients[k % len(clients)]`."""

    model: LaneModel
    federation: Federation
    clients: Sequence[int]
    round: int
    seed: int
    options: Train
    lanes_at_once: int = 0  # 0: all
    privacy: Privacy = field(default_factory=Privacy)
    booked: Sequence[int] = ()  # epochs of each copy for which a client pays with its privacy; () where nobody counts
    _done: list[Result] = field(default_factory=list, init=False, repr=False)  # reading it waits for a GPU

    @property
    def steps(self) -> list[int]:
        """The steps that each client takes in a round."""
        sizes = (len(self.federation.clients[c].train) for c in self.clients)
        return [steps_of(n, self.options.batch, self.options.epochs) for n in sizes]

    def outcome(self, result: State) -> tuple[list[float], list[bool]]:
        """Returns per client the mean training loss of its last copy, and whether its training stayed finite.

        result: what comes of the training, one lane per client or none; it must be finite too. Waits for a GPU once.
        """
        count, device = len(self.clients), self.model.device
        finite = [done.finite.view(-1, count).all(0) for done in self._done]
        finite += [t.isfinite().flatten(1).all(1) for t in result.tensors()]
        losses = self._done[-1].trace.nanmean(0)[-count:] if self._done else torch.full((count,), torch.nan)
        good = torch.stack(finite).all(0) if finite else torch.ones(count, dtype=torch.bool)
        losses, good = torch.stack([losses.to(device), good.to(device, losses.dtype)]).tolist()
        return losses, [bool(one) for one in good]

    def sgd(
        self,
        lanes: State,
        *,
        of: Group | None = None,
        pull: tuple[State, float | Sequence[float]] | None = None,
        lr: float | Sequence[float] | None = None,
        epochs: int | Sequence[int] | None = None,
    ) -> State:
        """Trains `lanes`: one copy per client, or several stacked (all clients' first copies, then the second, ...).

        of: the group that is trained; the rest stays as it is, running statistics too.
        pull: (centre, strength) adds `strength · (p − centre)` to the gradient.
        Strength, lr and epochs are one number, or one per copy. A second call in a round sees the same mini-batches;
        with differential privacy of samples it is refused.
        """
        if of is not None and not of.params & lanes.params.keys():
            return lanes
        rates = self._per_lane(lanes, self.options.lr if lr is None else lr)
        towards = Pull(pull[0], self._per_lane(lanes, pull[1])) if pull else None
        if self.privacy.of_samples:
            return self._private(lanes, of, towards, rates, epochs)
        batches, steps = self._batches(lanes, epochs)
        options = self._options()
        return self._trained(
            sgd(self.model, lanes, batches, sample_loss, rates, steps, towards, options, of, self.lanes_at_once)
        )[0]

    def loop(
        self,
        states: tuple[State, ...],
        update: Update,
        *,
        key: Hashable = None,
        epochs: int | Sequence[int] | None = None,
    ) -> tuple[State, ...]:
        """Trains with a method's own step instead of SGD's, on the same mini-batches: see `lanes.loop`.

        Numbers that differ by lane belong in a state: a cohort may be trained in groups of lanes. Gradients are
        clipped and decayed as `Train` says; momentum is the step's own affair.
        key: all that the step depends on besides the states, so that a GPU can record it once for all rounds; with
        None it is not recorded.
        """
        if self.privacy.of_samples:
            raise InputError("a step of the method's own has no differential privacy: set Privacy.noise to 0")
        batches, steps = self._batches(states[0], epochs)
        return self._trained(
            loop(self.model, states, batches, sample_loss, steps, update, self._options(), key, self.lanes_at_once)
        )

    def _private(
        self,
        lanes: State,
        of: Group | None,
        pull: Pull | None,
        rates: Sequence[float],
        epochs: int | Sequence[int] | None,
    ) -> State:
        """Trains with the gradients of DP-SGD. Every copy of the cohort draws its own batches and noise."""
        owners = list(self.clients) * self._copies(lanes)
        many = self._per_lane(lanes, self.options.epochs if epochs is None else epochs)
        self._check_booked([int(e) for e in many[:: len(self.clients)]])
        keys = [
            (self.seed, self.round, self.federation.clients[c].name, f"private 0.{k // len(self.clients)}")
            for k, c in enumerate(owners)
        ]
        options = Options(self.options.momentum, self.options.weight_decay, norm="running")
        done = private_sgd(
            self.model,
            self.federation,
            lanes,
            sample_loss,
            owners,
            rates,
            [int(e) for e in many],
            self.options.batch,
            self.privacy,
            keys,
            pull,
            options,
            of,
            self.lanes_at_once,
        )
        return self._trained(done)[0]

    def _check_booked(self, epochs: list[int]) -> None:
        """Refuses a training of which the ledger would not know. epochs: of each copy."""
        first = "differential privacy accounts for "
        if self._done:
            raise InputError(f"{first}one training in a round: call trainer.sgd once, with all copies")
        if self.booked and sorted(epochs) != sorted(self.booked):
            raise InputError(f"{first}{list(self.booked)} epochs of a client's copies in a round, not {epochs}")

    def _batches(self, lanes: State, epochs: int | Sequence[int] | None) -> tuple[ClientBatches, list[int]]:
        """Returns the batches of the lanes' clients, and the steps of each lane."""
        owners = list(self.clients) * self._copies(lanes)
        many = self._per_lane(lanes, self.options.epochs if epochs is None else epochs)
        sizes = [len(self.federation.clients[c].train) for c in owners]
        steps = [steps_of(n, self.options.batch, int(e)) for n, e in zip(sizes, many, strict=True)]
        dtype = next(iter(lanes.params.values())).dtype
        return ClientBatches(self.federation, owners, steps, self.options.batch, self.seed, self.round, dtype), steps

    def _trained(self, result: Result) -> tuple[State, ...]:
        """Notes how a training went; returns its states."""
        self._done.append(replace(result, states=()))
        return result.states

    def _options(self) -> Options:
        return Options(self.options.momentum, self.options.weight_decay, self.options.clip or None)

    def _copies(self, lanes: State) -> int:
        copies, rest = divmod(lanes.lanes, len(self.clients))
        if rest or not copies:
            raise ValueError(f"{lanes.lanes} lanes are not whole copies of {len(self.clients)} clients")
        return copies

    def _per_lane(self, lanes: State, value: float | Sequence[float]) -> list[float]:
        """Returns a number per lane, from one number or one per copy."""
        copies = self._copies(lanes)
        values = [value] * copies if isinstance(value, (int, float)) else list(value)
        if len(values) != copies:
            raise ValueError(f"{len(values)} values for {copies} copies of the cohort")
        return [v for v in values for _ in self.clients]

    def validation_losses(self, candidates: State) -> Tensor:
        """Returns the mean loss of each candidate lane on each client's own validation data, `[candidates, clients]`.

        NaN for a client without validation data.
        """
        indices = {j: val for j, c in enumerate(self.clients) if len(val := self.federation.clients[c].val)}
        together, losses = self.model.device.type in TOGETHER and bool(indices), {}
        for group in [list(indices)] if together else [[j] for j in indices]:
            index = np.concatenate([indices[j] for j in group])
            each = sample_losses(self.model, candidates, self.federation, index)
            for j, part in zip(group, torch.split(each, [len(indices[j]) for j in group], 1), strict=True):
                losses[j] = part.mean(1).double()
        out = torch.full((candidates.lanes, len(self.clients)), torch.nan, dtype=torch.float64)
        if losses:  # read at the end, all at once, because reading waits for a GPU
            out[:, list(losses)] = torch.stack(list(losses.values()), 1).cpu()
        return out
