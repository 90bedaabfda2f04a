"""How much of a reply is fetched from the SuperLink, before Flower reads any of it.

A reply is a tree of objects. Flower's own reader fetches all of them, however many and however large, and makes Python
objects of every entry. A hostile reply of a few megabytes kept it busy for a quarter of a minute.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .messages import Refused

WORDS = 65_536  # the most bytes of an object that is not a part of an array
OBJECTS = 8  # of a reply without an array, and one more than it needs: message, record, words, numbers, array
CHUNK = 4_000_000  # bytes; Flower cuts arrays into parts of 5 MiB
PATIENCE = 1.0  # seconds for an object that its site has announced and not sent

Fetch = Callable[[str], bytes]


@contextmanager
def bounded(state: int) -> Iterator[None]:
    """Makes Flower refuse to fetch a reply whose state takes more than so many bytes, or that has too many objects."""
    grid: Any = importlib.import_module("flwr.superlink.grid.http_grid")
    real = grid.pull_objects

    def pull_objects(object_ids: Sequence[str], pull_object_fn: Fetch) -> dict[str, bytes]:
        if len(object_ids) > OBJECTS + state // CHUNK:
            raise Refused(f"it has {len(object_ids)} parts")
        return dict(real(object_ids, _counted(pull_object_fn, state), max_time=PATIENCE))

    grid.pull_objects = pull_objects
    try:
        yield
    finally:
        grid.pull_objects = real


def _counted(fetch: Fetch, state: int) -> Fetch:
    """Returns a function that fetches an object, and refuses it when the reply has become too large."""
    lock, left = threading.Lock(), state + OBJECTS * WORDS

    def one(object_id: str) -> bytes:
        nonlocal left
        content = fetch(object_id)
        with lock:
            left -= len(content)
            too_much = left < 0
        if too_much or (len(content) > WORDS and not content.startswith(b"ArrayChunk ")):
            raise Refused(f"it is larger than its answer can be ({state + WORDS} bytes)")
        return content

    return one
