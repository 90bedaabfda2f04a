"""The server's distillation: many local adapters (teachers) into one global adapter (student).

`w ← w − η_g ∇_w KL(softmax(mean_m f(u, θ_m; x)) ‖ softmax(f(u, w; x)))` on public, unlabelled x. The teacher
is the average of LOGITS, then softmax. Multi-label data have no softmax: there it is the KL of each label's
Bernoulli, summed over labels.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.federation import Federation
from ..data.public import Chunks, as_public
from ..errors import InputError
from ..fields import check_fields
from ..lanes import (
    Batch,
    Front,
    LaneModel,
    Loss,
    Norm,
    Options,
    Result,
    State,
    Update,
    adam,
    adam_states,
    loop,
    ops_for,
    rng_of,
    sent,
    stack,
)
from .aggregate import MEAN, Rule


@dataclass(frozen=True)
class Distill:
    """The `[distill]` section: how the server distils."""

    data: str = "none"  # where the public images come from: a source's name, a folder, or the clients' "validation"
    size: int = 0  # how many of them; 0 is all
    steps: int = 500
    batch: int = 2048
    lr: float = 1e-3
    rounds: int = 0  # distil in this many first rounds; 0 is every round
    temperature: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    pull: float = 0.0  # strength of a pull towards the averaged adapter: adds pull/2 ‖w − average‖² to the loss
    weight_decay: float = 0.0  # adds weight_decay/2 ‖w‖² to the loss, as `train.weight_decay` does
    teacher_norm: Literal["public", "running"] = "public"  # whose statistics normalise in the teachers
    student_norm: Literal["batch", "frozen"] = "batch"
    keep_stats: Literal["average", "student"] = "average"  # the running statistics of the distilled adapter
    guard: Literal["none", "server", "clients"] = "clients"  # who may prefer the plain average
    candidates: tuple[int, ...] = (20, 60, 150, 500)  # steps after which the student is a candidate

    def __post_init__(self) -> None:
        least = {"size": 0, "steps": 0, "batch": 2, "rounds": 0, "pull": 0, "weight_decay": 0}
        check_fields(self, least, positive=("lr", "temperature"))
        if self.temperature > 1000:
            raise InputError(f"Distill.temperature must be at most 1000, not {self.temperature}")
        if any(c < 1 for c in self.candidates):
            raise InputError("Distill.candidates are numbers of steps, at least 1")

    def snapshots(self) -> tuple[int, ...]:
        """Returns the steps that become candidates: the last one, and with a guard also those before it."""
        early = [c for c in self.candidates if c < self.steps] if self.guard != "none" else []
        return (*sorted(set(early)), self.steps)

    def judged(self) -> tuple[int, ...]:
        """Returns the steps of what a guard chooses from: the plain average, then the snapshots.

        If these have statistics of the public images, so does a student of no steps, with the average's weights: no
        other then wins by its statistics alone.
        """
        still = (0,) if self.keep_stats == "student" and self.student_norm == "batch" else ()
        return (0, *still, *self.snapshots())


def kl(teacher: Tensor, student: Tensor, temperature: float, multilabel: bool) -> Tensor:
    """Returns KL(teacher ‖ student) of each sample, both as logits `[..., classes]`, times T² (Hinton et al.)."""
    if multilabel:
        t, s = teacher / temperature, student / temperature
        p = t.sigmoid()
        each = p * (F.logsigmoid(t) - F.logsigmoid(s)) + (1 - p) * (F.logsigmoid(-t) - F.logsigmoid(-s))
        return each.sum(-1) * temperature**2
    return ops_for(student.device).divergence(student, teacher, temperature)


def chunks_of(images: int, options: Distill, seed: int) -> list[Tensor]:
    """Returns the public images, shuffled by seed (files may be sorted by class), in chunks of equal size."""
    order = torch.from_numpy(rng_of(seed, "public").permutation(images))
    order = order[: options.size or images]
    size = min(options.batch, len(order))
    return [order[i : i + size] for i in range(0, len(order) - size + 1, size)]


def public_chunks(images: Tensor, federation: Federation, options: Distill, dtype: torch.dtype) -> Chunks:
    """Returns public images as chunks on the federation's device, prepared when they are asked for."""
    images = as_public(images, federation)
    if options.size == 1:
        raise InputError("Distill.size must be at least two public images: batch norm cannot normalise one")
    chunks = torch.stack(chunks_of(len(images), options, federation.seed)).to(federation.device)
    return Chunks(federation, images.to(federation.device), chunks, dtype)


