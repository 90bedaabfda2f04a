"""Which operations a model gets, and what its layers share."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from perada.lanes import LaneBatchNorm, LaneConv2d, bytes_per_lane, ops, ops_for
from perada.lanes.layers import Context, Slots
from perada.lanes.ops import PLAIN, Ops, plain

from .problems import problem

CPU = torch.device("cpu")


class Counting(Ops):
    """Plain torch that writes down what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def norm(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.calls.append("norm")
        return super().norm(*args, **kwargs)  # type: ignore[arg-type]

    def side_by_side(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("side by side")
        return super().side_by_side(*args)  # type: ignore[arg-type]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Stands in for Triton, on the CPU."""
    found = Counting()
    monkeypatch.setattr(ops, "_triton", lambda: found)
    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    return found


def test_a_cpu_gets_plain_torch() -> None:
    assert ops_for(CPU) is PLAIN
    assert not PLAIN.fast
    assert problem().model.context.ops is PLAIN


@pytest.mark.parametrize("forced", ["1", ""])
def test_a_gpu_gets_triton_unless_plain_torch_is_forced(forced: str) -> None:
    pytest.importorskip("triton")
    code = "import torch; from perada.lanes import ops_for; print(ops_for(torch.device('cuda')).fast)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PERADA_PLAIN": forced}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(not forced), done.stderr


def test_a_model_chooses_its_operations_when_it_is_put_on_a_device(counting: Counting) -> None:
    model = problem().model
    assert model.context.ops is counting
    layers = [m for m in model.module.modules() if isinstance(m, (LaneBatchNorm, LaneConv2d))]
    assert len(layers) > 10
    assert all(layer.context is model.context for layer in layers)
    model(model.initial(2), torch.zeros(4, 3, 8, 8).double())
    assert {"norm", "side by side"} == set(counting.calls)


def test_plain_torch_for_a_while(counting: Counting) -> None:
    model = problem().model
    with plain(model.context):
        assert ops_for(CPU) is PLAIN
        assert model.context.ops is PLAIN
        with plain():
            assert ops_for(CPU).side_by_side(torch.neg, torch.abs, torch.ones(1)) == (-1, 1)
        assert ops_for(CPU) is PLAIN
    bytes_per_lane(model, (8, 8), 4)
    assert counting.calls == []
    assert ops_for(CPU) is model.context.ops is counting


def test_after_a_pass_the_context_is_empty() -> None:
    """A slot holds memory, and a recording must give it back; so must a pass that fails."""
    model = problem().model
    state = model.initial(1)
    weight = state.params["fc.weight"]
    slots = Slots({"fc.weight": weight}, {"fc.weight": torch.zeros_like(weight)})
    with torch.enable_grad():
        model(state, torch.zeros(2, 3, 8, 8).double(), norm="train", slots=slots)
    assert slots.is_free(weight)
    assert model.context.norm is None
    assert not model.context.slots.is_free(weight)
    with pytest.raises(RuntimeError):
        model(state, torch.zeros(2, 5, 8, 8).double(), norm="batch", slots=slots)
    assert model.context.norm is None


def test_a_plain_module_is_plain_torch_with_a_context_of_its_own(counting: Counting) -> None:
    model = problem().model
    state = model.initial(1)
    model(state, torch.zeros(2, 3, 8, 8).double(), norm="batch")
    net, calls = model.plain(state), len(counting.calls)
    contexts = {id(m.context): m.context for m in net.modules() if isinstance(getattr(m, "context", None), Context)}
    assert [c.ops for c in contexts.values()] == [PLAIN]
    assert isinstance(copy.deepcopy(net), nn.Module)
    x = torch.randn(3, 3, 8, 8).double()
    with torch.no_grad():
        assert not torch.equal(net.train()(x), net.eval()(x)), "train and eval decide how it normalises"
        assert len(counting.calls) - calls <= 6, "only the blocks' branches ask for the device's operations"
