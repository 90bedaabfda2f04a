"""Every lane-aware layer, K lanes folded, against torch's own layer one lane at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm
from torch import Tensor, nn
from torch.func import functional_call

from perada.lanes import (
    LaneBatchNorm,
    LaneConv2d,
    ResidualAdapter,
    fold,
    key_of,
)
from perada.lanes.conv import choose, lane_conv1x1, lane_conv2d, uses_columns
from perada.lanes.layers import LaneDropout, LaneLayerNorm, LaneLinear, recast
from perada.lanes.random import keep_mask

from .oracle import PlainAdapter

K, B = 3, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lanes_of(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """K different values for each of these parameters."""
    held = dict(module.named_parameters())
    return {n: 1.0 + draw(K, *held[n].shape, seed=i) for i, n in enumerate(names)}


def assert_lanes(
    folded: nn.Module,
    plain: nn.Module,
    x: Tensor,
    params: dict[str, Tensor],
    buffers: dict[str, Tensor] | None = None,
    call: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
) -> None:
    """Output, gradients of input and parameters, and buffers; `plain` gets lane k's tensors in turn."""
    buffers = buffers or {}
    start = {n: b.clone() for n, b in buffers.items()}
    leaf = x.detach().requires_grad_()
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    call = call or (lambda x, tensors: functional_call(folded, tensors, (x,)))
    y = call(leaf, {**leaves, **buffers})
    into = draw(*y.shape, seed=99)
    grads = torch.autograd.grad((y * into).sum(), [leaf, *leaves.values()])
    for k, (a, g) in enumerate(zip(x.chunk(K), into.chunk(K), strict=True)):
        plain.load_state_dict({n: t[k] for n, t in {**params, **start}.items()}, strict=False)
        a = a.detach().requires_grad_()
        own = dict(plain.named_parameters())
        out = plain(a)
        wanted = torch.autograd.grad((out * g).sum(), [a, *(own[n] for n in params)])
        assert_close_norm(y.chunk(K)[k], out, what="output")
        assert_close_norm(grads[0].chunk(K)[k], wanted[0], what="gradient of the input")
        for name, ours, theirs in zip(params, grads[1:], wanted[1:], strict=True):
            assert_close_norm(ours[k], theirs, what=f"gradient of {name}")
        for name, ours in buffers.items():
            assert_close_norm(ours[k], plain.get_buffer(name), what=name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("middle", [(), (7,), (2, 3)])
def test_linear(bias: bool, middle: tuple[int, ...]) -> None:
    plain = nn.Linear(5, 6, bias=bias, dtype=torch.float64)
    params = lanes_of(plain, ["weight", "bias"] if bias else ["weight"])
    assert_lanes(recast(plain, LaneLinear), plain, draw(K * B, *middle, 5), params)


def test_linear_with_a_frozen_bias() -> None:
    # B equals the number of outputs on purpose: a bias broadcast along the wrong axis would go unnoticed.
    plain = nn.Linear(5, B, dtype=torch.float64)
    nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(0))
    assert_lanes(recast(plain, LaneLinear), plain, draw(K * B, 5), lanes_of(plain, ["weight"]))


def test_linear_with_a_frozen_weight() -> None:
    plain = nn.Linear(5, 6, dtype=torch.float64)
    assert_lanes(recast(plain, LaneLinear), plain, draw(K * B, 5), lanes_of(plain, ["bias"]))


CONVS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": (3, 2), "padding": (2, 0), "stride": (1, 3)},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": (2, 3), "padding": (1, 3), "stride": (2, 1), "dilation": (1, 2)},
    {"kernel_size": 1, "padding": 1},  # not the 1×1 short cut: padding makes a border
]


@pytest.mark.parametrize("kernel", ["loop", "grouped", "unfold"])
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_conv_kernels(kernel: str, shape: dict[str, int]) -> None:
    plain = nn.Conv2d(3, 4, bias=False, dtype=torch.float64, **shape)

    def call(x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        return lane_conv2d(x, tensors["weight"], plain.stride, plain.padding, plain.dilation, kernel)

    x = draw(K * B, 3, 7, 8)
    assert_lanes(plain, plain, x, lanes_of(plain, ["weight"]), call=call)
    assert_lanes(plain, plain, x.to(memory_format=torch.channels_last), lanes_of(plain, ["weight"]), call=call)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [4, 9])  # one size for each kernel the CPU's table chooses
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_conv(shape: dict[str, int], size: int, bias: bool) -> None:
    plain = nn.Conv2d(3, 4, bias=bias, dtype=torch.float64, **shape)
    params = lanes_of(plain, ["weight", "bias"] if bias else ["weight"])
    assert_lanes(LaneConv2d.of(plain), plain, draw(K * B, 3, size, size), params)


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_conv_1x1(stride: int, memory: torch.memory_format) -> None:
    plain = nn.Conv2d(3, 4, 1, stride, bias=False, dtype=torch.float64)
    x = draw(K * B, 3, 5, 6).to(memory_format=memory)
    assert_lanes(LaneConv2d.of(plain), plain, x, lanes_of(plain, ["weight"]))


