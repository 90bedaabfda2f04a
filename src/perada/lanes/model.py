"""A module that gets its trained tensors at each call."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .front import Features, Front, Prefix, Stem
from .layers import Context, LaneBatchNorm, LaneDropout, LanesInDropout, Norm, Slots
from .ops import ops_for
from .state import State, repeat

if TYPE_CHECKING:
    from .pool import Pool
    from .replay import Replay
    from .samples import Way


@dataclass(frozen=True)
class Group:
    """A named part of a model: its parameters, and the buffers (running statistics) that belong to them."""

    params: frozenset[str]
    buffers: frozenset[str]

    def __sub__(self, other: Group) -> Group:
        return Group(self.params - other.params, self.buffers - other.buffers)


NOTHING = Group(frozenset(), frozenset())


def divide(state: State, group: Group) -> tuple[State, State]:
    """Returns the part of a state that is in the group, and the rest."""
    inside = state.only(group.params, group.buffers)
    return inside, state.only(state.params.keys() - group.params, state.buffers.keys() - group.buffers)


def _shared(module: nn.Module, trained: frozenset[str]) -> dict[str, str]:
    """Returns the other names of trained parameters that several layers share."""
    names = {p: n for n, p in module.named_parameters() if n in trained}
    # Each module under one of its names: a module that is swapped twice would keep its lanes.
    every = ((f"{n}.{k}" if n else k, p) for n, m in module.named_modules() for k, p in m._parameters.items())
    return {n: names[p] for n, p in every if p is not None and p in names and names[p] != n}


def per_sample(owner: nn.Module, parameter: Tensor) -> bool:
    """Returns whether a module can take a parameter `[1, a, b, ...]` with an entry per sample, `[K·B, a, b, ...]`.

    Position embeddings are added to the samples, and a class token is expanded to one per sample. So a module that is
    not one of torch's layers, or of ours, needs no change to be trained.
    """
    kinds = [k for k in type(owner).__mro__ if k is not nn.Module]
    layer = any(k.__module__.startswith(("torch.nn.", "perada.lanes.")) for k in kinds)
    return not layer and parameter.dim() > 2 and parameter.shape[0] == 1


class LaneModel:
    """A module with frozen weights, whose lanes come from outside: `model(state, images)`.

    trained: the parameters that each lane owns. A lane also owns the running statistics of every batch norm.
    inert: trained parameters that cannot change what the network computes in expectation. They are counted, sent and
        stored, but no optimiser changes them (see `adapters.Residual.insert`).
    prefix: the stages that were cut off the module's front.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: frozenset[str],
        inert: frozenset[str],
        groups: Mapping[str, Group],
        prefix: Prefix | None = None,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.groups = groups
        self.inert = inert & trained
        self.prefix = prefix
        self.compute: torch.dtype | None = None
        self.context = Context()
        self.replays: dict[Hashable, Replay] = {}  # recorded loops, the last used at the end
        self.lane_steps = [0, 0]  # of recorded loops: steps of lanes, and steps of empty slots
        self.room = 0  # lanes that fit in memory, where this was measured
        self.apart = False  # whether it was tried that no sample changes another one's gradient
        self.way: Way | None = None  # how gradients of single samples are computed, where this was chosen
        self.pool: Pool | None = None  # runs its loops together with those of other trainings
        self._initial: State | None = None
        self._compiled: set[Hashable] = set()  # the kinds of passes without gradients whose kernels are compiled
        stem = getattr(module, "stem", None)  # names of the first layer and its pooling, if the module declares them
        whole = isinstance(stem, tuple) and prefix is None and f"{stem[0]}.weight" not in trained
        self._stem = stem if whole else None
        layers = dict(module.named_modules())
        self._dropouts = [f"{n}.key" for n, m in layers.items() if isinstance(m, LaneDropout)]
        self._foreign = any(not type(m).__module__.startswith(("perada.", "torch.nn.")) for m in layers.values())
        self._params = [n for n, _ in module.named_parameters() if n in trained]
        if not set(self._params) - self.inert:
            raise ValueError("nothing is trained: name a parameter group that is not empty")
        self.shared = _shared(module, trained)
        owners = {n: layers[n.rpartition(".")[0]] for n in self._params}
        self._per_sample = [n for n, m in owners.items() if per_sample(m, m.get_parameter(n.rpartition(".")[2]))]
        norms = [n for n, m in layers.items() if isinstance(m, LaneBatchNorm)]
        self._buffers = [f"{n}.{b}" for n in norms for b in ("running_mean", "running_var")]
        for layer in layers.values():
            if isinstance(getattr(layer, "context", None), Context):
                layer.context = self.context

    @cached_property
    def signature(self) -> Hashable:
        """Returns a value that is equal for models that compute the same from the same lanes."""
        parts: list[Hashable] = [self.compute, self.device, tuple(sorted(self.inert))]
        trained = {*self._params, *self._buffers}
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            numbers = tensor.detach().double().flatten()
            draw = torch.linspace(0.5, 1.5, numbers.numel(), dtype=torch.float64, device=numbers.device)
            frozen = name not in trained and numbers.numel()
            parts.append((name, tuple(tensor.shape), float((numbers * draw).sum()) if frozen else None))
        settings = [(n, type(m).__name__, getattr(m, "p", None)) for n, m in self.module.named_modules()]
        return (*parts, *settings, self.prefix.digest if self.prefix else "")

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def to(self, device: torch.device | str, dtype: torch.dtype, compute: torch.dtype | None = None) -> LaneModel:
        """Moves the model, and chooses the operations for the device. Lanes are kept in `dtype`. The frozen weights are
        in `compute`, by default the same, and so is everything that is computed."""
        self.module.to(device=device, dtype=dtype)
        self._initial = self.initial()  # before anything is rounded
        self.compute = compute or dtype
        self.module.to(self.compute)
        if self.prefix is not None:
            self.prefix.to(self.device, self.compute)
        self.context.ops = ops_for(self.device)
        if self.device.type == "cuda":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self

    def initial(self, lanes: int = 1) -> State:
        """Returns equal lanes with the values that the module was made with."""
        if self._initial is not None:
            return repeat(self._initial, lanes)
        params, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        one = State(
            {n: params[n].detach().unsqueeze(0) for n in self._params},
            {n: buffers[n].detach().unsqueeze(0) for n in self._buffers},
        )
        return repeat(one, lanes)

    def begin_from(self, state: State) -> None:
        """Makes `initial` return this lane instead of the values that the module was made with."""
        self._initial = self.part_of(state)

    def group(self, name: str) -> Group:
        """Returns a group. Raises an error that lists all groups if there is none of this name (`convert.Groups`)."""
        return self.groups[name]

    def holds(self, state: State) -> bool:
        """Returns whether the state is a whole model, not only a shared part."""
        return state.params.keys() >= set(self._params) and state.buffers.keys() >= set(self._buffers)

    def part_of(self, state: State) -> State:
        """Returns the part of a state that belongs to this model; a broadcast may carry more."""
        return state.only(self._params, self._buffers)

    @torch.no_grad()
    def front(self, images: Tensor) -> Front:
        """Returns what the frozen front makes of images, which the model takes instead of them; else the images.

        The same images always give the same, for every lane, so it may be kept.
        """
        if self.prefix is None and self._stem is None:
            return images
        images = self.computed(images)
        if self.prefix is not None:
            return self.prefix(images)
        assert self._stem is not None
        layer, pool = map(self.module.get_submodule, self._stem)
        return Stem.of(layer(images), pool)

    def computed(self, images: Tensor) -> Tensor:
        """Returns images in the type of computing."""
        return images if self.compute is None else images.to(self.compute)

    def rounded(self, state: State) -> State:
        """Returns the state with its parameters in the type of computing, for several calls of the model."""
        return State({n: t.to(self.compute) for n, t in state.params.items()}, state.buffers)

    def on_all(self, state: State, images: Front, norm: Norm = "running") -> Tensor:
        """Returns every lane's logits on the same images `[B, ...]`."""
        shared = self.front(images) if isinstance(images, Tensor) and self.prefix else images
        if isinstance(shared, Features):
            shared = replace(shared, values=shared.values.repeat(state.lanes, 1, 1, 1))
        return self(state, shared.repeat(state.lanes, 1, 1, 1) if isinstance(shared, Tensor) else shared, norm)

    def __call__(
        self,
        state: State,
        images: Front,
        norm: Norm = "running",
        dropout: Tensor | None = None,
        slots: Slots | None = None,
    ) -> Tensor:
        """Returns logits `[K, B, classes]` of images `[K·B, ...]`, lane-major.

        norm: with "train" the running statistics in `state.buffers` are updated in place.
        dropout: the lanes' keys, int64 `[K]`; None turns dropout off.
        slots: where gradients are written; None leaves all to autograd.
        """
        params = state.params
        if self.compute is not None:
            params = {n: t.to(self.compute) for n, t in params.items()}
        images = self._entering(images, state.lanes)
        tensors = {**params, **state.buffers}
        if dropout is not None:
            tensors.update(dict.fromkeys(self._dropouts, dropout))
        self.context.norm, self.context.slots = norm, slots or Slots()
        try:
            if norm != "train" and not torch.is_grad_enabled():
                self._compile(tensors, images, state.lanes)
            with LanesInDropout(dropout) if self._foreign and dropout is not None else nullcontext():
                logits = self._run(tensors, images)
        finally:
            self.context.norm, self.context.slots = None, Slots()  # slots hold memory
        logits = logits.reshape(state.lanes, -1, logits.shape[-1])
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def _entering(self, images: Front, lanes: int) -> Tensor | Stem:
        """Returns what the trained part of the network takes, of images `[K·B, ...]` or what the front made of them."""
        if isinstance(images, Stem):
            return images.by(lanes)
        if self.prefix is not None:
            features = images if isinstance(images, Features) else self.prefix(self.computed(images))
            if features.digest != self.prefix.digest:
                raise ValueError("these features are another network's, or of other weights")
            images = features.values
        assert isinstance(images, Tensor), "features, and no prefix that made them"
        images = self.computed(images)
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images

    def _run(self, tensors: dict[str, Tensor], images: Tensor | Stem) -> Tensor:
        for name in self._per_sample:
            lanes, batch = tensors[name].flatten(0, 1), images.shape[0] // tensors[name].shape[0]
            each = lanes.unsqueeze(1).expand(-1, batch, *lanes.shape[1:])
            tensors = {**tensors, name: each.flatten(0, 1)}
        shared = {alias: tensors[name] for alias, name in self.shared.items()}
        # With torch's own ties, lanes would stay in a module that is used under two names.
        out: Tensor = functional_call(self.module, {**tensors, **shared}, (images,), tie_weights=False)
        return out

    def _compile(self, tensors: dict[str, Tensor], images: Tensor | Stem, lanes: int) -> None:
        """Compiles the kernels of this kind of pass, all together, before the first one."""
        # With running statistics, kernels depend only on whether Triton finds the number divisible by 16.
        number = images.shape[0] // lanes % 16 == 0 if self.context.norm == "running" else images.shape[0]
        kind = (self.context.norm, lanes, number, images.shape[1:])
        if kind not in self._compiled:
            self._compiled.add(kind)
            self.context.ops.compile(lambda: self._run(tensors, images))

    def plain(self, state: State) -> nn.Module:
        """Returns a stand-alone torch module (a copy, in eval mode) that holds this one lane."""
        if state.lanes != 1:
            raise ValueError(f"a plain module takes one lane, not {state.lanes}")
        module = copy.deepcopy(self.module, {id(self.context): Context()})  # plain torch, as it may move to a CPU
        if self.prefix is not None:
            self.prefix.put_back(module)
        module = module.to(next(iter(state.tensors())).dtype)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for source in (state.params, state.buffers):
            for name, tensor in source.items():
                tensors[name].copy_(tensor[0])
        return module.eval()
