"""Packs all arrays of a record into one, for the wire.

Flower 1.41 makes two objects of every array and moves each by a signed request, which costs its SuperLink 10 to 20 ms.
A state of a hundred tensors took most of a minute per round. So the arrays of a record travel as one:

    length of the list, 8 bytes, little-endian | the list as JSON: [name, dtype, shape, stype, bytes] each | the arrays

Only the two ends of the wire (`app` and `link`) do this; all other code sees named arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from flwr.app import Array, ArrayRecord, RecordDict

STYPE = "perada.bundle"
_KEY = "bundle"
_LENGTH = 8


def bundle(content: RecordDict) -> RecordDict:
    """Returns the same message with the arrays of each record packed into one."""
    return _on_arrays(content, _pack)


def unbundle(content: RecordDict) -> RecordDict:
    """Reverses `bundle`. A record that is not a bundle stays as it is: the reader of its arrays will refuse it."""
    return _on_arrays(content, _unpack)


def _on_arrays(content: RecordDict, change: Callable[[ArrayRecord], ArrayRecord]) -> RecordDict:
    return RecordDict({k: change(r) if isinstance(r, ArrayRecord) else r for k, r in content.items()})


def _pack(record: ArrayRecord) -> ArrayRecord:
    listed = [[name, a.dtype, list(a.shape), a.stype, len(a.data)] for name, a in record.items()]
    head = json.dumps(listed).encode()
    data = b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(a.data for a in record.values())])
    return ArrayRecord({_KEY: Array("uint8", (len(data),), STYPE, data)})


def _unpack(record: ArrayRecord) -> ArrayRecord:
    if list(record) != [_KEY] or record[_KEY].stype != STYPE:
        return record
    data = memoryview(record[_KEY].data)
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    arrays: dict[str, Array] = {}
    try:
        for name, dtype, shape, stype, size in json.loads(bytes(data[_LENGTH:at])):
            texts = all(isinstance(word, str) for word in (name, dtype, stype))
            sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, size))
            if not texts or not sizes or name in arrays or at + size > len(data):
                return record
            arrays[name] = Array(dtype, tuple(shape), stype, bytes(data[at : at + size]))
            at += size
    except (ValueError, TypeError, RecursionError):
        return record
    return ArrayRecord(arrays) if at == len(data) else record
