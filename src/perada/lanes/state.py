"""A lane state: what is trained, as data.

A lane is one independent copy of the trained tensors. A `State` holds K lanes as two flat dictionaries, name ->
`[K, ...]`: parameters, which are optimised, and buffers (running statistics of batch norms), which are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """K lanes. Every tensor is `[K, ...]`; K may be 1 (the server's adapter) or the size of a cohort.

    flat: all parameters as one tensor `[K, n]`, and all buffers as another; then the named tensors are views of these
        (`flattened`), and one operation works on all of them.
    """

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    flat: tuple[Tensor, Tensor] | None = None

    @property
    def lanes(self) -> int:
        """Returns K; 0 for an empty state."""
        for tensor in self.tensors():
            return int(tensor.shape[0])
        return 0

    def tensors(self) -> Iterable[Tensor]:
        yield from self.params.values()
        yield from self.buffers.values()

    def map(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Returns the state with `fn` applied to every tensor."""
        return State({n: fn(t) for n, t in self.params.items()}, {n: fn(t) for n, t in self.buffers.items()})

    def only(self, params: Iterable[str], buffers: Iterable[str]) -> State:
        """Returns the part with these names; names that the state does not have are ignored."""
        keep_p, keep_b = set(params), set(buffers)
        return State(
            {n: t for n, t in self.params.items() if n in keep_p},
            {n: t for n, t in self.buffers.items() if n in keep_b},
        )

    def first(self, lanes: int) -> State:
        """Returns the first lanes, as views."""
        if self.flat is None:
            return self.map(lambda t: t[:lanes])
        return self.with_flat(self.flat[0][:lanes], self.flat[1][:lanes])

    def with_flat(self, params: Tensor, buffers: Tensor) -> State:
        """Returns a flat state with the same names as views of these two tensors."""
        return State(views(self.params, params), views(self.buffers, buffers), (params, buffers))

    def bytes_per_lane(self) -> int:
        """Returns the bytes of one lane, on a network or a disk."""
        return sum(t.shape[1:].numel() * t.element_size() for t in self.tensors()) if self.lanes else 0

    def parameters_per_lane(self) -> int:
        return sum(t.shape[1:].numel() for t in self.params.values()) if self.lanes else 0


def views(like: dict[str, Tensor], flat: Tensor) -> dict[str, Tensor]:
    """Returns views of `[K, n]` with the names and shapes of `like`; n may be more than they need."""
    sizes = [t.shape[1:].numel() for t in like.values()]
    *parts, _ = torch.split(flat, [*sizes, flat.shape[1] - sum(sizes)], 1)
    return {n: _cut(p, like[n].shape[1:]) for n, p in zip(like, parts, strict=True)}


def _cut(part: Tensor, shape: torch.Size) -> Tensor:
    """Returns `[K, n]` as lanes of this shape. A kernel `[O, I, h, w]` is stored channels last, as products need it."""
    if len(shape) != 4:
        return part.view(part.shape[0], *shape)
    outputs, inputs, height, width = shape
    return part.view(part.shape[0], outputs, height, width, inputs).permute(0, 1, 4, 2, 3)


def _side_by_side(tensor: Tensor) -> Tensor:
    """Returns `[K, ...]` as `[K, n]`, the inverse of `_cut`."""
    return (tensor.permute(0, 1, 3, 4, 2) if tensor.dim() == 5 else tensor).flatten(1)


def flattened(state: State) -> State:
    """Returns a flat copy. Each lane begins at a multiple of 64 numbers, as matrix products need."""

    def one(tensors: dict[str, Tensor]) -> Tensor:
        if not tensors:
            return next(iter(state.tensors())).new_zeros(state.lanes, 0)
        rows = [_side_by_side(t) for t in tensors.values()]
        return torch.cat([*rows, rows[0].new_zeros(state.lanes, -sum(t.shape[1] for t in rows) % 64)], 1)

    return state.with_flat(one(state.params), one(state.buffers))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on this device, without waiting for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def on_cpu(state: State) -> State:
    """Returns a copy on the CPU, in two transfers instead of one per tensor."""
    if not state.lanes:
        return state
    if len({t.dtype for t in state.tensors()}) > 1:  # one flat tensor would have one type
        return state.map(lambda t: t.detach().cpu().clone())
    flat = flattened(state).flat
    assert flat is not None
    params, buffers = (t.cpu() for t in flat)
    return State(views(state.params, params), views(state.buffers, buffers)).map(Tensor.contiguous)


def _zip(states: Sequence[State], fn: Callable[[list[Tensor]], Tensor]) -> State:
    first = states[0]
    for other in states[1:]:
        if first.params.keys() != other.params.keys() or first.buffers.keys() != other.buffers.keys():
            raise ValueError("states have different names: use only() or merge() first")
    return State(
        {n: fn([s.params[n] for s in states]) for n in first.params},
        {n: fn([s.buffers[n] for s in states]) for n in first.buffers},
    )


def stack(*states: State) -> State:
    """Returns the lanes of the first state, then those of the second, ...: `[K1 + K2 + ..., ...]`."""
    return _zip(states, torch.cat)


def split(state: State, parts: int) -> tuple[State, ...]:
    """Returns the `parts` states of equal size that were stacked.

    The parts are copies: serialising a view would include its neighbours' storage, and the neighbour of an upload must
    never leave the client.
    """
    size, rest = divmod(state.lanes, parts)
    if rest:
        raise ValueError(f"{state.lanes} lanes do not split into {parts} equal parts")
    return tuple(state.map(lambda t, i=i: t[i * size : (i + 1) * size].clone()) for i in range(parts))  # type: ignore[misc]


def repeat(state: State, lanes: int) -> State:
    """Returns one lane as `lanes` equal lanes (a copy, so that each can be trained)."""
    if state.lanes > 1:
        raise ValueError(f"repeat takes one lane, not {state.lanes}")
    return state.map(lambda t: t.repeat(lanes, *([1] * (t.dim() - 1))))


def gather(state: State, lanes: Sequence[int] | Tensor) -> State:
    """Returns these lanes in this order (a copy)."""
    index = _index(state, lanes)
    return state.map(lambda t: t.index_select(0, index))


def scatter(state: State, lanes: Sequence[int] | Tensor, part: State) -> State:
    """Returns a copy of `state` in which the lanes of `part` replace these lanes."""
    index = _index(state, lanes)
    return _zip([state, part], lambda pair: pair[0].index_copy(0, index, pair[1]))


def _index(state: State, lanes: Sequence[int] | Tensor) -> Tensor:
    """Returns the lanes' numbers on the state's device: one transfer for all tensors."""
    index = torch.as_tensor(lanes, dtype=torch.long)
    device = next((t.device for t in state.tensors()), index.device)
    return sent(index, device) if index.device.type == "cpu" else index.to(device)


def merge(*states: State) -> State:
    """Returns one state of several that have equal K and different names."""
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    if len({s.lanes for s in states if s.lanes}) > 1:
        raise ValueError("merge: states have different numbers of lanes")
    for state in states:
        if (params.keys() & state.params.keys()) or (buffers.keys() & state.buffers.keys()):
            raise ValueError("merge: a name is in more than one state")
        params.update(state.params)
        buffers.update(state.buffers)
    return State(params, buffers)


def join(**parts: State) -> State:
    """Returns one state of several with equal K, to keep or send: `join(h=a, w=b)` has names `h/...` and `w/...`."""
    named = [
        State({f"{key}/{n}": t for n, t in s.params.items()}, {f"{key}/{n}": t for n, t in s.buffers.items()})
        for key, s in parts.items()
    ]
    return merge(*named)


def part(state: State, key: str) -> State:
    """Returns one of the states that were joined."""
    start = f"{key}/"
    return State(
        {n.removeprefix(start): t for n, t in state.params.items() if n.startswith(start)},
        {n.removeprefix(start): t for n, t in state.buffers.items() if n.startswith(start)},
    )


def like(per_lane: Tensor, other: Tensor) -> Tensor:
    """Returns `[K]` or `[K, 1]` as `[K, 1, ...]`, with as many dimensions as `other`."""
    return per_lane.view(-1, *([1] * (other.dim() - 1)))


def scale(tensor: Tensor, by: Tensor) -> Tensor:
    """Returns `[K, ...]` with each lane multiplied by its own number; `by` is `[K]` or `[K, 1]`."""
    return tensor * like(by, tensor)


def mix(a: State, b: State, share: Tensor) -> State:
    """Returns `share · a + (1 − share) · b` per lane; `share` is `[K]` or `[K, 1]`."""
    return _zip([a, b], lambda pair: scale(pair[0], share) + scale(pair[1], 1 - share))


def mean(state: State, weights: Sequence[float] | None = None) -> State:
    """Returns the mean over lanes as one lane; `weights`, one per lane, are normalised to sum to one."""
    if weights is None:
        return state.map(lambda t: t.mean(0, keepdim=True))
    if len(weights) != state.lanes:
        raise ValueError(f"{len(weights)} weights for {state.lanes} lanes")
    share = torch.tensor(weights, dtype=torch.float64)
    if not (share >= 0).all() or not share.sum() > 0:
        raise ValueError("weights must not be negative and must not all be zero")
    share = sent(share / share.sum(), next(iter(state.tensors())).device)
    return state.map(lambda t: torch.tensordot(share.to(t), t, dims=1).unsqueeze(0))
