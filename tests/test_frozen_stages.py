"""Frozen stages: a network that is cut there computes the same, and what it makes of images is kept and is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from small import everything, plain
from torch import Tensor, nn

import perada
from perada import Experiment, adapt
from perada.adapters import Residual
from perada.client.scores import logits_of, logits_on, own_logits
from perada.data import Federation, features
from perada.errors import InputError
from perada.lanes import Prefix, gather, repeat
from perada.methods import REGISTRY, make_method
from perada.models import backbone
from perada.report.facts import Holdings, _sizes

WHERE = "project_conv$"  # narrow layers: small adapters, quick tests


def settled(net: nn.Module, seed: int = 0) -> nn.Module:
    """The network with statistics of no special value."""
    draw = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.copy_(torch.randn(layer.num_features, generator=draw) * 0.1)
            layer.running_var.copy_(torch.rand(layer.num_features, generator=draw) + 0.5)
    return net


def network(name: str = "resnet8") -> nn.Module:
    return settled(backbone(name, 3, seed=1).net)


def sites(size: int = 12, each: int = 20, **options: Any) -> Federation:
    rng = np.random.default_rng(0)
    made = {n: (rng.integers(0, 256, (each, size, size, 3), np.uint8), rng.integers(0, 3, each)) for n in "abc"}
    return Federation.from_arrays(made, val=0.2, **options)


def experiment(fed: Federation, start: str = "layer3", net: nn.Module | None = None, **more: Any) -> Experiment:
    net = network() if net is None else net
    method = more.pop("method", None) or perada.methods.PerAda()
    settings = {"train": perada.Train(rounds=2, epochs=1, batch=8), "distill": perada.Distill(steps=0), **more}
    return Experiment(net, fed, method, adapt_from=start, **settings)


def without(sim: Experiment) -> Experiment:
    """The same experiment, which computes the frozen stages whenever it needs them."""
    assert sim.federation.features is not None
    sim.federation = sim.cohort.federation = dataclasses.replace(sim.federation, features=None)
    if sim.public:
        sim.public.features = None
    return sim


@pytest.mark.parametrize(
    ("name", "start"),
    [("resnet8", "layer1"), ("resnet8", "layer3"), ("efficientnet_lite0", "stage2"), ("efficientnet_lite0", "top")],
)
def test_a_cut_network_computes_the_same(name: str, start: str) -> None:
    net = network(name).eval()
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = adapt(net, adapter=None, trained="full", start=start)
    with torch.no_grad():
        wanted = net(x)
        plain = model.plain(model.initial())
        assert_close_norm(plain(x), wanted, 1e-5)
        assert_close_norm(model(model.initial(), x)[0], wanted, 1e-5)
    tensors = plain.state_dict()
    assert_same_tensors(tensors, {n: t for n, t in net.state_dict().items() if n in tensors})
    assert tensors.keys() >= {n for n in net.state_dict() if not n.endswith("num_batches_tracked")}


def test_frozen_stages_are_in_no_state() -> None:
    state = adapt(network(), start="layer3").initial()
    names = [*state.params, *state.buffers]
    assert names
    assert all(n.startswith(("layer3.", "fc.")) for n in names)
    whole = adapt(network()).initial()
    assert set(names) == {n for n in [*whole.params, *whole.buffers] if n.startswith(("layer3.", "fc."))}
    full = adapt(network(), adapter=None, trained="full", start="layer3").initial().params
    assert {n.partition(".")[0] for n in full} == {"layer3", "fc"}, "frozen for methods of full models, too"


def test_an_images_features_depend_on_it_alone() -> None:
    module = network("efficientnet_lite0")
    prefix = Prefix.cut(module, "stage5")
    images = torch.randn(37, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    all_ = prefix(images).values
    for index in ([3], [36, 0, 5], list(range(20, 37)), list(range(36, -1, -1))):
        assert torch.equal(prefix(images[index]).values, all_[index])


def distilling() -> dict[str, Any]:
    public = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (40, 3, 12, 12), np.uint8))
    return {"public": public, "distill": perada.Distill(steps=3, batch=16, lr=1e-3, candidates=(1,))}


@pytest.mark.parametrize("net", ["resnet8", "efficientnet_lite0"])
def test_kept_equals_computed_bit_for_bit(net: str) -> None:
    start, adapter = ("layer2", Residual()) if net == "resnet8" else ("stage6", Residual(where=WHERE))
    kept = experiment(sites(), start, network(net), adapter=adapter, **distilling())
    computed = without(experiment(sites(), start, network(net), adapter=adapter, **distilling()))
    rows = [list(kept.rounds()), list(computed.rounds())]
    assert_same_tensors(everything(kept), everything(computed))
    assert [r.scores for r in rows[0]] == [r.scores for r in rows[1]]
    lanes, fed = kept.personal(), kept.federation
    index = np.array([5, 3, 41, 3])
    on = logits_on(kept.model, lanes, fed, index)
    assert torch.equal(on, logits_on(kept.model, lanes, computed.federation, index))
    assert torch.equal(on, logits_of(kept.model, lanes, fed, fed.images[index]))
    indices = [c.test for c in fed.clients]
    pairs = zip(
        own_logits(kept.model, lanes, fed, indices),
        own_logits(kept.model, lanes, computed.federation, indices),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_kept_equals_the_network_itself() -> None:
    """The table, beside torch's own modules one after the other."""
    net, sim = network().eval(), experiment(sites(), "layer2")
    table = sim.federation.features
    assert table is not None
    with torch.no_grad():
        x = sim.federation.prepare(sim.federation.images[7:8], torch.float32)
        wanted = net.layer1(net.bn1(net.conv1(x)).relu())
    assert_close_norm(table.values[7:8], wanted, 1e-6)