def test_conv_1x1_keeps_channels_last() -> None:
    # Otherwise every adapter on a GPU would copy its activations twice.
    x = draw(K * B, 3, 5, 6).to(memory_format=torch.channels_last)
    assert lane_conv1x1(x, draw(K, 4, 3)).is_contiguous(memory_format=torch.channels_last)
    assert lane_conv1x1(x.contiguous(), draw(K, 4, 3)).is_contiguous()


def test_conv_with_a_frozen_bias() -> None:
    plain = nn.Conv2d(3, K, 3, dtype=torch.float64)  # K outputs: again the shape that hides a wrong axis
    assert_lanes(LaneConv2d.of(plain), plain, draw(K * B, 3, 5, 5), lanes_of(plain, ["weight"]))


def test_conv_with_a_frozen_weight() -> None:
    plain = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    assert_lanes(LaneConv2d.of(plain), plain, draw(K * B, 3, 5, 5), lanes_of(plain, ["bias"]))


@pytest.mark.parametrize("own", [["weight", "bias"], ["weight"], ["bias"]], ids=str)
@pytest.mark.parametrize(
    "how",
    [{"groups": 2}, {"groups": 4}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}],
    ids=str,
)
def test_conv_with_groups_or_uncommon_padding(how: dict[str, Any], own: list[str]) -> None:
    plain = nn.Conv2d(4, 8, 3, **how, dtype=torch.float64)
    assert_lanes(LaneConv2d.of(plain), plain, draw(K * B, 4, 5, 5), lanes_of(plain, own))


def test_the_table_names_a_kernel_for_any_size() -> None:
    sizes = [(3, 64), (64, 64), (512, 512)]
    kernels = {choose(d, *io, pixels) for d in ("cpu", "cuda") for io in sizes for pixels in (1, 4, 16, 64, 12544)}
    assert kernels == {"loop", "grouped", "unfold", "columns"}


