"""What crosses the network: states as named arrays, and a few words about what they are for.

A message holds an ArrayRecord `state` (`params/NAME`, `buffers/NAME`, each `[lanes, ...]`), a ConfigRecord `about`
and, in a reply, a MetricRecord `numbers`. An array is what numpy's `.npy` format says, little-endian, in its own
dtype. Nothing here is pickled, and nothing is read before its names, shapes and dtypes are those expected.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..lanes import LaneModel, State
from ..methods import Method, declared_upload

STYPE = "numpy.ndarray"  # Flower's name for the .npy format


class Refused(Exception):
    """A message that is not believed; the text says why, in words that may be told to anybody."""


def one_line(text: str | None) -> str:
    """Words from outside, fit for a log: one short line of what can be printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in text or "").split())[:200]


@dataclass(frozen=True)
class About:
    """What a message is for. A reply repeats the first four, so that a late one cannot pass for another's."""

    federation: str
    run: str
    round: int
    kind: str  # hello, weights, train, score, evaluate or finish
    plan: str = ""  # `Plan.text`
    start: str = ""  # the run whose personal state a new run goes on from,
    start_round: int = 0  # as it was when this round of it began
    evaluate: bool = False  # whether the site's scores before (finish: after) the work are asked for
    within: float = 0.0  # seconds until the server stops waiting

    def record(self) -> ConfigRecord:
        return ConfigRecord(dict(self.__dict__))

    def answers(self, other: About) -> bool:
        mine, asked = ((a.federation, a.run, a.round, a.kind) for a in (self, other))
        return mine == asked


@dataclass(frozen=True)
class Reply:
    """What a site says beside its state."""

    about: About
    site: str
    error: str = ""  # why it did not do what was asked
    needs: str = ""  # "weights": it has not got the server's backbone yet
    failed: bool = False  # its training stopped being finite; the state is the last finite one


