"""Who waits for whom where kernels run on a second stream; the streams here only write down what they are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes import ops_for
from perada.lanes.ops import PLAIN
from perada.lanes.ops.triton import launch as module

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Thing:
    """A tensor on a GPU that is not here."""

    device = GPU

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} is read on {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    now = [Stream("main", told)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(module, "_streams", {})
    monkeypatch.setattr(module, "_read", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return told


def test_side_by_side(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(name: str) -> Any:
        def run(x: Thing) -> Thing:
            log.append(f"{name}, beside: {module.is_side_stream(GPU)}")
            return Thing(name, log)

        return run

    x: Any = Thing("x", log)
    assert [t.name for t in ops_for(GPU).side_by_side(layer("shortcut"), layer("inner"), x)] == ["shortcut", "inner"]
    assert log == [
        "x is read on side",
        "side waits for main",
        "shortcut, beside: True",
        "inner, beside: False",
        "main waits for side",
        "shortcut is read on main",
    ]
    log.clear()
    module.join(PLAIN, GPU)  # nothing is open: a stream that is not being recorded must not be waited for
    assert log == []


def test_where_kernels_are_only_compiled_there_is_one_stream(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "only_compiling", lambda: True)
    with module.on_side_stream(Thing("x", log)):
        assert not module.is_side_stream(GPU)
    module.join(PLAIN, GPU)
    assert log == []


def test_on_a_cpu_too() -> None:
    x = torch.ones(2)
    with module.on_side_stream(x):
        assert not module.is_side_stream(x.device)
    module.join(PLAIN, x.device)
    first, second = ops_for(x.device).side_by_side(lambda t: t + 1, lambda t: t + 2, x)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [3.0, 3.0])
