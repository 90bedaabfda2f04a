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
from perada.flower.link import Link
from perada.flower.messages import Request, message, most_bytes, pack, read_numbers, read_reply, unpack
from perada.flower.settings import Rounds
from perada.lanes import State
from perada.server.checks import Refused

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
    """Answers a grid's questions about one message, which it announces once.

    late: it has not sent the objects, or all but the first of them.
    """

    def __init__(self, content: RecordDict, late: bool = False) -> None:
        self.announced, self.fetched = False, 0
        message = Message(content, 1, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {key: bytes(one.deflate()) for key, one in get_all_nested_objects(message).items()}
        self.tree, self.late = get_object_tree(message), late
        self.proto = message_to_proto(remove_content_from_message(message))

    def PullMessages(self, request: Any) -> Any:
        if self.announced:
            return PullAppMessagesResponse()
        self.announced = True
        return PullAppMessagesResponse(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        self.fetched += 1
        content, first = self.objects[request.object_id], request.object_id == self.tree.object_id
        return SimpleNamespace(object_found=True, object_available=first or not self.late, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None: ...


def linked(link: Any, **rounds: Any) -> tuple[Link, list[tuple[str, ...]]]:
    """The server's end of Flower's own grid, and what it tells of the sites."""
    grid, told = HttpGrid(token="t"), list[tuple[str, ...]]()
    grid._client, grid._run = link, SimpleNamespace(run_id=1)  # type: ignore[assignment]
    return Link(grid, ["north", "west"], Rounds(**rounds), lambda *words: told.append(words)), told


def pull(link: SuperLink, most: int) -> Message | str:
    """What the server gets of a reply."""
    ((answer, _),) = linked(link)[0]._pull({"m": "west"}, lambda site: most)
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


class TwoSites:
    """A SuperLink with a reply of each of two sites."""

    def __init__(self, **of: SuperLink) -> None:
        self.of = of

    def PullMessages(self, request: Any) -> Any:
        return self.of[request.message_ids[0]].PullMessages(request)

    def PullObject(self, request: Any) -> Any:
        have = [one for one in self.of.values() if request.object_id in one.objects]  # equal parts are one object
        return min(have, key=lambda one: one.late).PullObject(request)

    def ConfirmMessageReceived(self, request: Any) -> None: ...


def test_a_reply_that_comes_long_after_it_was_announced_is_accepted() -> None:
    """Flower announces a reply once; here many looks pass until its parts are there."""
    half = SuperLink(reply(state=pack(STATE)), late=True)
    link, _ = linked(half)
    questions = {"m": "west"}
    start = time.monotonic()
    assert [link._pull(questions, lambda site: most_bytes(STATE)) for _ in range(20)] == [[]] * 20
    assert time.monotonic() - start < 1  # no look waits
    half.late = False
    ((answer, site),) = link._pull(questions, lambda site: most_bytes(STATE))
    assert isinstance(answer, Message)
    assert unpack(answer.content, STATE).params["fc.weight"].shape == (1, 500_000)
    assert (site, questions) == ("west", {})


def test_a_half_sent_reply_holds_nobody_up_and_ends_with_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    half, whole = SuperLink(reply(state=pack(STATE)), late=True), SuperLink(reply(numbers=MetricRecord({"loss": 1.0})))
    link, told = linked(TwoSites(north=half, west=whole), poll_s=0.01)
    link.nodes = {"north": 1, "west": 2}
    monkeypatch.setattr(link, "_push", lambda to, within: [(name, node) for name, node in link.nodes.items()])
    at: list[float] = []
    real = whole.PullObject
    monkeypatch.setattr(whole, "PullObject", lambda request: (at.append(time.monotonic()), real(request))[1])
    start = time.monotonic()
    request = message(Request("f", "r", 1, "train"))
    answers = link.exchange(dict.fromkeys(link.nodes, request), 0.6, most_bytes(STATE))
    assert list(answers) == ["west"]
    assert 0.5 < time.monotonic() - start < 3
    assert max(at) - start < 0.4
    assert [words[:2] for words in told] == [("north", "silent")]
    half.late = False  # and when it comes at last, it is late
    link._report_late()
    assert told[-1] == ("north", "refused", "late answer to train of round 1")
    assert not link._late


def test_what_comes_in_parts_is_bounded_as_a_whole() -> None:
    """A large reply whose parts come one by one, and one that nobody waits for any more."""
    large = SuperLink(HOSTILE["a large tensor"](), late=True)
    link, _ = linked(large)
    questions = {"m": "west"}
    most = 100_000_000
    assert link._pull(questions, lambda site: most) == []
    fetched = large.fetched
    large.late = False
    link._inbox._coming["m"]._left = 10_000_000  # as if the rest had come before
    ((answer, _),) = link._pull(questions, lambda site: most)
    assert "larger than its answer can be" in str(answer)
    assert large.fetched > fetched
    link._inbox.keep(())
    assert not link._inbox._coming
