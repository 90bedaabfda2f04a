"""Vision transformers on lanes: folded training equals training one lane at a time in plain torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm
from torch import Tensor, nn

from lanes.problems import Problem, cross_entropy, noisy
from lanes.transformers import CLASSES, SIZE, TRANSFORMERS, transformer
from perada import adapt
from perada.adapters import Bottleneck, Lora
from perada.errors import InputError
from perada.lanes import Batch, LaneModel, Options, State, gather, replay, sgd
from perada.lanes.machine import REST, STATES, bytes_per_lane

K, B, STEPS, LR = 3, 4, [5, 2, 4], [0.1, 0.05, 0.2]
HOW: dict[str, tuple[Any, str]] = {
    "lora": (Lora(rank=2, alpha=3), "adapter"),
    "lora everywhere": (Lora(rank=2, target_modules="all-linear"), "adapter"),
    "frozen A": (Lora(rank=2, freeze_a=True), "adapter"),
    "bottleneck": (Bottleneck(reduction=4), "adapter"),
    "head": (None, "output"),
    "full": (None, "full"),
    "everything": (Lora(rank=2), "everything"),
}


def problem(net: nn.Module, adapter: Any, trained: str) -> Problem:
    model = adapt(net, adapter=adapter, trained=trained).to("cpu", torch.float64)
    draw = torch.Generator().manual_seed(2)
    images = torch.randn(K, max(STEPS), B, 3, SIZE, SIZE, generator=draw, dtype=torch.float64)
    targets = torch.randint(CLASSES, (K, max(STEPS), B), generator=draw)
    weights = torch.ones(K, max(STEPS), B, dtype=torch.float64)
    return Problem(net, model, noisy(model.initial(K)), images, targets, weights)


def trained_alone(model: LaneModel, start: State, given: Problem, k: int) -> tuple[dict[str, Tensor], list[float]]:
    """One lane in plain torch: a stand-alone module, autograd and a hand-written step."""
    module, losses = model.plain(gather(start, [k])), []
    params = {n: p for n, p in module.named_parameters() if n in start.params}
    for p in params.values():
        p.requires_grad_()
    for images, targets, _ in given.of_lane(k, STEPS[k]):
        loss = F.cross_entropy(module(images), targets)
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(params.values(), grads, strict=True):
                p -= LR[k] * (torch.zeros_like(p) if g is None else g)
    return {n: p.detach() for n, p in params.items()}, losses


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_folded_equals_one_lane_at_a_time(name: str, how: str) -> None:
    given = problem(transformer(name), *HOW[how])
    start = given.start
    done = sgd(given.model, start, given.batches, cross_entropy, LR, STEPS, options=Options())
    assert done.failed == ()
    for k in range(K):
        alone, losses = trained_alone(given.model, start, given, k)
        for n, p in done.state.params.items():
            assert_close_norm(p[k], alone[n], 1e-9, n)
        assert done.trace[: STEPS[k], k].tolist() == pytest.approx(losses, rel=1e-9)
    still = [n for n, p in done.state.params.items() if torch.equal(p, start.params[n])]
    assert all("k_proj.bias" in n for n in still), "everything moves, but softmax may cancel the bias of keys"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_plain_module_equals_the_network_it_was_made_from(name: str) -> None:
    """Without training nothing has changed: adapters add zero, also on paths that torch would shorten."""
    net, x = transformer(name), torch.randn(5, 3, SIZE, SIZE, dtype=torch.float64)
    for adapter, trained in HOW.values():
        model = adapt(net, adapter=adapter, trained=trained).to("cpu", torch.float64)
        with torch.no_grad():
            wanted = net(x)
            assert_close_norm(model(model.initial(), x)[0], wanted, 1e-9)
            assert_close_norm(model.plain(model.initial())(x), wanted, 1e-9)


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("how", ["lora everywhere", "bottleneck", "full"])
def test_no_fast_path_skips_what_is_trained(name: str, how: str) -> None:
    """In eval mode and without gradients, where torch computes attention from weights alone."""
    given = problem(transformer(name), *HOW[how])
    x = torch.randn(5, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        logits = given.model.on_all(given.start, x)
        for k in range(K):
            module = given.model.plain(gather(given.start, [k]))
            assert_close_norm(module(x), logits[k], 1e-9)
            with torch.enable_grad():
                assert_close_norm(module.requires_grad_()(x).detach(), logits[k], 1e-9)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_attention_that_cannot_have_lanes() -> None:
    class Net(nn.Module):
        def __init__(self, **how: Any) -> None:
            super().__init__()
            self.self_attention = nn.MultiheadAttention(8, 2, **how)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2).transpose(1, 2)
            wide = torch.cat([tokens] * 4, -1)[..., :8]
            return self.head(self.self_attention(wide, wide, wide * 2)[0].mean(1))

    for how in ({}, {"batch_first": True, "kdim": 4}, {"batch_first": True, "add_zero_attn": True}):
        for kind, trained in ((Lora(), "adapter"), (None, "full")):
            with pytest.raises(InputError, match="self_attention: attention has a lane-aware form only with"):
                adapt(Net(**how), adapter=kind, trained=trained)
    model = adapt(Net(batch_first=True), adapter=Lora(rank=2))
    with pytest.raises(InputError, match="must be self-attention without masks"):
        model(model.initial(), torch.zeros(2, 3, 4, 4))


def test_parameters_of_a_module_of_ones_own() -> None:
    """Those with an entry for all samples get one per sample; others are refused by name, and torch's layers too."""

    class Own(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(shape))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def net(layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2))

    model = adapt(net(Own(1, 3, 1, 1)), adapter=None, trained="full")
    state = model.initial(2)
    state.params["0.scale"][1] *= 2
    x = torch.randn(6, 3, 2, 2)
    assert torch.allclose(model(state, x)[1], model(model.initial(2), x * 2)[1])
    with pytest.raises(InputError, match="a trained Own has no lane-aware form"):
        adapt(net(Own(3, 1, 1)), adapter=None, trained="full")
    with pytest.raises(InputError, match="a trained Bilinear has no lane-aware form"):
        adapt(nn.Sequential(nn.Bilinear(3, 2, 1), nn.Linear(1, 2)), adapter=None, trained="full")


