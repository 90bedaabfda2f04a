"""How a reply is fetched from the SuperLink: as it comes, and no more of it than its answer can be.

A site announces a reply first, and sends its parts ("objects") afterwards. Flower hands out an announcement once. Its
own reader then waits for the parts, and everybody else with it; and it fetches all of them, however many and however
large, and makes Python objects of every entry. Here an announcement is kept, and each look fetches what is there.
"""

import threading
from collections.abc import Callable, Collection
from typing import Any

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects

from ..server.checks import Refused

WORDS = 65_536  # the most bytes of an object that is not a part of an array
OBJECTS = 8  # of a reply without an array, and one more than it needs: message, record, words, numbers, array
CHUNK = 4_000_000  # bytes; Flower cuts arrays into parts of 5 MiB

Fetch = Callable[[str], bytes]


class Coming:
    """A reply that its site has announced, and what has come of it."""

    def __init__(self, message: str, parts: list[str], fetch: Fetch, state: int) -> None:
        if len(parts) > OBJECTS + state // CHUNK:
            raise Refused(f"it has {len(parts)} parts")
        self.message, self.parts, self.state = message, parts, state
        self._fetch, self._left, self._lock = fetch, state + OBJECTS * WORDS, threading.Lock()
        self._come: dict[str, bytes] = {}

    def contents(self) -> dict[str, bytes] | None:
        """Returns the parts when all have come. Waits for none, and refuses a reply that has become too large."""
        try:
            return pull_objects(self.parts, self._part, max_tries_per_object=1)
        except ObjectPullError:  # a part is not there, or never will be: then the site is silent
            return None

    def _part(self, part: str) -> bytes:
        if part in self._come:
            return self._come[part]
        content = self._fetch(part)
        with self._lock:
            self._left -= len(content)
            too_much = self._left < 0
        if too_much or (len(content) > WORDS and not content.startswith(b"ArrayChunk ")):
            raise Refused(f"it is larger than its answer can be ({self.state + WORDS} bytes)")
        self._come[part] = content
        return content


class Inbox:
    """The replies of a grid. One over HTTP has bounds; others, such as that of Flower's simulation, are local."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._coming: dict[str, Coming] = {}  # by the message that was sent

    def look(self, sent: str, state: int) -> Message | None:
        """Returns the reply to a message when all of it has come. state: the most bytes of a state in it."""
        client: Any = getattr(self.grid, "_runtime_client", None)
        if client is None:
            return next(iter(self.grid.pull_messages([sent])), None)
        coming = self._coming.get(sent) or self._announced(client, sent, state)
        if coming is None or (contents := coming.contents()) is None:
            return None
        request = {"node": self._node, "run_id": self._run, "message_object_id": coming.message}
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(**request))
        message = inflate_object_from_contents(coming.message, contents)
        if not isinstance(message, Message):
            raise Refused("it is not a message")
        message.metadata.__dict__["_message_id"] = coming.message
        return message

    def _announced(self, client: Any, sent: str, state: int) -> Coming | None:
        found = client.PullMessages(PullAppMessagesRequest(message_ids=[sent]))
        if not found.messages_list:
            return None
        fetch = make_pull_object_fn_protobuf(client.PullObject, self._node, self._run)
        parts = [tree.object_id for tree in iterate_object_tree(found.message_object_trees[0])]
        self._coming[sent] = Coming(found.messages_list[0].metadata.message_id, parts, fetch, state)
        return self._coming[sent]

    @property
    def _node(self) -> Any:
        return getattr(self.grid, "node", None)

    @property
    def _run(self) -> int:
        return int(getattr(getattr(self.grid, "_run", None), "run_id", 0))

    def forget(self, sent: str) -> None:
        """Drops what has come of a reply: it was read or refused."""
        self._coming.pop(sent, None)

    def keep(self, sent: Collection[str]) -> None:
        """Drops what has come of all other replies, for which nobody waits any more."""
        self._coming = {message: coming for message, coming in self._coming.items() if message in sent}
