"""A module whose trained tensors are handed over at each call."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .fast import fast_kernels
from .layers import LaneBatchNorm, LaneDropout, Norm
from .state import State, repeat
from .stem import Stem

if TYPE_CHECKING:
    from .pool import Pool


@dataclass(frozen=True)
class Group:
    """A named part of a model: which parameters, and which buffers (running statistics) follow them."""

    params: frozenset[str]
    buffers: frozenset[str]

    def __sub__(self, other: Group) -> Group:
        return Group(self.params - other.params, self.buffers - other.buffers)


NOTHING = Group(frozenset(), frozenset())


def divide(state: State, group: Group) -> tuple[State, State]:
    """The part of a state that lies in the group, and the rest."""
    inside = state.only(group.params, group.buffers)
    return inside, state.only(state.params.keys() - group.params, state.buffers.keys() - group.buffers)


class LaneModel:
    """Frozen weights inside, lanes from outside: `model(state, images)`.

    `trained` names the parameters a lane owns; every batch norm's running statistics are a lane's own too.
    `inert` names trained parameters that cannot change what the network computes in expectation: they are
    counted, sent and stored, but no optimiser moves them (see `convert._insert`).
    """

    def __init__(
        self, module: nn.Module, trained: frozenset[str], inert: frozenset[str], groups: Mapping[str, Group]
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.groups = dict(groups)
        self.inert = inert & trained
        self.compute: torch.dtype | None = None
        self.lane_steps = [0, 0]  # of recorded loops: asked for, and of slots that stood empty
        self.room = 0  # lanes that there is memory for, where somebody has asked
        self.pool: Pool | None = None  # where its loops are run together with others
        self._initial: State | None = None
        self._compiled: set[Hashable] = set()  # calls without a gradient whose kernels are there
        stem = getattr(module, "stem", None)  # the names of a module's first layer and of its pooling, where it says so
        self._stem = None if not isinstance(stem, tuple) or f"{stem[0]}.weight" in trained else stem
        self._norms = [m for m in module.modules() if isinstance(m, LaneBatchNorm)]
        self._dropouts = [f"{n}.key" for n, m in module.named_modules() if isinstance(m, LaneDropout)]
        self._params = [n for n, _ in module.named_parameters() if n in trained]
        if not set(self._params) - self.inert:
            raise ValueError("nothing is trained: name a parameter group that is not empty")
        self._buffers = [
            f"{n}.{b}"
            for n, m in module.named_modules()
            if isinstance(m, LaneBatchNorm)
            for b in ("running_mean", "running_var")
        ]

    @cached_property
    def signature(self) -> Hashable:
        """What models have in common that compute the same from the same lanes."""
        from .pool import signature

        return signature(self)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def to(self, device: torch.device | str, dtype: torch.dtype, compute: torch.dtype | None = None) -> LaneModel:
        """Lanes in `dtype`; the frozen weights and all computing in `compute`, if that is another."""
        self.module.to(device=device, dtype=dtype)
        self._initial = self.initial()  # before anything is rounded
        self.compute = compute or dtype
        self.module.to(self.compute)
        if self.device.type == "cuda":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self

    def initial(self, lanes: int = 1) -> State:
        """Equal lanes with the values the module was made with."""
        if self._initial is not None:
            return repeat(self._initial, lanes)
        params, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        one = State(
            {n: params[n].detach().unsqueeze(0) for n in self._params},
            {n: buffers[n].detach().unsqueeze(0) for n in self._buffers},
        )
        return repeat(one, lanes)

    def group(self, name: str) -> Group:
        if name not in self.groups:
            raise KeyError(f"this model has no parameter group {name!r}; it has {', '.join(self.groups)}")
        return self.groups[name]

    def holds(self, state: State) -> bool:
        """Whether the state is a whole model (it may be just a shared part)."""
        return state.params.keys() >= set(self._params) and state.buffers.keys() >= set(self._buffers)

    def part_of(self, state: State) -> State:
        """Returns what of a state belongs to this model; a broadcast may carry more."""
        return state.only(self._params, self._buffers)

    @torch.no_grad()
    def stem(self, images: Tensor) -> Tensor | Stem:
        """What the first layer gives, where that is frozen, for the model to take in place of the images: always the
        same for the same images, so it may be kept, and lanes share it. Elsewhere, the images."""
        if self._stem is None:
            return images
        images = images if self.compute is None else images.to(self.compute)
        layer, pool = map(self.module.get_submodule, self._stem)
        return Stem.of(layer(images), pool)

    def rounded(self, state: State) -> State:
        """Its parameters as they are computed with: for calling the model with it more than once."""
        return State({n: t.to(self.compute) for n, t in state.params.items()}, state.buffers)

    def on_all(self, state: State, images: Tensor | Stem, norm: Norm = "running") -> Tensor:
        """Every lane on the same images `[B, ...]`."""
        return self(state, images if isinstance(images, Stem) else images.repeat(state.lanes, 1, 1, 1), norm)

    def __call__(
        self, state: State, images: Tensor | Stem, norm: Norm = "running", dropout: Tensor | None = None
    ) -> Tensor:
        """images `[K·B, ...]`, lane-major -> logits `[K, B, classes]`.

        `dropout` holds the lanes' keys, int64 `[K]`; None turns dropout off. With norm="train" the running
        statistics in `state.buffers` are updated in place.
        """
        for layer in self._norms:
            layer.mode = norm
        params = state.params
        if self.compute is not None:
            params = {n: t.to(self.compute) for n, t in params.items()}
        if isinstance(images, Stem):
            images = images.by(state.lanes)
        else:
            images = images if self.compute is None else images.to(self.compute)
            images = images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images
        tensors = {**params, **state.buffers}
        if dropout is not None:
            tensors.update(dict.fromkeys(self._dropouts, dropout))
        kernels = None if torch.is_grad_enabled() else fast_kernels(images.device)
        # without statistics of the images kernels differ by what Triton asks of a number: is it a multiple of 16
        number = images.shape[0] // state.lanes % 16 == 0 if norm == "running" else images.shape[0]
        call = (norm, state.lanes, number, images.shape[1:])
        if kernels is not None and norm != "train" and call not in self._compiled:
            self._compiled.add(call)
            with kernels.compiling():
                functional_call(self.module, tensors, (images,))
        logits: Tensor = functional_call(self.module, tensors, (images,))
        logits = logits.reshape(state.lanes, -1, logits.shape[-1])
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def plain(self, state: State) -> nn.Module:
        """A stand-alone torch module (a copy, in eval mode) with this one lane in place."""
        if state.lanes != 1:
            raise ValueError(f"a plain module takes one lane, not {state.lanes}")
        module = copy.deepcopy(self.module).to(next(iter(state.tensors())).dtype)
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for source in (state.params, state.buffers):
            for name, tensor in source.items():
                held[name].copy_(tensor[0])
        return module.eval()
