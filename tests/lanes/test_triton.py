"""Triton's operations, run by its interpreter on the CPU, against those in plain torch: values, gradients, statistics,
and the same elements dropped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm
from torch import Tensor, nn
from torch.func import functional_call

from perada.data.augment import AUGMENT
from perada.data.federation import Client, Federation
from perada.lanes import LaneModel, Options, State, Stem, conv, fold, gradient
from perada.lanes import ops as seam
from perada.lanes.layers import Context, LaneBatchNorm, LaneConv2d, Norm, ResidualAdapter, Slots
from perada.lanes.ops import PLAIN, Ops, Statistics
from perada.lanes.random import keep_mask
from perada.lanes.state import flattened

from .problems import cross_entropy, problem

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes.ops.triton import Triton, adapter, columns, norm, tiles
from perada.lanes.ops.triton.columns import product

TRITON = Triton()
K = 3
SHAPES = [(4, 5, 3, 3), (9, 8, 1, 1), (7, 70, 2, 2), (40, 3, 5, 4), (16, 16, 4, 4)]
"""B, C, H, W: uneven ones, more than a tile; the last is even."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


Made = tuple[Tensor, tuple[Tensor, ...]]


def use(module: Any, ops: Ops, norm: Norm, slots: Slots | None = None) -> Any:
    """Puts the module's layers in one context."""
    context = Context(ops, norm, slots or Slots())
    for layer in module.modules():
        if hasattr(layer, "context"):
            layer.context = context
    return module


def refused(*args: object, **kwargs: object) -> Tensor:
    raise AssertionError("plain torch was used")


def both(make: Callable[..., Made], inputs: list[Tensor], tolerance: float) -> None:
    """The same in plain torch and by kernels alone: outputs, statistics, and gradients of a weighted sum."""
    found = []
    for ops in (PLAIN, TRITON):
        leaves = [t.clone().requires_grad_() for t in inputs]
        with pytest.MonkeyPatch.context() as patch:
            for name in ("norm", "norm_and_pool", "stem_norm", "adapter") if ops is TRITON else ():
                patch.setattr(Ops, name, refused)
            y, kept = make(ops, *leaves)
        weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin() + 0.5  # sums that do not cancel
        grads = torch.autograd.grad((y * weights).sum(), leaves)
        found.append([y.detach(), *kept, *grads])
    for i, (plain, fast) in enumerate(zip(*found, strict=True)):
        assert_close_norm(fast, plain, tolerance, what=f"result {i}")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["train", "batch"])
@pytest.mark.parametrize("end", ["", "relu", "add relu"])
@pytest.mark.parametrize("whole", [1024, 1])  # in one kernel, or in parts
def test_norms(
    shape: tuple[int, ...], mode: str, end: str, dtype: torch.dtype, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "WHOLE", whole)
    batch, channels, *size = shape
    inputs = [draw(K * batch, channels, *size, dtype=dtype) * 2 + 5, draw(K, channels, dtype=dtype, seed=1)]
    inputs += [draw(K, channels, dtype=dtype, seed=2), draw(K * batch, channels, *size, dtype=dtype, seed=3)]

    def make(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor) -> Made:
        norm = use(LaneBatchNorm(channels).to(dtype), ops, mode)  # type: ignore[arg-type]
        mean, var = draw(K, channels, dtype=dtype, seed=4) + 4, draw(K, channels, dtype=dtype, seed=5).exp()
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        y = functional_call(norm, tensors, (x, add if "add" in end else None, "relu" in end))
        return y + 0 * add.sum(), (mean, var)

    both(make, inputs, TOLERANCE[dtype])


