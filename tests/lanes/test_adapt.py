"""adapt() on somebody else's module: convolutions in blocks, batch norm, dropout, a linear head."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_norm, assert_same_tensors
from torch import Tensor, nn

from perada import adapt
from perada.adapters import Residual
from perada.errors import InputError
from perada.lanes import Batch, Group, LaneModel, Options, fold, gather, sgd
from perada.models.resnet import resnet

from . import oracle
from .problems import cross_entropy, noisy

K, B = 3, 6


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.conv(x))))


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(4, 5), nn.MaxPool2d(2), Block(5, 6))
        self.middle = nn.Linear(6, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x))).mean((2, 3))
        return self.head(torch.relu(self.middle(x)))


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, 3, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def foreign() -> Foreign:
    """In eval mode, with running statistics that are not a new norm's zeros and ones."""
    torch.manual_seed(0)
    net = Foreign().double().train()
    with torch.no_grad():
        for batch in images(5, 16):
            net(3.0 * batch)
    return net.eval()


def lane_model(**how: object) -> LaneModel:
    return adapt(foreign(), **how).to("cpu", torch.float64)


def batches(step: int, lanes: Tensor) -> Batch:
    k = len(lanes)
    x = torch.stack([images(K, 9, B)[i, step] for i in lanes.tolist()])
    targets = (torch.arange(B) + lanes[:, None] + step) % 4
    return Batch(x.flatten(0, 1), targets, torch.ones(k, B, dtype=torch.float64), fold(lanes, step))


def test_the_module_itself_is_not_changed() -> None:
    net = foreign()
    net.train()
    before, kinds = copy.deepcopy(net.state_dict()), [type(m) for m in net.modules()]
    model = adapt(net).to("cpu", torch.float64)
    sgd(model, model.initial(K), batches, cross_entropy, [0.1] * K, [3] * K)
    assert_same_tensors(net.state_dict(), before)
    assert [type(m) for m in net.modules()] == kinds
    assert all(p.requires_grad for p in net.parameters())
    assert all(m.training for m in net.modules())


def adapted(model: LaneModel) -> set[str]:
    """The convolutions that got an adapter."""
    return {n.partition(".adapter.")[0] for n in model.initial().params if ".adapter." in n}


def test_the_default_rule_adapts_the_convolutions_of_blocks() -> None:
    assert adapted(adapt(foreign())) == {"blocks.0.conv", "blocks.2.conv"}
    assert adapted(adapt(foreign(), adapter=Residual(where=r"^stem"))) == {"stem"}


def test_the_adapter_group() -> None:
    # adapters, the blocks' norm affines and the head; every norm's statistics travel along.
    adapters = [f"blocks.{i}.conv.adapter.{t}" for i in (0, 2) for t in ("norm.weight", "norm.bias", "conv.weight")]
    norms = [f"blocks.{i}.norm.{t}" for i in (0, 2) for t in ("weight", "bias")]
    start = adapt(foreign()).initial()
    assert set(start.params) == {*adapters, *norms, "head.weight", "head.bias"}
    owners = [f"blocks.{i}.{n}" for i in (0, 2) for n in ("norm", "conv.adapter.norm")]
    assert set(start.buffers) == {f"{n}.{b}" for n in owners for b in ("running_mean", "running_var")}


def test_a_new_adapter_is_the_identity() -> None:
    net, model, x = foreign(), lane_model(), images(B)
    logits = model(model.initial(), x)[0]
    assert 0.0 < (logits - net(x)).abs().max() < 1e-3
    bare = adapt(net, adapter=None)
    assert_close_norm(bare(bare.initial(), x)[0], net(x), 1e-12)


def test_an_adapters_norm_starts_from_the_following_norm() -> None:
    start = lane_model().initial().buffers
    for i in (0, 2):
        for b in ("running_mean", "running_var"):
            assert_close_norm(start[f"blocks.{i}.conv.adapter.norm.{b}"], start[f"blocks.{i}.norm.{b}"], 1e-6)
    assert bool(start["blocks.0.conv.adapter.norm.running_mean"].any())