def test_many_images_are_kept_in_a_file_that_the_next_run_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path))
    monkeypatch.setattr(features, "FILE_FROM", 60)

    def values(fed: Federation, net: nn.Module | None = None, start: str = "layer2") -> Tensor:
        table = experiment(fed, start, net).federation.features
        assert table is not None
        return table.values.clone()

    def files() -> list[Path]:
        return sorted(tmp_path.glob("features-*"))

    first = values(sites())
    (file,) = files()
    stamp = file.stat().st_mtime_ns
    assert file.stat().st_size == 4 * first.numel() + 4
    assert torch.equal(values(sites()), first)
    assert (files(), file.stat().st_mtime_ns) == ([file], stamp), "read, not made again"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert torch.equal(values(sites()), first), "a damaged file is made again"
    other = sites()
    other.images[0, 0, 0, 0] ^= 1
    changed = [values(other), values(sites(size=16)), values(dataclasses.replace(sites(), mean=(0.1, 0.2, 0.3)))]
    changed += [values(sites(), settled(network(), seed=2)), values(sites(), start="layer3")]
    assert len(files()) == 1 + len(changed), "another pixel, size, normalisation, network or stage has its own file"
    assert not torch.equal(changed[0][0], first[0])
    assert torch.equal(changed[0][1:], first[1:])
    monkeypatch.setattr(features, "free_memory", lambda device: 0)
    assert torch.equal(values(sites()), first), "a file needs no memory"


def test_what_fits_nowhere_is_computed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = experiment(sites())
    list(wanted.rounds())
    monkeypatch.setattr(features, "free_memory", lambda device: features.SHARE * 1000)
    sim = experiment(sites())
    assert sim.federation.features is None
    list(sim.rounds())
    assert_same_tensors(everything(sim), everything(wanted))


def test_random_views_are_not_kept() -> None:
    sim = experiment(sites(augment="flip"))
    assert sim.federation.features is None
    list(sim.rounds())
    said = list[str]()
    perada.config.build(
        perada.config.resolve("digits", {"model.adapt_from": "layer3", "data.augment": "flip"}), say=said.append
    )
    line = "what the frozen stages before layer3 make of each image is not kept: DataOptions.augment makes new images"
    assert any(text.startswith(line) for text in said)


def test_features_of_another_network_are_refused() -> None:
    sim, other = experiment(sites()), experiment(sites(), net=settled(network(), seed=2))
    with pytest.raises(ValueError, match="these features are another network's"):
        logits_on(other.model, other.personal(), sim.federation, np.array([0]))