def test_dropout_of_an_adapter_draws_by_lane() -> None:
    for kind in (Lora(rank=2, dropout=0.5), Bottleneck(reduction=2, dropout=0.5)):
        given = problem(transformer("ours"), kind, "adapter")
        keys, x = torch.arange(K), given.images[:, 0].flatten(0, 1)
        logits = given.model(given.start, x, dropout=keys)
        alone = given.model(gather(given.start, [1]), x[B : 2 * B], dropout=keys[1:2])
        assert_close_norm(logits[1], alone[0], 1e-9)
        assert (logits - given.model(given.start, x)).abs().max() > 1e-3


@pytest.mark.parametrize("how", HOW)
def test_the_memory_of_a_lane_counts_tokens(how: str) -> None:
    """What is kept for a backward pass lies in `[K, B·tokens, width]`, too. It counts like anything else of a batch."""
    model = problem(transformer("ours"), *HOW[how]).model
    state, storages = model.initial(), dict[int, int]()

    def remember(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = {t.untyped_storage().data_ptr() for t in [*model.module.parameters(), *state.tensors()]}
    for p in state.params.values():
        p.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        _ = model(state, torch.zeros(64, 3, SIZE, SIZE, dtype=torch.float64), dropout=torch.zeros(1, dtype=torch.int64))
    wanted = sum(size for where, size in storages.items() if where not in held)
    estimate = bytes_per_lane(model, (SIZE, SIZE), 64) - STATES * model.initial().bytes_per_lane()
    assert 0.8 < estimate / REST / wanted < 1.4


@dataclasses.dataclass
class Fixed:
    """The same batch at every step, as recorded steps need it."""

    images: Tensor
    targets: Tensor
    capacity: int

    def shape(self) -> Any:
        return tuple(self.images.shape)

    def copy_(self, other: Fixed) -> None:
        self.images.copy_(other.images)

    def twin(self) -> Fixed:
        return dataclasses.replace(self, images=self.images.clone())

    def __call__(self, step: Any, lanes: Tensor) -> Batch:
        return Batch(self.images[lanes].flatten(0, 1), self.targets[lanes], None, lanes)


@pytest.mark.parametrize("how", HOW)
def test_recorded_steps_are_the_steps(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all parameters of a lane side by side in one tensor, as a GPU records them."""
    given = problem(transformer("ours"), *HOW[how])
    batches = Fixed(given.images[:, 0], given.targets[:, 0], max(STEPS))
    wanted = sgd(given.model, given.start, batches, cross_entropy, LR, STEPS)
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))
    found = sgd(given.model, given.start, batches, cross_entropy, LR, STEPS)
    assert given.model.replays, "it was recorded"
    for n, p in wanted.state.params.items():
        assert_close_norm(found.state.params[n], p, 1e-9, n)