def chunks_in(round: int, steps: int, chunks: int) -> list[int]:
    """Returns the chunks that a round uses, in the order of their first use."""
    if steps >= chunks:
        return list(range(chunks))
    return [(round * steps + step) % chunks for step in range(steps)]


TOGETHER = 1 << 27  # pixels × teachers in one pass over several chunks
STATISTICS = 30  # batches after which running statistics have forgotten almost everything before


@torch.no_grad()
def teacher_logits(
    model: LaneModel,
    teachers: State,
    images: Sequence[Front],
    norm: Literal["public", "running"],
    lanes_at_once: int = 0,
    which: Sequence[int] | None = None,
    rule: Rule = MEAN,
) -> Tensor:
    """Returns the mean of the teachers' logits on the chunks `which` (all), `[chunks, B, classes]`, without dropout.

    rule: how the logits become one, as for the weights.

    With norm="public" a teacher normalises with the chunk's own statistics: its running ones come from the few
    classes of one client, and mislead it on other images.
    """
    mode: Norm = "batch" if norm == "public" else "running"
    size, teachers = lanes_at_once or teachers.lanes, model.rounded(teachers)
    groups = [teachers.map(lambda t, i=i: t[i : i + size]) for i in range(0, teachers.lanes, size)]  # type: ignore[misc]
    chunks = range(len(images)) if which is None else which
    logits = torch.cat([_on_chunks(model, g, images, chunks, mode, lanes_at_once) for g in groups], 1)
    return rule.of_lanes(logits, 1).squeeze(1)