def test_a_frozen_affine_is_shared_and_gets_no_gradient() -> None:
    weight, bias = draw(6, seed=1), draw(6, seed=2)

    def make(ops: Ops, x: Tensor) -> Made:
        mean, var = torch.zeros(K, 6, dtype=torch.float64), torch.ones(K, 6, dtype=torch.float64)
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        return functional_call(use(LaneBatchNorm(6).double(), ops, "train"), tensors, (x,)), (mean, var)

    both(make, [draw(K * 5, 6, 3, 3)], 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("whole", [1024, 1])
def test_adapters(
    shape: tuple[int, ...], dropped: float, active: bool, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "WHOLE", whole)
    batch, channels, *size = shape
    inputs = [draw(K * batch, channels, *size) + 1, draw(K, channels, seed=1), draw(K, channels, seed=2)]
    inputs.append(draw(K, channels, channels, 1, 1, seed=3))

    def make(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor, matrix: Tensor) -> Made:
        layer = use(ResidualAdapter(channels, dropped, "layer").double().eval(), ops, "train")
        mean, var = torch.zeros(K, channels, dtype=torch.float64), torch.ones(K, channels, dtype=torch.float64)
        tensors = {"norm.weight": weight, "norm.bias": bias, "conv.weight": matrix}
        tensors |= {"norm.running_mean": mean, "norm.running_var": var}
        if active:
            tensors["dropout.key"] = torch.tensor([5, -7, 2**62 + 12345])
        return functional_call(layer, tensors, (x,)), (mean, var)

    both(make, inputs, 1e-12)


@pytest.mark.parametrize("shape", [(9, 16, 5, 3), (40, 32, 2, 2), (3, 64, 8, 8)])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize(("mode", "grad"), [("train", True), ("batch", True), ("batch", False), ("running", False)])
def test_adapters_of_few_channels(
    shape: tuple[int, ...], dropped: float, mode: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose product is taken where the norm is applied."""
    monkeypatch.setattr(adapter, "WHOLE", 1)
    monkeypatch.setattr(adapter, "TYPES", {torch.float32})
    monkeypatch.setattr(adapter, "normed", None)  # the other way
    batch, channels, *size = shape
    inputs = [draw(K * batch, channels, *size) + 1, draw(K, channels, seed=1), draw(K, channels, seed=2)]
    inputs.append(draw(K, channels, channels, 1, 1, seed=3))

    def make(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor, matrix: Tensor) -> Made:
        layer = use(ResidualAdapter(channels, dropped, "layer").eval(), ops, mode)  # type: ignore[arg-type]
        mean, var = draw(K, channels, seed=4).float(), draw(K, channels, seed=5).float().square() + 0.1
        tensors = {"norm.weight": weight, "norm.bias": bias, "conv.weight": matrix}
        tensors |= {"norm.running_mean": mean, "norm.running_var": var}
        tensors["dropout.key"] = torch.tensor([5, -7, 2**62 + 12345])
        if grad:
            return functional_call(layer, tensors, (x,)), (mean, var)
        with torch.no_grad():
            y = functional_call(layer, {n: t.detach() for n, t in tensors.items()}, (x.detach(),))
        return y + 0 * sum(t.sum() for t in (x, weight, bias, matrix)), (mean, var)  # as a gradient is taken

    both(make, [t.float() for t in inputs], 1e-5)


@pytest.mark.parametrize("size", [(32, 32), (6, 10), (2, 2)])
def test_images_in_blocks(size: tuple[int, int]) -> None:
    """As the stem's convolution wants them."""
    x = draw(3, 3, *size)
    assert torch.equal(TRITON.blocks(x), PLAIN.blocks(x))
    leaf = x.requires_grad_()
    assert TRITON.blocks(leaf).requires_grad, "images that need a gradient"


def test_the_elements_dropped_are_those_of_the_plain_path() -> None:
    """Through a norm that gives ones: what is left of them is the mask."""
    keys, salt = torch.tensor([1, -(2**60), 77]), 1234
    zeros, ones = torch.zeros(K, 6, dtype=torch.float64), torch.ones(K, 6, dtype=torch.float64)
    noise = draw(K * 4, 6, 3, 2).contiguous(memory_format=torch.channels_last)
    settings = norm.Settings(
        Statistics(zeros.clone(), ones.clone(), "batch", 0.1, 1e-5), drop=norm.Drop(keys, salt, 0.4)
    )
    y, *_ = norm.normed(noise, zeros, ones, settings, None)
    kept = keep_mask(fold(keys, salt), 4 * 6 * 3 * 2, 0.4).view(noise.shape)
    assert torch.equal(y != 0, kept)
    assert 0.5 < kept.double().mean() < 0.7


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("end", ["", "relu"])
def test_running_statistics_without_a_gradient(parts: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "WHOLE", 1024 if parts == 1 else 1)
    layer = LaneBatchNorm(5).double()
    tensors = {"weight": draw(K, 5, seed=1), "bias": draw(K, 5, seed=2)}
    tensors |= {"running_mean": draw(K, 5, seed=3), "running_var": draw(K, 5, seed=4).exp()}
    x, add = draw(K * 4, 5, 3, 3), draw(K * 4, 5, 3, 3, seed=5)
    found = []
    for ops in (PLAIN, TRITON):
        with torch.no_grad():
            found.append(functional_call(use(layer, ops, "running"), tensors, (x, add, end == "relu")))
    assert_close_norm(found[1], found[0], 1e-12)


@pytest.mark.parametrize("slotted", [True, False])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride"),
    [((7, 5, 5, 4), 3, 1), ((9, 70, 8, 8), 3, 2), ((8, 6, 1, 1), 3, 1), ((8, 6, 2, 2), 3, 2), ((6, 3, 9, 12), 7, 2)],
)
def test_convolutions_of_lanes(shape: tuple[int, ...], kernel: int, stride: int, slotted: bool) -> None:
    """As products of columns. A weight lies as in a flat state, and its gradient goes into its slot."""
    outputs, inputs, *size = shape
    x, weight = draw(K * 2, inputs, *size), draw(K, outputs, inputs, kernel, kernel, seed=1)
    state = flattened(State({"w": weight}))
    grads = flattened(State({"w": torch.zeros_like(weight)}))
    found = []
    for form in ("loop", "columns"):
        leaf, own = x.clone().requires_grad_(), state.params["w"].detach().requires_grad_()
        slots = Slots({"w": own}, grads.params if slotted and form == "columns" else {})
        layer = LaneConv2d.of(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, device="meta"))
        del layer.weight
        layer.weight = own  # type: ignore[assignment]
        y = TRITON.conv(leaf, use(layer, TRITON, "train", slots), form)
        dx, dw = torch.autograd.grad(
            (y * torch.arange(y.numel()).view(y.shape).cos()).sum(), (leaf, own), allow_unused=True
        )
        if slotted and form == "columns":
            assert dw is None
            assert not slots.is_free(own)
            dw = grads.params["w"]
        found.append((y.detach(), dx, dw))
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_close_norm(b, a, 1e-12, what=f"result {i}")


