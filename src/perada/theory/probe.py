"""What a finished run gives to be measured: samples, models, predictions and features, within a budget of images."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from ..client.scores import logits_of
from ..client.trainer import sample_loss
from ..config.objects import public_of
from ..data import Federation
from ..data.batches import ClientBatches, steps_of
from ..data.public import Chunks, as_public
from ..data.source import Indices
from ..errors import InputError
from ..experiment import Experiment
from ..lanes import LaneModel, Options, State, gather, last_linear, mean, repeat, rng_of, sgd
from ..runs.moment import Moment
from ..runs.run import Run
from ..server.distill import chunks_of, distill
from .distances import Features, as_features

PIXELS = 32 * 32  # of the images that a budget counts
LEAST_SCALE = 1 / 16  # smaller images than 8×8 are not cheaper
TOGETHER = 512  # images in one pass with gradients
LEAST = 20  # images of a sample, even if the budget has fewer


class Probe:
    """Measures one run. Everything is drawn by seed, so the same run gives the same numbers.

    images: most images of 32×32 pixels that one measurement takes through the network; 0 is all.
    public: the server's images of a run from Python, which its folder cannot hold.
    """

    def __init__(self, run: Run, images: int, public: Tensor | None = None) -> None:
        self.run, self.budget, self._given = run, images, public
        self.federation: Federation = run.federation
        self.experiment: Experiment = run.experiment
        self.model: LaneModel = self.experiment.model
        self.config = run.config
        self.seed = self.config.run.seed
        if self.federation.multilabel:
            raise InputError(f"{run.path} has several labels per image, and the theorems are about one label per image")
        if self.experiment.global_model is None:
            raise InputError(
                f"{self.config.method_name} has no global model, and the theorems compare personal models with one: "
                "choose a run of perada, perada-no-kd, ditto, pfedme, apfl or a method with one global model"
            )
        if not len(self.federation.test):
            raise InputError(f"{run.path} has no test images to measure an error on: train it with DataOptions.test")

    # Samples

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.federation.clients)

    @property
    def clients(self) -> int:
        return len(self.federation.clients)

    @property
    def _scale(self) -> float:
        height, width = self.federation.images.shape[-2:]
        return max(float(height * width) / PIXELS, LEAST_SCALE)

    def room(self, passes: int, least: int = LEAST) -> int:
        """Returns how many of something fit into the budget that takes so many images through the network."""
        return max(least, int(self.budget / self._scale / passes)) if self.budget else 2**31

    def some(self, index: Indices, most: int, *key: int | str) -> Indices:
        """Returns at most so many of these images, drawn by seed."""
        if len(index) <= most:
            return index
        return np.sort(rng_of(self.seed, "theory", *key).choice(index, most, replace=False))

    @cached_property
    def target(self) -> Indices:
        """The sample of the target distribution: of all clients' test images."""
        return self.some(self.federation.test, self.room(self.clients), "target")

    def own(self, split: str) -> list[Indices]:
        """Returns a sample of each client's own images."""
        most = self.room(self.clients)
        return [self.some(getattr(c, split), most, split, c.name) for c in self.federation.clients]

    @cached_property
    def public(self) -> Tensor | None:
        """The public images that the server distils on, as bytes, or a sample of them; None without any."""
        images = self._given
        if images is None:
            if self.config.distill.data in ("none", "given"):
                return None
            images = public_of(self.config, self.federation)
        if images is None:
            return None
        images = as_public(images, self.federation)
        shuffled = torch.cat(chunks_of(len(images), self.config.distill, self.federation.seed))
        return images[shuffled[: self.room(self.clients)]].to(self.federation.device)

    # Models

    @cached_property
    def common(self) -> State:
        """The run's global model g, one lane."""
        model = self.experiment.global_model
        assert model is not None
        return model

    @cached_property
    def personal(self) -> State:
        """The personal models p_m, one lane per client."""
        lanes = self.experiment.personal()
        return lanes if lanes.lanes > 1 else repeat(lanes, self.clients)

    @cached_property
    def planned_steps(self) -> list[int]:
        """The local steps E of each client per round."""
        train = self.config.train
        return [steps_of(len(c.train), train.batch, train.epochs) for c in self.federation.clients]

    @cached_property
    def taken_steps(self) -> list[int]:
        """The local steps of `local`: E, or as many as fit into the budget."""
        most = self.room(self.clients * self.config.train.batch, 1)
        return [min(most, e) for e in self.planned_steps]

    @cached_property
    def local(self) -> State:
        """The local models h_m: a further round from g, in memory, in which every client takes part."""
        train, owners = self.config.train, range(self.clients)
        dtype = next(iter(self.common.params.values())).dtype
        batches = ClientBatches(
            self.federation, owners, self.taken_steps, train.batch, self.seed, self.experiment.now.round, dtype
        )
        options = Options(train.momentum, train.weight_decay, train.clip or None)
        start, rates = repeat(self.common, self.clients), [train.lr] * self.clients
        at_once = max(1, TOGETHER // train.batch)
        done = sgd(self.model, start, batches, sample_loss, rates, self.taken_steps, None, options, None, at_once)
        if not bool(done.finite.all()):
            raise InputError(f"{self.run.path}: a local training from its global model does not stay finite")
        return done.state

    @cached_property
    def student(self) -> tuple[State, State, int] | None:
        """The local models' average, the student distilled from it, and the student's steps.

        None without public images, or for a run that does not distil.
        """
        options = self.config.distill
        if self.public is None or options.steps == 0:
            return None
        size = min(options.batch, len(self.public))
        steps = min(options.steps, self.room(size, 1))
        index = torch.arange(len(self.public) // size * size).view(-1, size)
        dtype = next(iter(self.common.params.values())).dtype
        chunks = Chunks(self.federation, self.public, index.to(self.federation.device), dtype)
        average = mean(self.local)
        alone = replace(options, steps=steps, guard="none", candidates=())
        lanes, _ = distill(self.model, average, self.local, chunks, alone, False, self.seed)
        return average, lanes, steps

    # Predictions

    def logits(self, lanes: State, images: Tensor) -> Tensor:
        """Returns the logits `[K, n, k]` of images as bytes, as the models predict (running statistics)."""
        return logits_of(self.model, lanes, self.federation, images).double()

    @torch.no_grad()
    def as_teachers(self, lanes: State, images: Tensor) -> Tensor:
        """Returns the logits with the statistics of the images themselves, as the distillation sees them."""
        dtype, size = next(iter(lanes.tensors())).dtype, min(len(images), self.config.distill.batch)
        parts = []
        for chunk in torch.split(images[: len(images) // size * size], size):
            prepared = self.federation.prepare(chunk, dtype)
            most = max(1, 4 * TOGETHER // size)
            groups = [gather(lanes, range(k, min(k + most, lanes.lanes))) for k in range(0, lanes.lanes, most)]
            parts.append(torch.cat([self.model.on_all(group, prepared, "batch") for group in groups]))
        return torch.cat(parts, 1).double()

    # Features

    @torch.no_grad()
    def features(self, images: Tensor) -> Features:
        """Returns what the frozen backbone gives to its head: the features that are compared."""
        net = copy.deepcopy(self.experiment.net).to(self.federation.device).float().eval()
        head: nn.Module = net.get_submodule(self.experiment.head or last_linear(net))
        seen: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        for part in torch.split(images, TOGETHER):
            net(self.federation.prepare(part.to(self.federation.device), torch.float32))
        hook.remove()
        return as_features(torch.cat(seen))

    # States

    def visited(self) -> list[tuple[int, State]]:
        """Returns (round, w) before the first round and at each checkpoint that the folder keeps."""
        exp = self.experiment
        out = [(0, self.model.part_of(exp.method.init(self.model)[1]))]
        for number in self.run.folder.kept_rounds():
            saved, _ = self.run.folder.load(number)
            if saved is not None and number:
                out.append((number, self.model.part_of(Moment.of(saved, exp.clients, exp.here).broadcast)))
        return out