def _on_chunks(
    model: LaneModel, lanes: State, images: Sequence[Front], which: Sequence[int], mode: Norm, limit: int
) -> Tensor:
    """Returns `[chunks, K, B, classes]`. Chunks that are kept behind the first layer run as lanes, a few at a time."""
    if not isinstance(images, Chunks) or images.stems is None:
        return torch.stack([model.on_all(lanes, images[i], mode) for i in which])
    most = TOGETHER // images.images[0, 0].numel() // images.chunks.shape[1]
    size = max(1, min(limit or most, most) // lanes.lanes)
    out = []
    for some in torch.split(sent(torch.tensor(which), model.device), size):
        number = some.repeat_interleave(lanes.lanes)
        logits = model(stack(*[lanes] * len(some)), images.stems.seen(number), mode)
        out.append(logits.view(len(some), lanes.lanes, *logits.shape[1:]))
    return torch.cat(out)


@lru_cache
def _loss(temperature: float, multilabel: bool) -> Loss:
    """Returns `kl` as the loss of a training loop: one function per pair, so that recorded steps are used again."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return kl(targets, logits, temperature, multilabel)

    return loss


class PublicBatches:
    """Gives step r chunk r mod n of the public images, with the teachers' logits on it; r counts from `first`."""

    def __init__(self, images: Sequence[Front], targets: Tensor, key: Tensor, capacity: int, first: int = 0) -> None:
        self.images, self.targets, self.key = images, targets, key  # targets [chunks, B, classes], key int64 [1]
        self.capacity, self.first = capacity, torch.full((1,), first, device=key.device)

    def __call__(self, step: int | Tensor, lanes: Tensor) -> Batch:
        chunk, targets, key = ops_for(self.key.device).chunk(step, self.first, self.key, self.targets)
        images = self.images.at(chunk) if isinstance(self.images, Chunks) else self.images[int(chunk)]
        return Batch(images, targets, None, key)

    # What a recorded step needs: lanes/replay.py.

    def shape(self) -> Hashable:
        key = (id(self.images), tuple(self.targets.shape), self.capacity)
        return key if isinstance(self.images, Chunks) else None

    def twin(self) -> PublicBatches:
        return PublicBatches(self.images, self.targets.clone(), self.key.clone(), self.capacity)

    def copy_(self, other: PublicBatches) -> None:
        self.targets.copy_(other.targets)
        self.key.copy_(other.key)
        self.first.copy_(other.first)


def rates(options: Distill) -> list[float]:
    """Returns Adam's step size at every step."""
    sizes = [options.lr] * options.steps
    if options.schedule == "cosine":
        for t in range(1, options.steps):
            now, before = (1 + math.cos(math.pi * i / options.steps) for i in (t, t - 1))
            sizes[t] = now / before * sizes[t - 1]
    return sizes


@lru_cache(maxsize=64)
def _adam(options: Distill, device: torch.device, dtype: torch.dtype) -> Update:
    """Returns the student's optimiser: one per setting, so that its table is made once."""
    return adam(rates(options), options.pull, device, dtype)


def distill(
    model: LaneModel,
    student: State,
    teachers: State,
    images: Sequence[Front],
    options: Distill,
    multilabel: bool,
    key: int,
    lanes_at_once: int = 0,
    round: int = 0,
    rule: Rule = MEAN,
) -> tuple[State, Tensor]:
    """Trains the student (one lane) with Adam; returns the candidates as lanes, and the KL of every step.

    The candidates are those of `options.judged()`, or without a guard the last step alone; one that is not finite is
    all NaN. A round goes through the chunks `images` in turn; one of fewer steps than chunks continues where the
    round before ended. Dropout is on in the student, and `key` is its random key. Nothing is read, which would wait
    for a GPU.
    """
    used = chunks_in(round, options.steps, len(images))
    targets = teacher_logits(model, teachers, images, options.teacher_norm, lanes_at_once, used, rule)
    if len(used) < len(images):  # the other chunks are not used
        blank = targets.new_zeros(len(images), *targets.shape[1:])
        targets = blank.index_copy_(0, sent(torch.tensor(used), model.device), targets)
    like = next(iter(student.params.values()))
    keys = sent(torch.tensor([key], dtype=torch.int64), model.device)
    how = Options(norm="train" if options.student_norm == "batch" else "running", weight_decay=options.weight_decay)
    loss, update = _loss(options.temperature, multilabel), _adam(options, model.device, like.dtype)

    def trained(states: tuple[State, ...], first: int, steps: int) -> Result:
        batches = PublicBatches(images, targets, keys, options.steps, used[0] + first)
        return loop(model, states, batches, loss, [steps], update, how, ("distill", options))

    states, done, traces = adam_states(student, options.pull), 0, list[Tensor]()
    candidates = [student] * (len(options.judged()) - len(options.snapshots())) if options.guard != "none" else []
    if len(candidates) > 1 and student.buffers:
        still = trained(adam_states(student, options.pull, options.steps), 0, min(options.steps, STATISTICS)).state
        candidates[1] = State(student.params, still.buffers)
    finite = [torch.ones(1, dtype=torch.bool, device=model.device)] * (
        1 + len(candidates)
    )  # the first starts the chain
    for step in options.snapshots():
        result = trained(states, done, step - done)
        states, done = result.states, step
        finite.append(finite[-1] & result.finite)
        traces.append(result.trace[:, 0])
        candidates.append(State(states[0].params, (student if options.keep_stats == "average" else states[0]).buffers))
    lanes, good = stack(*candidates), torch.cat(finite[1:])
    params = {n: torch.where(good.view(-1, *[1] * (p.dim() - 1)), p, torch.nan) for n, p in lanes.params.items()}
    return State(params, lanes.buffers), torch.cat(traces)