def test_an_adapter_takes_the_dtype_of_its_convolution() -> None:
    assert {p.dtype for p in adapt(foreign()).module.parameters()} == {torch.float64}


def test_adapters_are_drawn_from_the_seed() -> None:
    a, b, c = (adapt(foreign(), seed=s).initial().params["blocks.0.conv.adapter.conv.weight"] for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert float(a.std()) == pytest.approx(1e-4, rel=0.5)


def test_training_leaves_the_frozen_tensors_alone() -> None:
    model = lane_model()
    before = copy.deepcopy(model.module.state_dict())
    start = model.initial(K)
    end = sgd(model, start, batches, cross_entropy, [0.1] * K, [9] * K, options=Options(momentum=0.9)).state
    assert_same_tensors(model.module.state_dict(), before)
    moved = {n for n in end.params if not torch.equal(end.params[n], start.params[n])}
    assert moved == end.params.keys() - model.inert
    assert all(not torch.equal(end.buffers[n], start.buffers[n]) for n in end.buffers)


@pytest.mark.parametrize("trained", ["full", ["stem.weight", "stem.bias", "middle.weight", "middle.bias"]])
def test_a_foreign_module_trains_like_the_oracle(trained: str | list[str]) -> None:
    net = foreign()
    for block in (net.blocks[0], net.blocks[2]):
        block.drop.p = 0.0
    model = adapt(net, adapter=None, trained=trained)
    start = noisy(model.initial(K))
    end = sgd(model, start, batches, cross_entropy, [0.1] * K, [9, 2, 5]).state
    for k, steps in enumerate([9, 2, 5]):
        data = [(b.images, b.targets[0], b.weights[0]) for b in (batches(i, torch.tensor([k])) for i in range(steps))]
        lane = {n: t[k] for n, t in {**start.params, **start.buffers}.items()}
        wanted, _ = oracle.train(net, lane, start.params, data, oracle.Sgd(0.1))
        for name, t in {**end.params, **end.buffers}.items():
            assert_close_norm(t[k], wanted[name], what=name)


def test_the_modules_own_dropout_is_each_lanes() -> None:
    model = lane_model(adapter=None)
    start, batch = model.initial(2), batches(0, torch.tensor([0, 0]))
    one, two = model(start, batch.images, dropout=torch.tensor([11, 12]))
    assert not torch.equal(one, two), "two keys, two masks"
    one, two = model(start, batch.images, dropout=torch.tensor([11, 11]))
    assert torch.equal(one, two)
    assert torch.equal(*model(start, batch.images))


def test_other_dropouts_are_not_silently_off() -> None:
    # The module runs in eval mode: a dropout that adapt() does not know would never drop anything.
    net = nn.Sequential(foreign().stem, nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(4 * 36, 2).double())
    with contextlib.suppress(InputError):  # refusing it would be as good
        model = adapt(net, adapter=None, trained="output")
        x, start = images(B), model.initial()
        assert not torch.equal(model(start, x, dropout=torch.tensor([1])), model(start, x))


class Functional(nn.Module):
    """A network whose dropout is a function call."""

    def __init__(self, dropout: Callable[..., Tensor]) -> None:
        super().__init__()
        self.dropout, self.hidden, self.head = dropout, nn.Linear(3, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.hidden(x.mean((2, 3)))), 0.5, self.training)
        return self.head(self.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("inplace", [False, True])
def test_functional_dropout_is_each_lanes(inplace: bool) -> None:
    net = Functional(functools.partial(F.dropout, inplace=inplace)).double()
    model = adapt(net, adapter=None, trained="output").to("cpu", torch.float64)
    start, x, keys = model.initial(2), images(B).repeat(2, 1, 1, 1), torch.tensor([11, 12])
    one, two = model(start, x, dropout=keys)
    assert not torch.equal(one, two), "two keys, two masks"
    alone = model(gather(start, [1]), x[:B], dropout=keys[1:])[0]
    assert_close_norm(alone, two, what="the same draws alone")
    assert torch.equal(*model(start, x)), "no dropout without keys"
    before = torch.random.get_rng_state()
    model(start, x, dropout=keys)
    assert torch.equal(torch.random.get_rng_state(), before), "no draws from torch's own generator"


def test_functional_dropout_drops_its_share() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.ones(len(x), 4096), 0.3, self.training) * self.scale.weight.mean().abs()

    model = adapt(Wide(), adapter=None, trained="full", head="scale")
    out = model(model.initial(), torch.zeros(2, 3, 4, 4), dropout=torch.tensor([1]))
    kept = out != 0
    assert 0.65 < kept.double().mean() < 0.75
    assert not torch.equal(kept[0, 0], kept[0, 1])


