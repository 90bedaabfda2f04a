"""What a method sees of a cohort: its lanes, its data, SGD. The same for one client on its own machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import ClientBatches, steps_of
from ..data.federation import Federation
from ..fields import check_fields
from ..lanes import Batches, Group, LaneModel, Options, Pull, Result, State, Update, loop, ops_for, sgd
from .scores import logits_on

TOGETHER = ("cuda",)  # where a pass costs the same for the validation images of one client and of many


@dataclass(frozen=True)
class Train:
    """The `[train]` section: what every method's client training shares."""

    rounds: int = 200
    cohort: int = 0  # clients sampled each round; 0 is all of them
    epochs: int = 10
    batch: int = 64  # at least 2: batch norm needs two samples
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # bound on the norm of a lane's gradient; 0 is off
    weighting: Literal["uniform", "samples"] = "uniform"  # how the server averages

    def __post_init__(self) -> None:
        least = {"rounds": 1, "cohort": 0, "epochs": 1, "batch": 2, "momentum": 0, "weight_decay": 0, "clip": 0}
        check_fields(self, least, positive=("lr",))


def sample_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Per-sample loss `[..., B]`: cross-entropy for class indices, mean binary cross-entropy for label vectors."""
    if targets.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(-1)
    return ops_for(logits.device).cross_entropy(logits, targets)


@dataclass
class Trainer:
    """A cohort in one round. Lane k of a state belongs to client `clients[k % len(clients)]`."""

    model: LaneModel
    federation: Federation
    clients: Sequence[int]
    round: int
    seed: int
    options: Train
    lanes_at_once: int = 0  # how many lanes there is room for; 0: all
    _done: list[Result] = field(default_factory=list, init=False, repr=False)  # read when it is asked for, not before

    @property
    def steps(self) -> list[int]:
        """The steps that each client takes in a round."""
        sizes = (len(self.federation.clients[c].train) for c in self.clients)
        return [steps_of(n, self.options.batch, self.options.epochs) for n in sizes]

    @property
    def losses(self) -> list[float]:
        """The mean training loss of each client's last copy. To ask is to wait for a GPU, as it is for `failed`."""
        return self._done[-1].trace.nanmean(0).tolist()[-len(self.clients) :] if self._done else []

    @property
    def failed(self) -> set[str]:
        """Clients whose training stopped being finite."""
        names = [self.federation.clients[c].name for c in self.clients]
        return {names[k % len(names)] for result in self._done for k in result.failed}

    def sgd(
        self,
        lanes: State,
        *,
        of: Group | None = None,
        pull: tuple[State, float | Sequence[float]] | None = None,
        lr: float | Sequence[float] | None = None,
        epochs: int | Sequence[int] | None = None,
    ) -> State:
        """Train `lanes`: one copy a client, or several stacked (all clients' first copies, then the second, ...).

        `of` is the group that is trained, the rest stays as it is (running statistics too); nothing in it,
        nothing done. `pull=(centre, strength)` adds `strength · (p − centre)` to the gradient. strength, lr
        and epochs are one number, or one for each copy. A second call in a round sees the same mini-batches.
        """
        if of is not None and not of.params & lanes.params.keys():
            return lanes
        copies = self._copies(lanes)
        rates = self._per_lane(self.options.lr if lr is None else lr, copies)
        strength = self._per_lane(pull[1], copies) if pull else []
        options = self._options()

        towards = Pull(pull[0], strength) if pull else None

        def work(batches: Batches, steps: list[int]) -> Result:
            return sgd(self.model, lanes, batches, sample_loss, rates, steps, towards, options, of, self.lanes_at_once)

        return self._train(lanes, epochs, work)[0]

    def loop(
        self,
        states: tuple[State, ...],
        update: Update,
        *,
        key: Hashable = None,
        epochs: int | Sequence[int] | None = None,
    ) -> tuple[State, ...]:
        """A method's own step instead of SGD's, on the same mini-batches: see `lanes.loop`.

        Numbers that differ by lane belong in a state: a cohort may be trained in groups of lanes. The gradients
        are clipped and decayed as `[train]` says; momentum is the step's own affair.
        key: all that the step depends on besides the states, so that a GPU may record it once for all rounds; None: it
        is run as it is each time.
        """
        options = self._options()

        def work(batches: Batches, steps: list[int]) -> Result:
            return loop(self.model, states, batches, sample_loss, steps, update, options, key, self.lanes_at_once)

        return self._train(states[0], epochs, work)

    def _train(
        self,
        lanes: State,
        epochs: int | Sequence[int] | None,
        work: Callable[[Batches, list[int]], Result],
    ) -> tuple[State, ...]:
        """`work` with the batches and the numbers of steps of these lanes' clients."""
        copies = self._copies(lanes)
        owner = list(self.clients) * copies
        epoch = self._per_lane(self.options.epochs if epochs is None else epochs, copies)
        size = [len(self.federation.clients[c].train) for c in owner]
        steps = [steps_of(n, self.options.batch, int(e)) for n, e in zip(size, epoch, strict=True)]
        dtype = next(iter(lanes.params.values())).dtype
        batches = ClientBatches(self.federation, owner, steps, self.options.batch, self.seed, self.round, dtype)
        result = work(batches, steps)
        self._done.append(replace(result, states=()))
        return result.states

    def _options(self) -> Options:
        return Options(self.options.momentum, self.options.weight_decay, self.options.clip or None)

    def _copies(self, lanes: State) -> int:
        copies, rest = divmod(lanes.lanes, len(self.clients))
        if rest or not copies:
            raise ValueError(f"{lanes.lanes} lanes are not whole copies of {len(self.clients)} clients")
        return copies

    def _per_lane(self, value: float | Sequence[float], copies: int) -> list[float]:
        values = [value] * copies if isinstance(value, (int, float)) else list(value)
        if len(values) != copies:
            raise ValueError(f"{len(values)} values for {copies} copies of the cohort")
        return [v for v in values for _ in self.clients]

    def validation_losses(self, candidates: State) -> Tensor:
        """Each candidate lane on each client's own validation data: mean loss `[candidates, clients]`.

        NaN where a client holds no validation data.
        """
        found = {}
        held = {j: val for j, c in enumerate(self.clients) if len(val := self.federation.clients[c].val)}
        together = self.model.device.type in TOGETHER and bool(held)
        for some in [list(held)] if together else [[j] for j in held]:
            index = np.concatenate([held[j] for j in some])
            logits = logits_on(self.model, candidates, self.federation, index)
            targets = self.federation.labels(index)
            losses = sample_loss(logits, targets.expand(candidates.lanes, *targets.shape))
            for j, part in zip(some, torch.split(losses, [len(held[j]) for j in some], 1), strict=True):
                found[j] = part.mean(1).double()
        out = torch.full((candidates.lanes, len(self.clients)), torch.nan, dtype=torch.float64)
        if found:  # read at the end, at once: a GPU is waited for
            out[:, list(found)] = torch.stack(list(found.values()), 1).cpu()
        return out
