"""What a hostile reply costs the server: no more than a valid one, and no time."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from flower.wire import raw
from perada.flower.bounds import PATIENCE
from perada.flower.link import Link
from perada.flower.messages import Refused, most_bytes, pack, read_numbers, read_reply, unpack
from perada.flower.settings import Rounds
from perada.lanes import State

STATE = State({"fc.weight": torch.zeros(1, 500_000)}, {"bn.running_var": torch.ones(1, 64)})  # 2 MB
MANY, SOME = 914_000, 20_000  # Flower takes minutes to make larger records


def header(count: int) -> bytes:
    """An array in the safetensors format that lists many empty tensors."""
    listed = {f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}
    text = json.dumps(listed, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def reply(**records: Any) -> RecordDict:
    words = ConfigRecord({"federation": "f", "run": "r", "round": 1, "kind": "train", "site": "west"})
    words.update({"error": "", "needs": "", "failed": False})
    return RecordDict({"about": words, **records})


HOSTILE: dict[str, Callable[[], RecordDict]] = {
    "numbers": lambda: reply(numbers=MetricRecord({f"{n}": 1.0 for n in range(SOME)})),
    "a long list": lambda: reply(numbers=MetricRecord({"loss": [1.0] * MANY})),
    "words": lambda: reply(more=ConfigRecord({f"{n}": "" for n in range(SOME)})),
    "a long word": lambda: reply(more=ConfigRecord({"error": "x" * 20_000_000})),
    "tensors": lambda: reply(state=raw(header(5 * SOME))),
    "a large tensor": lambda: reply(state=pack(State({"a": torch.zeros(1, 20_000_000)}))),
    "arrays": lambda: reply(state=ArrayRecord({f"{n}": Array(np.zeros(0)) for n in range(1000)})),
    "records": lambda: reply(**{f"{n}": MetricRecord() for n in range(1000)}),
}


class SuperLink:
    """Answers a grid's questions about one message. late: it has announced the objects and not sent them."""

    def __init__(self, content: RecordDict, late: bool = False) -> None:
        message = Message(content, 1, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {key: bytes(one.deflate()) for key, one in get_all_nested_objects(message).items()}
        self.tree, self.late = get_object_tree(message), late
        self.proto = message_to_proto(remove_content_from_message(message))

    def PullMessages(self, request: Any) -> Any:
        return PullAppMessagesResponse(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=not self.late, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None: ...


def pull(link: SuperLink, most: int) -> Message | str:
    """What the server gets of a reply, through Flower's own grid."""
    grid = HttpGrid(token="t")
    grid._client, grid._run = link, SimpleNamespace(run_id=1)  # type: ignore[assignment]
    ((answer, _),) = Link(grid, ["west"], Rounds(), lambda *words: None)._pull({"m": "west"}, lambda site: most)
    return answer


def cost(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """Returns the result of a call, its seconds, and the most bytes that it had in use."""
    tracemalloc.start()
    start = time.process_time()
    try:
        return work(), time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_a_hostile_reply_costs_no_more_than_a_valid_one(kind: str) -> None:
    most = most_bytes(STATE)
    valid = SuperLink(reply(state=pack(STATE), numbers=MetricRecord({"loss": 1.0})))
    good, _, usual = cost(lambda: pull(valid, most))
    assert isinstance(good, Message)
    assert unpack(good.content, STATE).params["fc.weight"].shape == (1, 500_000)
    hostile = SuperLink(HOSTILE[kind]())
    answer, seconds, bytes_used = cost(lambda: pull(hostile, most))
    assert isinstance(answer, str)
    assert "parts" in answer or "larger than its answer can be" in answer
    assert seconds < 1  # of two, on a loaded machine and with tracing
    assert bytes_used < 2 * usual


@pytest.mark.parametrize("kind", [k for k in HOSTILE if k not in ("words", "a long word", "records")])
def test_what_was_fetched_is_bounded_before_it_is_read(kind: str) -> None:
    """Also where a transport has no bounds of its own, such as Flower's simulation."""
    content = HOSTILE[kind]()

    def read() -> None:
        with pytest.raises(Refused):
            (read_numbers(content), unpack(content, STATE))

    _, seconds, bytes_used = cost(read)
    assert seconds < 0.5
    assert bytes_used < 2 * STATE.bytes_per_lane()


def test_a_message_with_too_many_words_is_refused() -> None:
    content = reply()
    content["about"].update({f"{n}": "" for n in range(101)})
    with pytest.raises(Refused, match="it has 109 words"):
        read_reply(content)


def test_an_announced_reply_that_never_comes_is_not_waited_for() -> None:
    start = time.monotonic()
    answer = pull(SuperLink(reply(), late=True), most_bytes(STATE))
    assert isinstance(answer, Message)
    assert answer.has_error()
    assert time.monotonic() - start < PATIENCE + 4