@pytest.mark.parametrize("dropout", [F.dropout2d, F.alpha_dropout])
def test_other_functional_dropouts_are_refused(dropout: Callable[..., Tensor]) -> None:
    model = adapt(Functional(dropout).double(), adapter=None, trained="output")
    with pytest.raises(InputError, match=f"F.{dropout.__name__} has no lane-aware form: use F.dropout, or p=0"):
        model(model.initial(), images(B), dropout=torch.tensor([11]))


def test_plain_is_the_lane_as_an_ordinary_module() -> None:
    model = lane_model()
    state = sgd(model, noisy(model.initial(K)), batches, cross_entropy, [0.1] * K, [4] * K).state
    x = images(B)
    together = model(state, x.repeat(K, 1, 1, 1))
    for k in range(K):
        plain = model.plain(gather(state, [k]))
        assert isinstance(plain, nn.Module)
        assert not any(m.training for m in plain.modules())
        assert_close_norm(plain(x), together[k])
        # Stand-alone: neither writing to it nor reading it in train mode reaches the lane model.
        before = copy.deepcopy(model.module.state_dict())
        plain.train()(x)
        assert_same_tensors(model.module.state_dict(), before)


class WithNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), norm, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 2)


def test_a_trained_layer_without_a_lane_aware_form_is_named() -> None:
    with pytest.raises(InputError, match=r"norm: a trained PReLU"):
        adapt(WithNorm(nn.PReLU()), adapter=None, trained="full")
    with pytest.raises(InputError, match=r"attention: attention has a lane-aware form only with batch_first=True"):
        adapt(WithAttention(), adapter=None, trained="full")
    # Frozen it treats samples one by one, and needs no change.
    model = adapt(WithNorm(nn.PReLU()), adapter=None, trained="output")
    assert model(model.initial(2), images(4).float()).shape == (2, 2, 2)


def test_a_batch_norm_without_a_lane_aware_form_is_named() -> None:
    for norm in (nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4, affine=False)):
        with pytest.raises(InputError, match="norm"):
            adapt(WithNorm(norm), adapter=Residual(where="conv"))


@pytest.mark.parametrize("norm", [nn.LayerNorm((6, 6)), nn.GroupNorm(2, 4)], ids=str)
def test_a_trained_norm_of_samples_takes_lanes(norm: nn.Module) -> None:
    model = adapt(WithNorm(norm), adapter=None, trained="full")
    state, x = noisy(model.initial(2)), images(4).float()
    together = model(state, x)
    for k in range(2):
        assert_close_norm(together[k], model.plain(gather(state, [k]))(x.chunk(2)[k]), 1e-5)