@pytest.mark.parametrize(
    ("net", "start", "said"),
    [
        (network, "layer9", "unknown stage 'layer9': did you mean 'layer"),
        (network, "conv1", "unknown stage 'conv1'"),  # it has nothing before it
        (lambda: Opaque(), "fc", "this network does not name its stages"),
    ],
)
def test_wrong_stages_are_refused_in_one_line(net: Callable[[], nn.Module], start: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        adapt(net(), adapter=None, trained="full", start=start)
    assert "\n" not in str(error.value)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(x).mean((2, 3)))


class Crossed(nn.Module):
    """Its stages are not what its forward does."""

    stages = "a", "b", "c"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.fc = (*(nn.Conv2d(3, 3, 1) for _ in "abc"), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.a(x) + self.b(x) + self.c(x)).mean((2, 3)))


def test_stages_that_are_no_chain_are_refused() -> None:
    with pytest.raises(InputError, match="the stages before 'b' are not where this network begins") as error:
        experiment(sites(), "b", Crossed(), method=perada.methods.FedAvg())
    assert "\n" not in str(error.value)


def test_a_chain_of_ones_own_has_stages() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    net = nn.Sequential(nn.Conv2d(3, 4, 3), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    sim = experiment(sites(), "1", net)
    assert sim.federation.features is not None
    assert sim.federation.features.values.shape[1:] == (4, 10, 10)
    list(sim.rounds())


# EfficientNet-Lite as lanes


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_trains_it(name: str) -> None:
    sim = experiment(
        sites(each=12),
        "stage7",
        network("efficientnet_lite0"),
        method=make_method(name, {}),
        adapter=Residual(where=WHERE),
        **(distilling() if make_method(name, {}).parts.distils else {}),
        train=perada.Train(rounds=1, epochs=1, batch=4),
    )
    row = list(sim.rounds())[-1]
    assert row.scores["local_test"].mean is not None
    assert row.failed == ()


@pytest.mark.parametrize("start", ["", "stage6"])
def test_folded_is_one_lane_at_a_time(start: str) -> None:
    """Three lanes in one batch, and each alone, in float64: logits, gradients and statistics."""
    net = network("efficientnet_lite0").double()
    model = adapt(net, adapter=Residual(dropout=0.3, std=0.1), start=start).to("cpu", torch.float64)
    draw = torch.Generator().manual_seed(0)
    lanes = repeat(model.initial(), 3).map(lambda t: t + 0.01 * torch.rand(t.shape, generator=draw, dtype=t.dtype))
    x = torch.randn(3 * 4, 3, 32, 32, generator=draw, dtype=torch.float64)
    keys = torch.tensor([11, 12, 13])

    def run(state: Any, images: Tensor, keys: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        params = {n: p.clone().requires_grad_() for n, p in state.params.items()}
        mine = dataclasses.replace(state, params=params, buffers={n: b.clone() for n, b in state.buffers.items()})
        logits = model(mine, images, norm="train", dropout=keys)
        slopes = torch.autograd.grad(logits.square().sum(), list(params.values()))
        return logits.detach(), list(slopes), list(mine.buffers.values())

    together = run(lanes, x, keys)
    for k in range(3):
        alone = run(gather(lanes, [k]), x[4 * k : 4 * k + 4], keys[k : k + 1])
        assert_close_norm(together[0][k : k + 1], alone[0], 1e-9)
        for a, b in zip(together[2], alone[2], strict=True):
            assert_close_norm(a[k], b[0], 1e-9)
        # A bias that a later norm subtracts has no gradient but rounding noise: each is measured by them all.
        whole = torch.stack([g.norm() for g in alone[1]]).norm()
        assert all((a[k] - b[0]).norm() <= 1e-9 * whole for a, b in zip(together[1], alone[1], strict=True))


@pytest.mark.parametrize("method", ["perada", "fedavg"])
def test_a_run_that_is_not_done_is_counted_with_its_frozen_stages(tmp_path: Path, method: str) -> None:
    settings = {
        "model.backbone": "efficientnet_lite0",
        "model.weights": "random",
        "model.adapt_from": "auto",
        "data.normalise": "auto",
        "distill.steps": 0,
        "train.rounds": 1,
    }
    run = perada.train("digits", method=method, set=plain(settings), out=tmp_path / "run")
    assert _sizes(run, {}, Holdings.of(run.federation)) == run.summary["parameters"]
