"""Chooses how the gradients of single samples are computed, by trying it on random images."""

from __future__ import annotations

import torch
from torch import Tensor

from .machine import REST, STATES, bytes_per_lane, free_memory
from .model import LaneModel
from .ops import plain
from .random import key_of
from .records import Recorder, candidates, exact_products, worth
from .samples import Samples, Way, images_of, sample_gradients, trained_names
from .state import State, repeat

ROOM = 256 << 20  # bytes for samples on a CPU: a fixed number, so that sums are always made alike
SHARE = 0.4  # of the free memory of a GPU
MOST = 4096  # samples at once
LEAST = 0.25  # of the trained numbers are worth recording: lanes are then filled up to the same number of samples
NEAR = 0.03  # relative difference of the two ways, in bfloat16


def way_for(model: LaneModel, size: tuple[int, int]) -> Way:
    """Returns how to compute gradients of single samples for images of this height and width; chosen once."""
    if model.way is None:
        recorded = recordable(model, size)
        model.way = Way(samples_at_once(model, size, recorded), recorded)
    return model.way


def samples_at_once(model: LaneModel, size: tuple[int, int], recorded: frozenset[str] = frozenset()) -> int:
    """Returns how many samples fit in memory, with copies of all parameters but the recorded ones."""
    room = ROOM if model.device.type == "cpu" else int(SHARE * (free_memory(model.device) + unused(model.device)))
    large = sum(t.numel() * t.element_size() for n, t in model.initial().params.items() if n in recorded)
    each = bytes_per_lane(model, size, 1)
    maps = each - STATES * model.initial().bytes_per_lane()
    records = int(REST * maps) if recorded else 0  # inputs and slopes, in the lanes' precision
    return min(MOST, max(1, room // max(1, each - STATES * large + records)))


def unused(device: torch.device) -> int:
    """Returns the bytes of a GPU that torch keeps for later."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@torch.no_grad()
def recordable(model: LaneModel, size: tuple[int, int]) -> frozenset[str]:
    """Returns the matrices whose gradients are worth recording; none if that does not give the same numbers."""
    state, recorder = drawn(model), Recorder()
    names = candidates(model, trained_names(model, state))
    if not names:
        return names
    batch = tried(model, size)
    one = state.map(lambda t: t[:1])
    if model.compute is not None:
        one = model.rounded(one)
    with plain(model.context), recorder.watching(model, names), torch.enable_grad():
        model(one, images_of(batch.images, torch.arange(1)))
    names = worth(recorder.records)
    sizes = {n: state.params[n][0].numel() for n in trained_names(model, state)}
    if sum(sizes[n] for n in names) < LEAST * sum(sizes.values()):
        return frozenset()
    whole, short = (_sums(model, state, batch, Way(8, each)) for each in (frozenset[str](), names))
    exact = model.compute in (None, torch.float32, torch.float64)
    for name in names:
        away = (whole[name] - short[name]).norm() / whole[name].norm().clamp_min(1e-30)
        if not away <= (1e-3 if exact else NEAR):
            return frozenset()
    return names


def _sums(model: LaneModel, state: State, batch: Samples, way: Way) -> dict[str, Tensor]:
    """Returns the lanes' gradients of the samples' sum, each sample by a factor of its norm; none if that fails."""
    sums = {n: torch.zeros_like(state.params[n]) for n in trained_names(model, state)}
    for piece in sample_gradients(model, state, batch, lambda logits, targets: logits.logsumexp(-1), way):
        with exact_products(model.compute):
            factors = 1 / (1 + piece.squares(next(iter(sums.values())).dtype))
            piece.add_to(sums, factors if piece.present is None else factors * piece.present)
    return sums


def drawn(model: LaneModel) -> State:
    """Returns two lanes that differ, and are not what a new adapter is: nearly zero."""
    draw = torch.Generator().manual_seed(key_of("drawn") & (2**63 - 1))
    state = repeat(model.initial(), 2)
    noise = {n: 0.02 * torch.randn(p.shape, generator=draw).to(p) for n, p in sorted(state.params.items())}
    return State({n: p + noise[n] for n, p in state.params.items()}, state.buffers)


def tried(model: LaneModel, size: tuple[int, int]) -> Samples:
    """Returns random images for two lanes, two for the first and one for the second."""
    draw = torch.Generator().manual_seed(key_of("tried") & (2**63 - 1))
    images = torch.randn(3, 3, *size, generator=draw).to(next(iter(model.initial().tensors())))
    none = torch.zeros(3, 1, dtype=torch.int64, device=model.device)
    return Samples(images, none, None, torch.arange(3, device=model.device), (2, 1), (0, 1), 0)