def test_only_what_a_following_norm_cancels_is_inert() -> None:
    # Without a batch norm behind it an adapter's norm bias has a gradient like any other: it must be trained.
    model = adapt(WithNorm(nn.GroupNorm(2, 4)), trained="everything_but_the_norm", groups=but_the_norm)
    model.to("cpu", torch.float64)
    leaves = {n: t.requires_grad_() for n, t in model.initial().params.items()}
    state = type(model.initial())(leaves, model.initial().buffers)
    bias = "conv.adapter.norm.bias"
    (grad,) = torch.autograd.grad(model(state, images(B), norm="train")[0, :, 0].sum(), leaves[bias])
    assert grad.norm() > 1e-9
    assert bias not in model.inert


def but_the_norm(module: nn.Module) -> dict[str, Group]:
    names = frozenset(n for n, _ in module.named_parameters() if not n.startswith("norm."))
    return {"everything_but_the_norm": Group(names, frozenset())}


def test_half_a_layer_can_be_trained() -> None:
    # `trained` takes parameter names, so a head whose bias alone is trained is a legitimate wish.
    x, net = images(2 * 4), foreign()
    for name in ("head.bias", "head.weight", "stem.bias", "blocks.0.norm.bias"):
        model = adapt(net, adapter=None, trained=[name])
        state = noisy(model.initial(2), 1.0)
        together = model(state, x)
        for k in range(2):
            assert_close_norm(together[k], model.plain(gather(state, [k]))(x.chunk(2)[k]), what=name)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"trained": "haed"}, "no parameter group 'haed'; it has .*adapter"),
        ({"trained": ["head.weight", "tail.weight"]}, "no such parameters: tail.weight"),
        ({"adapter": "lara"}, "unknown adapter 'lara': did you mean 'lora'"),
        ({"adapter": 3}, "int is not an adapter"),
        ({"adapter": Residual(where="nowhere")}, "no convolution of this network takes an adapter"),
    ],
)
def test_impossible_wishes(how: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        adapt(foreign(), **how)


def test_a_module_without_a_linear_layer_needs_a_head() -> None:
    with pytest.raises(InputError, match="name the prediction layer"):
        adapt(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3))))
    model = adapt(foreign(), head="middle")
    assert model.group("output").params == {"middle.weight", "middle.bias"}
    assert "head.weight" not in model.initial().params


def test_an_unknown_group_of_a_model() -> None:
    with pytest.raises(InputError, match="no parameter group 'tail'"):
        lane_model().group("tail")


def test_whether_a_state_is_a_whole_model() -> None:
    model = lane_model()
    start = model.initial()
    assert model.holds(start)
    assert not model.holds(start.only(start.params, []))
    assert not model.holds(start.only(["head.weight"], start.buffers))


def test_a_resnet_of_torchvisions_layout_has_the_papers_groups() -> None:
    """SPEC, section 4: with nothing said about groups, since it is how somebody else's ResNet comes."""
    model = adapt(resnet("resnet18", 10))
    size = {n: p.numel() for n, p in model.module.named_parameters()}
    sizes = {name: sum(size[n] for n in group.params) for name, group in model.groups.items()}
    assert sum(p.numel() for p in model.initial().params.values()) == sizes["adapter"] == 1_413_258
    wanted = {"full": 11_181_642, "batch_norm": 7_808, "input": 4_731_968, "output": 5_130}
    wanted["adapter_modules"] = 1_400_320
    assert {n: sizes[n] for n in wanted} == wanted
    assert not any(".downsample." in n for n in model.initial().params)
    assert "input" not in adapt(foreign()).groups


def test_only_in_a_resnet_is_a_downsample_a_shortcut() -> None:
    """In other networks it is a part of the main path, and its norm is trained like any other."""

    class Other(nn.Sequential):
        def __init__(self) -> None:
            super().__init__()
            self.downsample = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 2))

    assert {"downsample.1.weight", "downsample.1.bias"} <= adapt(Other()).groups["adapter"].params
    net = resnet("resnet18", 10)
    net.scale = nn.Parameter(torch.ones(1))  # type: ignore[assignment]
    assert "scale" in adapt(net).groups["full"].params