def _text(record: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = record.get(key, default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise Refused(f"{key} is not {kind.__name__}")
    return value


def read_about(content: RecordDict) -> About:
    """The `about` record of any message."""
    record = _record(content, "about", ConfigRecord)
    known = {"plan": "", "start": "", "start_round": 0, "evaluate": False, "within": 0.0}
    words = {k: _text(record, k, type(v), v) for k, v in known.items()}
    names = {k: _text(record, k, kind, None) for k, kind in (("federation", str), ("run", str), ("kind", str))}
    return About(**names, round=_text(record, "round", int, None), **words)


def read_reply(content: RecordDict) -> Reply:
    record = _record(content, "about", ConfigRecord)
    said = {k: _text(record, k, type(v), v) for k, v in {"error": "", "needs": "", "failed": False}.items()}
    return Reply(read_about(content), _text(record, "site", str, None), **said)


def request(about: About, state: State | None = None) -> RecordDict:
    content = RecordDict({"about": about.record()})
    if state is not None:
        content["state"] = pack(state)
    return content


def answer(
    reply: Reply, state: State | None = None, numbers: Mapping[str, float | list[float]] | None = None
) -> RecordDict:
    """A site's reply. It does not send the plan back."""
    a = reply.about
    words: dict[str, Any] = {"federation": a.federation, "run": a.run, "round": a.round, "kind": a.kind}
    words |= {"site": reply.site, "error": reply.error, "needs": reply.needs, "failed": reply.failed}
    content = RecordDict({"about": ConfigRecord(words), "numbers": MetricRecord(dict(numbers or {}))})
    if state is not None:
        content["state"] = pack(state)
    return content


def _record(content: RecordDict, key: str, kind: Any) -> Any:
    found = content.get(key)
    if not isinstance(found, kind):
        raise Refused(f"there is no record {key!r} in it")
    return found


# States


def flat(state: State) -> dict[str, Tensor]:
    """Every tensor under the name it has on a wire and a disk."""
    held = {f"params/{n}": t for n, t in state.params.items()}
    return held | {f"buffers/{n}": t for n, t in state.buffers.items()}


def unflat(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `flat`."""
    params = {n.removeprefix("params/"): t for n, t in tensors.items() if n.startswith("params/")}
    return State(params, {n.removeprefix("buffers/"): t for n, t in tensors.items() if n.startswith("buffers/")})


def _little(tensor: Tensor) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(tensor.detach().cpu().numpy())
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def pack(state: State) -> ArrayRecord:
    """A state as named arrays."""
    return ArrayRecord({name: Array(_little(tensor)) for name, tensor in flat(state).items()})


def unpack(content: RecordDict, like: State, lanes: int = 1, finite: bool = True) -> State:
    """The state of a message, if it holds exactly the names, shapes and dtypes of `like`, and finite numbers.

    `like` has one lane, its tensors say on which device the result is to be.
    """
    wanted = flat(like)
    record = content.get("state", None if wanted else ArrayRecord())
    if not isinstance(record, ArrayRecord):
        raise Refused("there are no arrays in it")
    missing, more = wanted.keys() - record.keys(), record.keys() - wanted.keys()
    if missing:
        raise Refused(f"{_some(missing)} missing")
    if more:
        raise Refused(f"{_some(more)} not shared by this method")
    found = {n: _tensor(n, record[n], t, lanes, finite) for n, t in wanted.items()}
    return unflat(found)


def _some(names: Iterable[str]) -> str:
    """`params/a (and 3 more) is`: a name from outside is shown shortened."""
    first, *rest = sorted(names)
    return f"{first[:80]!r}" + (f" and {len(rest)} more are" if rest else " is")


def _tensor(name: str, array: Array, like: Tensor, lanes: int, finite: bool) -> Tensor:
    """One array, read only where its header says what was expected: a lie about its size costs no memory."""
    shape, dtype = (lanes, *like.shape[1:]), np.dtype(str(like.dtype).removeprefix("torch.")).newbyteorder("<")
    if array.stype != STYPE:
        raise Refused(f"{name} is no plain array")
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError
        found, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:  # numpy reads a header as Python's literals: there is no end of what may go wrong
        raise Refused(f"{name} is no plain array") from error
    if found != shape or fortran:
        raise Refused(f"{name} has shape {tuple(found)}, not {shape}")
    if kind != dtype:
        raise Refused(f"{name} has dtype {kind}, not {dtype}")
    data = array.data[stream.tell() :]
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise Refused(f"{name} has {len(data)} bytes, not {math.prod(shape) * dtype.itemsize}")
    values = np.frombuffer(data, dtype).reshape(shape)
    if finite and not np.isfinite(values).all():
        raise Refused(f"{name} holds values that are not finite")
    return torch.from_numpy(values.astype(dtype.newbyteorder("="))).to(like.device)


def digest(state: State, *words: str) -> str:
    """What a site trained from, as one number: the same digest gives the same training."""
    found = hashlib.sha256("\x1f".join(words).encode())
    for name, tensor in sorted(flat(state).items()):
        found.update(name.encode())
        found.update(_little(tensor).tobytes())
    return found.hexdigest()


# Uploads


def expected_upload(method: Method, model: LaneModel, broadcast: State) -> State:
    """Returns one lane of what an upload of this method holds, with the broadcast's values where it has them."""
    declared, known = declared_upload(method, model), flat(broadcast)
    return unflat({n: known.get(n, t) for n, t in flat(declared).items()})


def checked_upload(content: RecordDict, like: State, bound: float) -> State:
    """A site's upload, if it is what the method declares shared and not absurdly far from what was sent out.

    ‖upload − broadcast‖ ≤ bound · max(1, ‖broadcast‖), for the parameters and for the running statistics.
    """
    upload = unpack(content, like)
    for what, new, old in (("parameters", upload.params, like.params), ("statistics", upload.buffers, like.buffers)):
        far = _norm(new[n].double() - old[n].double() for n in new)
        size = max(1.0, _norm(t.double() for t in old.values()))
        if not far <= bound * size:
            raise Refused(f"its {what} are {far:.3g} from the broadcast, whose norm is {size:.3g} (rounds.norm_bound)")
    return upload


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in tensors))


def read_numbers(content: RecordDict) -> dict[str, float | list[float]]:
    """The `numbers` of a reply: floats and lists of floats."""
    record = content.get("numbers", MetricRecord())
    if not isinstance(record, MetricRecord):
        raise Refused("its numbers are not numbers")
    return {k: [float(x) for x in v] if isinstance(v, list) else float(v) for k, v in record.items()}
