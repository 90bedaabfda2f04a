"""Many small arrays as one on the wire.

Flower 1.41 makes two objects of every array of a message and moves each by a signed request of its own, which costs its
SuperLink 10 to 20 ms: a state of a hundred tensors took most of a minute a round. So the arrays of a record travel as
one, names and all, and are taken apart again before anybody looks at them:

    length of the list, 8 bytes, little-endian | the list as JSON: [name, dtype, shape, stype, bytes] each | the arrays

It is done at the very edge (`app` and `link`); what is asked for, answered and checked are named arrays.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict

STYPE = "perada.bundle"
_KEY = "bundle"
_LENGTH = 8


def bundle(content: RecordDict) -> RecordDict:
    """The same message with the arrays of each record in one."""
    return _changed(content, _joined)


def unbundle(content: RecordDict) -> RecordDict:
    """The inverse. What is no bundle is left as it is: whoever wants named arrays of it will refuse it."""
    return _changed(content, _parted)


def _changed(content: RecordDict, change: Any) -> RecordDict:
    return RecordDict({k: change(r) if isinstance(r, ArrayRecord) else r for k, r in content.items()})


def _joined(record: ArrayRecord) -> ArrayRecord:
    listed = [[name, a.dtype, list(a.shape), a.stype, len(a.data)] for name, a in record.items()]
    head = json.dumps(listed).encode()
    data = b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(a.data for a in record.values())])
    return ArrayRecord({_KEY: Array("uint8", (len(data),), STYPE, data)})


def _parted(record: ArrayRecord) -> ArrayRecord:
    if list(record) != [_KEY] or record[_KEY].stype != STYPE:
        return record
    data = memoryview(record[_KEY].data)
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    found: dict[str, Array] = {}
    try:
        for name, dtype, shape, stype, size in json.loads(bytes(data[_LENGTH:at])):
            words = all(isinstance(word, str) for word in (name, dtype, stype))
            whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, size))
            if not words or not whole or name in found or at + size > len(data):
                return record
            found[name] = Array(dtype, tuple(shape), stype, bytes(data[at : at + size]))
            at += size
    except (ValueError, TypeError, RecursionError):
        return record
    return ArrayRecord(found) if at == len(data) else record
