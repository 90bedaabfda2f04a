"""Many arrays as one: the same back, and what is damaged is left for others to refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from perada.flower.bundle import STYPE, bundle, unbundle


def content() -> RecordDict:
    arrays = {"a": Array(np.arange(6, dtype=np.float32).reshape(1, 2, 3)), "b/ü": Array(np.zeros((0, 4), np.float64))}
    return RecordDict({"state": ArrayRecord(arrays), "about": ConfigRecord({"round": 3})})


def test_there_and_back() -> None:
    sent = bundle(content())
    assert list(sent["state"]) == ["bundle"]
    found, wanted = unbundle(sent)["state"], content()["state"]
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape, found[name].stype) == (array.dtype, array.shape, array.stype)
        assert found[name].data == array.data
    assert dict(unbundle(sent)["about"]) == {"round": 3}


def test_nothing_there_and_back() -> None:
    assert list(unbundle(bundle(RecordDict({"state": ArrayRecord()})))["state"]) == []


def damaged(listed: object, data: bytes = b"12345678") -> bytes:
    head = json.dumps(listed).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"123",
        (2**60).to_bytes(8, "little") + b"[]",
        damaged([["a", "float32", [2], "numpy.ndarray", 9]]),
        damaged([["a", "float32", [2], "numpy.ndarray", 7]]),  # a byte that belongs to nobody
        damaged([["a", "float32", [2], "numpy.ndarray", -8]]),
        damaged([["a", "float32", [-2], "numpy.ndarray", 8]]),
        damaged([["a", "float32", "2", "numpy.ndarray", 8]]),
        damaged([["a", "float32", [2], "numpy.ndarray", True]]),
        damaged([[3, "float32", [2], "numpy.ndarray", 8]]),
        damaged([["a", "x", [1], "s", 4], ["a", "x", [1], "s", 4]]),
        damaged([["a"]]),
        damaged({"a": 1}),
        damaged(7),
        damaged("[" * 10),
        len(b"[" * 100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_what_is_no_bundle_is_left_as_it_is(data: bytes) -> None:
    sent = RecordDict({"state": ArrayRecord({"bundle": Array("uint8", (len(data),), STYPE, data)})})
    assert list(unbundle(sent)["state"]) == ["bundle"]
