"""The gradients of an experiment at given states, as training takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..client.trainer import sample_loss
from ..data import Federation
from ..experiment import Experiment
from ..lanes import Batch, Gradient, Loss, Options, State, gather, repeat, rng_of
from ..server.distill import kl
from .gradients import squared_norm, variance
from .probe import TOGETHER

BATCHES = 4  # mini-batches per client whose gradients are compared


@dataclass(frozen=True)
class Point:
    """The clients' gradients at a common state w."""

    round: int
    gradients: Tensor  # of L_m, by mini-batches: [M, K, d]
    loss: float  # L, the mean over clients, on the same mini-batches

    @cached_property
    def variance(self) -> Tensor:
        """`E‖g̃ − ∇L_m‖²` per client, `[M]`."""
        return variance(self.gradients)

    @property
    def squared_norm(self) -> float:
        """Returns ‖∇L(w)‖², without the part that is chance."""
        return max(0.0, float(squared_norm(self.gradients.mean(0))))


class Descent:
    """Measures gradients as training takes them: batch statistics, dropout, the run's batch size.

    L_m is the expected loss of a mini-batch, since batch norm gives a single image no loss of its own.
    """

    def __init__(self, experiment: Experiment, federation: Federation, count: int = BATCHES) -> None:
        self.model, self.data, self.size = experiment.model, federation, experiment.train.batch
        self.seed, self.temperature, self.count = experiment.options.seed, experiment.distill.temperature, count
        first = self.model.initial().params
        self.trained = [n for n in first if n not in self.model.inert]
        self.dtype = next(iter(first.values())).dtype

    @cached_property
    def batches(self) -> list[Batch]:
        """K mini-batches per client, drawn independently; lane m of each is client m's."""
        return [self._batch(j, self.size) for j in range(self.count)]

    def _batch(self, number: int, size: int) -> Batch:
        draws = [rng_of(self.seed, "theory", "batch", number, c.name) for c in self.data.clients]
        owned = [c.train for c in self.data.clients]
        index = np.concatenate([d.choice(i, size, replace=len(i) < size) for d, i in zip(draws, owned, strict=True)])
        keys = torch.tensor([int(d.integers(2**62)) for d in draws], device=self.data.device)
        images = self.data.prepare(self.data.take(index), self.dtype)
        return Batch(images, self.data.labels(index).view(len(owned), size), None, keys)

    def at(self, round: int, state: State) -> Point:
        """Returns the clients' mini-batch gradients at a common state."""
        gradients, losses = self._on_batches(repeat(state, len(self.data.clients)))
        return Point(round, gradients, float(losses.mean()))

    def personal(self, lanes: State, centre: State, lam: float) -> tuple[Tensor, Tensor]:
        """Returns the mini-batch gradients of P_m at v_m, `[M, K, d]`, and P_m, `[M]`."""
        away = self.away(lanes, centre)
        gradients, losses = self._on_batches(lanes)
        return gradients + lam * away.unsqueeze(1), losses + lam / 2 * away.square().sum(1)

    def away(self, lanes: State, centre: State) -> Tensor:
        """Returns v_m − w, `[M, d]`."""
        return self.row(lanes) - self.row(centre)

    def _on_batches(self, lanes: State) -> tuple[Tensor, Tensor]:
        rows = [self._by_groups(lanes, batch) for batch in self.batches]
        return torch.stack([g for g, _ in rows], 1), torch.stack([x for _, x in rows], 1).mean(1)

    def _by_groups(self, lanes: State, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns each lane's gradient `[M, d]` and loss `[M]`, a few lanes at a time."""
        assert isinstance(batch.images, Tensor)
        size, parts = batch.targets.shape[1], []
        most = max(1, TOGETHER // size)
        for a in range(0, lanes.lanes, most):
            b = min(a + most, lanes.lanes)
            one = Batch(batch.images[a * size : b * size], batch.targets[a:b], None, batch.keys[a:b])
            parts.append(self._gradient(gather(lanes, range(a, b)), one, sample_loss))
        return torch.cat([g for g, _ in parts]), torch.cat([x for _, x in parts])

    def _gradient(self, lanes: State, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(lanes.lanes, device=self.model.device)
        one = Gradient(self.model, batch, loss, numbers, Options())
        with torch.enable_grad():
            grads, _ = one(lanes)
        assert one.losses is not None
        return vector(grads, self.trained).double(), one.losses.double()

    def row(self, lanes: State) -> Tensor:
        """Returns the trained parameters of K lanes as points, `[K, d]`."""
        return vector(lanes.params, self.trained).double()

    def _moved(self, lanes: State, points: Tensor) -> State:
        return State({**lanes.params, **unvector(points, lanes.params, self.trained)}, lanes.buffers)

    def client_slopes(self, state: State, images: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns a common state as points `[M, d]`, and ∇L_m on one mini-batch as a function of points.

        images: most images of a client in it.
        """
        lanes = repeat(state, len(self.data.clients))
        batch = self.batches[0] if images >= self.size else self._batch(0, images)
        return self.row(lanes), lambda points: self._by_groups(self._moved(lanes, points), batch)[0]

    def distillation(
        self, student: State, public: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns ∇R by mini-batches at a student, `[K, d]`, and on one of them as a function of points `[1, d]`.

        public: mini-batches of images as bytes. targets: the teachers' mean logits on them.
        """
        pairs = zip(public, targets, strict=True)
        batches = [self._public_batch(images, logits) for images, logits in pairs]

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return kl(targets, logits, self.temperature, False)

        gradients = torch.cat([self._gradient(student, b, loss)[0] for b in batches])
        return gradients, lambda points: self._gradient(self._moved(student, points), batches[0], loss)[0]

    def _public_batch(self, images: Tensor, logits: Tensor) -> Batch:
        key = torch.zeros(1, dtype=torch.int64, device=self.data.device)
        return Batch(self.data.prepare(images, self.dtype), logits.unsqueeze(0).to(self.dtype), None, key)


def vector(params: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Returns these parameters of K lanes as rows, `[K, d]`."""
    return torch.cat([params[n].flatten(1) for n in names], 1)


def unvector(rows: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns rows as parameters again: the inverse of `vector`."""
    parts = torch.split(rows, [like[n][0].numel() for n in names], 1)
    return {n: p.view(-1, *like[n].shape[1:]).to(like[n].dtype) for n, p in zip(names, parts, strict=True)}
