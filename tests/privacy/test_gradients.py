"""Gradients per sample equal those of one sample at a time, and those of Opacus."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from perada.adapters import Residual, adapt
from perada.client.trainer import sample_loss
from perada.errors import InputError
from perada.lanes import LaneModel, Samples, State, Way, gather, sample_gradients, trained_names, ways
from perada.models import backbone
from perada.privacy.apart import check_apart

from .networks import CLASSES, FULL, MODELS, SIZE, flat, lanes_of, record_all, samples_of, size_of
from .twins import twin

COUNTS = (3, 0, 2)


def ours(model: LaneModel, state: State, batch: Samples, most: int = 100) -> Tensor:
    pieces = list(sample_gradients(model, state, batch, sample_loss, Way(most)))
    return torch.cat([flat(p.grads) for p in pieces])


def one_by_one(model: LaneModel, state: State, batch: Samples) -> Tensor:
    """Each sample's gradient, in plain torch, alone."""
    found, owners = [], [k for k, n in enumerate(batch.counts) for _ in range(n)]
    for i, k in enumerate(owners):
        net = model.plain(gather(state, [k]))
        held = {n: p for n, p in net.named_parameters() if n in trained_names(model, state)}
        for p in held.values():
            p.requires_grad_()
        F.cross_entropy(net(batch.images[i : i + 1]), batch.targets[i]).backward()
        found.append(
            flat({n: p.grad[None] if p.grad is not None else torch.zeros_like(p)[None] for n, p in held.items()})
        )
    return torch.cat(found)


def off(a: Tensor, b: Tensor) -> float:
    """The largest distance of a sample's gradient, relative to its norm."""
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


@pytest.mark.parametrize("name", [*MODELS, *FULL])
def test_they_are_those_of_one_sample_at_a_time(name):
    model = {**MODELS, **FULL}[name]()
    state, batch = lanes_of(model, len(COUNTS)), samples_of(size_of(name), COUNTS)
    assert off(ours(model, state, batch), one_by_one(model, state, batch)) <= 1e-9


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_opacus(name):
    model = MODELS[name]()
    state, batch = lanes_of(model, 1, torch.float32), samples_of(size_of(name), (4,), torch.float32)
    front = model.prefix(batch.images).values if model.prefix else batch.images
    net = GradSampleModule(twin(model, state), loss_reduction="sum", strict=False)
    F.cross_entropy(net(front), batch.targets[:, 0], reduction="sum").backward()
    theirs = {n: p.grad_sample for n, p in net._module.named_parameters() if p.requires_grad}
    mine = {n: g for p in sample_gradients(model, state, batch, sample_loss, Way(100)) for n, g in p.grads.items()}
    assert mine.keys() == theirs.keys()
    assert off(flat(mine), flat(theirs)) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_they_do_not_depend_on_how_many_fit_in_memory(name):
    model = MODELS[name]()
    state, batch = lanes_of(model, len(COUNTS)), samples_of(size_of(name), COUNTS)
    torch.testing.assert_close(ours(model, state, batch, 2), ours(model, state, batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_neighbour_changes_nothing(name):
    model = MODELS[name]()
    state, batch = lanes_of(model, 1), samples_of(size_of(name), (2,))
    before = ours(model, state, batch)[0]
    batch.images[1] *= 10
    assert off(ours(model, state, batch)[:1], before[None]) <= 1e-12
    check_apart(model, (size_of(name),) * 2)


@pytest.mark.parametrize("name", [*MODELS, *FULL])
def test_large_matrices_are_recorded_instead(name, monkeypatch):
    """The same norms, and the same sums by the lanes, as with the gradients themselves."""
    record_all(monkeypatch)
    model = {**MODELS, **FULL}[name]()
    state, batch = lanes_of(model, len(COUNTS)), samples_of(size_of(name), COUNTS)
    names = ways.recordable(model, (size_of(name),) * 2)
    assert len(names) > {"full ViT": 8, "full resnet8": 8, "ViT with bottlenecks": 4}.get(name, 0)
    whole, short = ({n: torch.zeros_like(state.params[n]) for n in trained_names(model, state)} for _ in range(2))
    squares = []
    for piece in sample_gradients(model, state, batch, sample_loss, Way(100)):
        squares.append(piece.squares(torch.float64))
        piece.add_to(whole, 1 / squares[-1])
    for most in (100, 6, 3, 1):
        for sums in short.values():
            sums.zero_()
        for piece in sample_gradients(model, state, batch, sample_loss, Way(most, names)):
            found = piece.squares(torch.float64)
            assert piece.present is not None
            if most == 100:
                torch.testing.assert_close(found[piece.present], squares[0], rtol=2e-5, atol=0)
                assert (found[piece.present] >= squares[0] * (1 - 1e-12)).all()
            piece.add_to(short, 1 / found * piece.present)
        for n, g in whole.items():
            torch.testing.assert_close(short[n], g, rtol=1e-4, atol=1e-5 * float(g.abs().max()))


def test_what_is_not_called_as_a_layer_is_not_recorded(monkeypatch):
    """LoRA's matrices are layers whose weights are read, and never called."""
    record_all(monkeypatch)
    model = MODELS["ViT with LoRA"]()
    lanes_of(model, 1)
    assert not [n for n in ways.recordable(model, (SIZE, SIZE)) if "lora" in n]


class ReadTwice(nn.Module):
    """Calls a layer, and reads its weight beside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3 * SIZE * SIZE, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x.flatten(1))) * (1 + self.a.weight.sum())


def test_a_weight_that_is_read_beside_its_layer_is_not_recorded(monkeypatch):
    record_all(monkeypatch)
    model = adapt(ReadTwice(), adapter=None, trained="full").to("cpu", torch.float32)
    assert not ways.recordable(model, (SIZE, SIZE))


class Mixing(nn.Module):
    """A norm of one's own that sees the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_network_that_mixes_samples_is_refused():
    net = backbone("resnet8", CLASSES).net
    net.bn1 = nn.Sequential(net.bn1, Mixing())
    model = adapt(net, adapter=Residual(dropout=0.0), head="fc").to("cpu", torch.float32)
    with pytest.raises(InputError, match="a sample changes its neighbour's gradient"):
        check_apart(model, (SIZE, SIZE))


def test_a_batch_norm_without_running_statistics_is_refused():
    net = backbone("resnet8", CLASSES).net
    net.bn1 = nn.BatchNorm2d(16, track_running_stats=False)
    with pytest.raises(InputError, match="bn1"):
        adapt(net, adapter=Residual(dropout=0.0), head="fc")


def test_running_statistics_stay(tmp_path):
    model = MODELS["resnet8 with adapters"]()
    state, batch = lanes_of(model, 2), samples_of(SIZE, (2, 2))
    before = {n: b.clone() for n, b in state.buffers.items()}
    ours(model, state, batch)
    assert all(torch.equal(b, before[n]) for n, b in state.buffers.items())


def test_samples_of_a_lane_drop_out_different_units():
    model = adapt(backbone("resnet8", CLASSES).net, adapter=Residual(dropout=0.5), head="fc")
    state, batch = lanes_of(model, 1), samples_of(SIZE, (2,))
    batch.images[1], batch.targets[1] = batch.images[0], batch.targets[0]
    first, second = ours(model, state, batch)
    assert not torch.allclose(first, second)
    batch.keys[1] = batch.keys[0]
    first, second = ours(model, state, batch)
    torch.testing.assert_close(first, second)