def test_a_frozen_convolution_as_a_product_of_columns() -> None:
    """One kernel for all lanes, which wants no gradient: then the columns are not kept."""
    x, layer = draw(6, 5, 8, 7), nn.Conv2d(5, 4, 3, 2, 1, bias=False).double().requires_grad_(False)
    leaves, sizes = [x.clone().requires_grad_() for _ in range(2)], []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        got = product(leaves[0], layer.weight.unsqueeze(0), layer)
    want = layer(leaves[1])
    weights = torch.arange(want.numel(), dtype=want.dtype).view(want.shape).cos()
    grads = [torch.autograd.grad((y * weights).sum(), leaf)[0] for y, leaf in zip((got, want), leaves, strict=True)]
    assert_close_norm(got, want, 1e-12, what="output")
    assert_close_norm(*grads, 1e-12, what="gradient")
    assert max(sizes) == layer.weight.numel()


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("columns", (5, 4, 3, 2, 1, 8, 7)),
        ("stem", (3, 6, 7, 2, 3, 8, 14)),
        ("dense", (5, 7, 3, 1, 1, 2, 2)),
        ("1x1", (5, 7, 1, 2, 0, 7, 8)),
    ],
)
def test_frozen_convolutions_in_every_form(form: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that a GPU gets, also for a layer of lanes."""
    inputs, outputs, kernel, stride, padding, *size = shape
    plain = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False).double().requires_grad_(False)
    layer, x = LaneConv2d.of(plain), draw(4, inputs, *size)
    for module in (columns, conv):
        monkeypatch.setattr(module, "best_form", lambda x, layer: form)
    for ops in (PLAIN, TRITON):
        assert_close_norm(use(layer, ops, "train")(x), plain(x), 1e-12)


def test_compiling_runs_the_work_where_nothing_is_compiled() -> None:
    """As in the interpreter; in plain torch there is no work to do."""
    calls: list[str] = []
    PLAIN.compile(lambda: calls.append("plain"))
    TRITON.compile(lambda: calls.append("triton"))
    assert calls == ["triton"]
    for ops in (PLAIN, TRITON):
        ops.get_ready(torch.device("cpu"))


class Behind(nn.Module):
    """What stands behind a first layer."""

    def __init__(self, channels: int, pool: nn.Module, mode: str) -> None:
        super().__init__()
        self.norm, self.pool, self.mode = LaneBatchNorm(channels).double(), pool, mode

    def forward(self, x: Tensor | Stem) -> Tensor:
        return self.norm.and_pool(x, self.pool)

    def on(self, ops: Ops, x: Tensor | Stem, weight: Tensor, bias: Tensor) -> Made:
        use(self, ops, self.mode)  # type: ignore[arg-type]
        shape = K, self.norm.weight.shape[0]
        mean, var = draw(*shape, seed=4), draw(*shape, seed=5).exp()
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        return functional_call(self, {f"norm.{n}": t for n, t in tensors.items()}, (x,)), (mean, var)


@pytest.mark.parametrize("shape", [(4, 5, 6, 6), (3, 70, 5, 8)])
@pytest.mark.parametrize("mode", ["train", "batch"])
def test_the_stem_with_its_pooling(shape: tuple[int, ...], mode: str) -> None:
    batch, channels, *size = shape
    x, behind = draw(K * batch, channels, *size) * 2 + 1, Behind(channels, nn.MaxPool2d(3, 2, 1), mode)
    inputs = [draw(K, channels, seed=1), draw(K, channels, seed=2)]
    both(lambda ops, weight, bias: behind.on(ops, x, weight, bias), inputs, 1e-12)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1), nn.Identity()])
@pytest.mark.parametrize("mode", ["train", "batch", "running"])
def test_images_behind_the_first_layer(pool: nn.Module, mode: str) -> None:
    """Pooled before the norm, by lanes that say which chunk they see: as pool(ReLU(norm(x))), whatever the sign of the
    norm's factor."""
    behind, number = Behind(5, pool, mode), torch.tensor([1, 0, 1])
    chunks = [draw(4, 5, 6, 7, seed=s) * 2 + 1 for s in (1, 2)]
    inputs = [draw(K, 5, seed=3), draw(K, 5, seed=6)]
    assert bool((inputs[0] < 0).any() and (inputs[0] > 0).any())
    kept = Stem.joined([Stem.of(x, pool) for x in chunks]).seen(number)
    found = []
    for x in (torch.cat([chunks[i] for i in number.tolist()]), kept):
        for ops in (PLAIN, TRITON):
            leaves = [t.clone().requires_grad_(mode != "running") for t in inputs]
            with torch.set_grad_enabled(mode != "running"):
                y, statistics = behind.on(ops, x, *leaves)
            weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin() + 0.5
            grads = torch.autograd.grad((y * weights).sum(), leaves) if mode != "running" else ()
            found.append([y.detach(), *statistics, *grads])
    for other in found[1:]:
        for i, (a, b) in enumerate(zip(other, found[0], strict=True)):
            assert_close_norm(a, b, 1e-12, what=f"result {i}")


@pytest.mark.parametrize("augment", [None, "flip", "crop"])
@pytest.mark.parametrize("channels", [1, 3])
def test_views(augment: str | None, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images by number, mirrored and shifted by the same draws."""
    pool = torch.randint(0, 256, (20, channels, 10, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = (0.4,) * channels, (0.2,) * channels
    clients = (Client("a", *(np.arange(20),) * 3),)
    held = Federation(
        "made", pool, torch.zeros(20).long(), ("x",), clients, *values, augment=AUGMENT[augment or "none"]
    )
    samples, keys = (
        torch.randint(0, 20, (K, 30), generator=torch.Generator().manual_seed(1)),
        torch.tensor([3, -5, 2**61]),
    )
    wanted = held.views(samples, keys, torch.float64)
    monkeypatch.setattr(seam, "DEVICES", ("cpu",))
    monkeypatch.setattr(Ops, "views", refused)
    found = held.views(samples, keys, torch.float64)
    assert found.shape == wanted.shape == (K * 30, 3, 10, 12)
    assert_close_norm(found, wanted, 1e-14)
    assert augment is None or len({tuple(v.flatten().tolist()) for v in found}) > 20


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_divergence_of_logits(temperature: float) -> None:
    teacher, student = draw(2, 21, 10) * 4, draw(2, 21, 10, seed=1) * 4
    teacher[0, 0, 0] = 2000.0  # probabilities of nought
    found = []
    for ops in (TRITON, PLAIN):
        leaf = student.clone().requires_grad_()
        losses = ops.divergence(leaf, teacher, temperature)
        found.append((losses.detach(), torch.autograd.grad((losses * draw(2, 21, seed=3)).sum(), leaf)[0]))
    for a, b in zip(*found, strict=True):
        assert_close_norm(a, b, 1e-12)


def test_what_a_student_sees_at_its_step() -> None:
    targets, key = draw(3, 700, 10), torch.tensor([2**61 + 5])
    for step, first in ((0, 0), (4, 0), (1, 7)):
        number, found, folded = TRITON.chunk(torch.tensor([step]), torch.tensor([first]), key, targets)
        assert number.tolist() == [(step + first) % 3]
        assert torch.equal(found, targets[number])
        assert torch.equal(folded, fold(key, step + first))
        for at in (step, torch.tensor([step])):
            plain = PLAIN.chunk(at, torch.tensor([first]), key, targets)
            assert all(map(torch.equal, (number, found, folded), plain))


@pytest.mark.parametrize("classes", [2, 10, 37])
def test_cross_entropy(classes: int) -> None:
    logits, targets = draw(K, 21, classes) * 8, torch.randint(0, classes, (K, 21))
    found = []
    for ops in (TRITON, PLAIN):
        leaf = logits.clone().requires_grad_()
        losses = ops.cross_entropy(leaf, targets)
        found.append((losses.detach(), torch.autograd.grad((losses * draw(K, 21, seed=3)).sum(), leaf)[0]))
    for a, b in zip(*found, strict=True):
        assert_close_norm(a, b, 1e-12)


def test_what_lanes_see_at_their_steps() -> None:
    index, row = torch.randint(0, 50, (2, 7, 5)), torch.tensor([1, 0, 1, 0])
    keys, targets = torch.tensor([4, -9, 2**62, 1]), torch.randint(0, 10, (50,))
    lanes, steps = torch.tensor([3, 0, 2]), torch.tensor([0, 6, 3])
    samples, found, folded = TRITON.client_batch(index, row, keys, targets, lanes, steps)
    plain = PLAIN.client_batch(index, row, keys, targets, lanes, steps)
    assert all(map(torch.equal, (samples, found, folded), plain))
    assert torch.equal(samples, index[row[lanes], steps])
    assert torch.equal(found, targets[samples])
    assert torch.equal(folded, fold(keys[lanes], steps))
    assert all(torch.equal(folded[i], fold(keys[k : k + 1], s)[0]) for i, (k, s) in enumerate([(3, 0), (0, 6), (2, 3)]))


def test_labels_of_several_kinds_and_steps_on_the_host_take_plain_torch() -> None:
    index, row, keys, lanes = torch.zeros(1, 2, 3).long(), torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1])
    several = torch.randint(0, 2, (5, 4)).float()
    for targets, step in ((several, torch.tensor([1])), (several[:, 0].long(), 1)):
        found = TRITON.client_batch(index, row, keys, targets, lanes, step)
        assert all(map(torch.equal, found, PLAIN.client_batch(index, row, keys, targets, lanes, step)))


def test_a_slot_is_taken_once() -> None:
    """A norm used twice: the first use writes into the slots, autograd has the gradients of the second."""
    x, weight, bias = draw(K * 4, 5, 3, 3), *(draw(K, 5, seed=s).requires_grad_() for s in (1, 2))
    places = {"weight": torch.zeros(K, 5).double(), "bias": torch.zeros(K, 5).double()}
    grads = []
    for ops, slots in ((PLAIN, None), (TRITON, Slots({"weight": weight, "bias": bias}, places))):
        layer = use(LaneBatchNorm(5).double(), ops, "batch", slots)
        tensors = {"weight": weight, "bias": bias, "running_mean": torch.zeros(K, 5).double()}
        tensors["running_var"] = torch.ones(K, 5).double()
        y = functional_call(layer, tensors, (x,)) + functional_call(layer, tensors, (2 * x,)).square()
        grads.append(torch.autograd.grad((y * y.detach().cos()).sum(), (weight, bias)))
    for name, plain, further in zip(places, *grads, strict=True):
        assert float(places[name].norm()) > 0
        assert_close_norm(places[name] + further, plain, 1e-12)


@pytest.mark.parametrize("trained", ["adapter", "full"])
def test_a_step_writes_the_gradients_of_all_kernels_into_their_slots(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every parameter would cost a copy, and nothing but the time would tell."""
    made: list[Slots] = []
    monkeypatch.setattr(gradient, "Slots", lambda *given: made.append(Slots(*given)) or made[-1])
    monkeypatch.setattr(conv, "choose", lambda *shape: "columns")
    given = problem("resnet8", trained, "residual" if trained == "adapter" else None)
    given.model.context.ops, state, seen = TRITON, flattened(given.start), list[tuple[str, Tensor]]()
    real = LaneModel.__call__

    def call(self: LaneModel, state: State, *args: Any, **more: Any) -> Tensor:
        seen.extend(state.params.items())
        return real(self, state, *args, **more)

    monkeypatch.setattr(LaneModel, "__call__", call)
    batch = given.batches(0, torch.arange(4))
    with torch.enable_grad():
        gradient.Gradient(given.model, batch, cross_entropy, torch.arange(4), Options())(state)
    products = {n for n in state.params if n.startswith("fc.") or "downsample.0." in n}  # plain torch has these
    assert {n for n, p in seen if made[0].is_free(p)} == products