@pytest.mark.parametrize(
    ("images", "size", "kernel", "stride", "wanted"),
    [(64, 32, 7, 2, "columns"), (64, 34, 7, 2, "grouped"), (8192, 8, 3, 1, "columns"), (1 << 18, 8, 3, 1, "grouped")],
)
def test_columns_are_taken_where_they_fit(images: int, size: int, kernel: int, stride: int, wanted: str) -> None:
    """By the pixels of the output, of which a stem has a quarter, and by bytes; nothing is computed."""
    channels = 3 if kernel == 7 else 64
    x = torch.empty(images, channels, size, size, dtype=torch.bfloat16, device="meta")
    layer = LaneConv2d.of(nn.Conv2d(channels, 64, kernel, stride, kernel // 2, device="meta"))
    layer.weight = nn.Parameter(torch.empty(2, 64, channels, kernel, kernel, dtype=torch.bfloat16, device="meta"))
    taken = uses_columns(x, layer, choose("cuda", channels, 64, (size // stride) ** 2))
    assert ("columns" if taken else "grouped") == wanted


def statistics(channels: int) -> dict[str, Tensor]:
    return {
        "running_mean": draw(K, channels, seed=7),
        "running_var": 0.5 + draw(K, channels, seed=8).square(),
    }


@pytest.mark.parametrize("mode", ["train", "running"])
@pytest.mark.parametrize("trained", [["weight", "bias"], ["weight"], ["bias"], []], ids=str)
@pytest.mark.parametrize("space", [(5, 6), (5,), ()], ids=str)
def test_batch_norm(mode: str, trained: list[str], space: tuple[int, ...]) -> None:
    # With a frozen affine the statistics are still a lane's own: the downsample norms of SPEC section 4.
    kind = nn.BatchNorm2d if len(space) == 2 else nn.BatchNorm1d
    plain = kind(4, eps=1e-4, momentum=0.3, dtype=torch.float64).train(mode == "train")
    nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(5))
    nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(6))
    folded = LaneBatchNorm.of(plain)
    folded.context.norm = mode
    x = 2.0 + 3.0 * draw(K * B, 4, *space)
    assert_lanes(folded, plain, x, lanes_of(plain, trained), statistics(4))


def test_batch_norm_with_the_batchs_statistics_alone() -> None:
    plain = nn.BatchNorm2d(4, dtype=torch.float64).train()
    folded = LaneBatchNorm.of(plain)
    folded.context.norm = "batch"
    params, held = lanes_of(plain, ["weight", "bias"]), statistics(4)
    before = {n: b.clone() for n, b in held.items()}

    def call(x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        return functional_call(folded, {**tensors, **held}, (x,))

    assert_lanes(folded, plain, draw(K * B, 4, 5, 6), params, call=call)
    assert all(torch.equal(held[n], before[n]) for n in held), "mode 'batch' keeps nothing"


def test_batch_norm_channels_last() -> None:
    plain = nn.BatchNorm2d(4, dtype=torch.float64).train()
    x = draw(K * B, 4, 5, 6).to(memory_format=torch.channels_last)
    assert_lanes(LaneBatchNorm.of(plain), plain, x, lanes_of(plain, ["weight", "bias"]), statistics(4))


def test_batch_norm_without_lanes_is_torchs() -> None:
    plain = nn.BatchNorm2d(4, momentum=0.2, dtype=torch.float64)
    copy = nn.BatchNorm2d(4, momentum=0.2, dtype=torch.float64)
    single, x = LaneBatchNorm.of(copy), draw(B, 4, 3, 3)
    assert torch.equal(single.train()(x), plain.train()(x))
    assert torch.equal(single.eval()(x), plain.eval()(x))
    assert torch.equal(single.running_var, plain.running_var)


def test_batch_norm_of_another_kind_is_refused() -> None:
    for layer in (
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, momentum=None),
    ):
        with pytest.raises(ValueError, match="no lane-aware form"):
            LaneBatchNorm.of(layer)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "outer"), [((5,), ()), ((5,), (7,)), ((3, 5), ()), ((3, 5), (2,))], ids=str)
def test_layer_norm(shape: tuple[int, ...], outer: tuple[int, ...], bias: bool) -> None:
    plain = nn.LayerNorm(shape, eps=1e-4, bias=bias, dtype=torch.float64)
    params = lanes_of(plain, ["weight", "bias"] if bias else ["weight"])
    assert_lanes(recast(plain, LaneLayerNorm), plain, draw(K * B, *outer, *shape), params)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_layer_norm_half_frozen(trained: str) -> None:
    plain = nn.LayerNorm(5, dtype=torch.float64)
    assert_lanes(recast(plain, LaneLayerNorm), plain, draw(K * B, 5), lanes_of(plain, [trained]))


@pytest.mark.parametrize(
    "plain",
    [nn.Linear(5, 6), nn.Conv2d(5, 6, 3), nn.LayerNorm(5), nn.Linear(5, 6, bias=False)],
    ids=lambda m: type(m).__name__,
)
def test_a_frozen_layer_is_torchs(plain: nn.Module) -> None:
    kinds = {nn.Linear: LaneLinear, nn.LayerNorm: LaneLayerNorm}
    layer = LaneConv2d.of(plain) if isinstance(plain, nn.Conv2d) else recast(plain, kinds[type(plain)])
    x = torch.randn(2, 5, 5, 5)
    assert torch.equal(layer(x), plain(x))


def test_dropout_is_each_lanes_mask() -> None:
    layer, p = LaneDropout(0.3, "somewhere").double(), 0.3
    x, keys = draw(K * B, 5, 2, 3), torch.tensor([key_of(0, k) for k in range(K)])
    leaf = x.clone().requires_grad_()
    y = functional_call(layer, {"key": keys}, (leaf,))
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    for k in range(K):
        # torch's dropout is x · mask / (1 − p); only where the mask comes from is ours.
        mask = keep_mask(fold(keys[k : k + 1], layer.salt), B * 30, p).view(B, 5, 2, 3).double()
        assert_close_norm(y.chunk(K)[k], x.chunk(K)[k] * mask / (1 - p))
        assert_close_norm(grad.chunk(K)[k], mask / (1 - p))


def test_dropout_without_lanes_is_torchs() -> None:
    layer, x = LaneDropout(0.3), torch.randn(50, 4)
    assert torch.equal(layer.eval()(x), x)
    torch.manual_seed(3)
    ours = layer.train()(x)
    torch.manual_seed(3)
    assert torch.equal(ours, F.dropout(x, 0.3))


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_dropout_rate_is_checked(p: float) -> None:
    with pytest.raises(ValueError, match="dropout must be in"):
        LaneDropout(p)


@pytest.mark.parametrize("mode", ["train", "running"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_residual_adapter(mode: str, memory: torch.memory_format) -> None:
    plain = PlainAdapter(4).double().train(mode == "train")
    folded = ResidualAdapter(4, 0.0, "a").double()
    folded.norm.context.norm = mode
    params = lanes_of(plain, ["norm.weight", "norm.bias", "conv.weight"])
    buffers = {f"norm.{n}": b for n, b in statistics(4).items()}
    assert_lanes(folded, plain, draw(K * B, 4, 5, 6).to(memory_format=memory), params, buffers)
