"""What crosses the network: states as safetensors, and a few words about what they are for.

A message holds an ArrayRecord `state` (one array: the tensors `params/NAME` and `buffers/NAME`, each `[lanes, ...]`, in
the safetensors format), a ConfigRecord `about` and, in a reply, a MetricRecord `numbers`. Nothing here is pickled. A
state is used only if its names, shapes and dtypes are those expected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from ..lanes import LaneModel, State
from ..methods import Method, declared_upload

STATE, FORMAT = "state", "safetensors"  # the name and the type of the one array


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


def pack(state: State) -> ArrayRecord:
    """Returns a state as one array in the safetensors format.

    Flower 1.41 makes two objects of every array and moves each by a signed request, which costs its SuperLink 10 to 20
    ms. As a hundred arrays, a state took most of a minute per round.
    """
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in flat(state).items()})
    return ArrayRecord({STATE: Array("uint8", (len(data),), FORMAT, data)})


def _tensors(content: RecordDict) -> dict[str, Tensor]:
    """Returns the tensors of a message. A lie about a tensor's size is an error: it must fit the message's bytes."""
    record = content.get("state", ArrayRecord())
    if not isinstance(record, ArrayRecord) or (record and (list(record) != [STATE] or record[STATE].stype != FORMAT)):
        raise Refused("its state is not in the safetensors format")
    try:
        return load(record[STATE].data) if record else {}
    except Exception as error:  # there is no list of what may go wrong
        raise Refused("its state is not in the safetensors format") from error


def unpack(content: RecordDict, like: State, lanes: int = 1, finite: bool = True) -> State:
    """Returns the state of a message if it has exactly the names, shapes and dtypes of `like`, and finite numbers.

    `like` has one lane; the result is on its device.
    """
    wanted, tensors = flat(like), _tensors(content)
    missing, more = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing:
        raise Refused(f"{_some(missing)} missing")
    if more:
        raise Refused(f"{_some(more)} not shared by this method")
    for name, expected in wanted.items():
        tensor, shape = tensors[name], (lanes, *expected.shape[1:])
        if tuple(tensor.shape) != shape:
            raise Refused(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype != expected.dtype:
            raise Refused(f"{name} has dtype {_name(tensor.dtype)}, not {_name(expected.dtype)}")
        if finite and not tensor.isfinite().all():
            raise Refused(f"{name} holds values that are not finite")
    return unflat({name: tensors[name].to(expected.device) for name, expected in wanted.items()})


def _some(names: Iterable[str]) -> str:
    """Returns `'params/a' (and 3 more) is`; names from outside are shortened."""
    first, *rest = sorted(names)
    return f"{first[:80]!r}" + (f" and {len(rest)} more are" if rest else " is")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(state: State, *words: str) -> str:
    """Returns a sha256 of a state and some words: the same digest gives the same training."""
    found = hashlib.sha256("\x1f".join(words).encode())
    for name, tensor in sorted(flat(state).items()):
        array = np.ascontiguousarray(tensor.detach().cpu().numpy())
        found.update(name.encode())
        found.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
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
            raise Refused(f"its {what} are {far:.3g} from the broadcast, whose norm is {size:.3g} (Rounds.norm_bound)")
    return upload


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in tensors))


def read_numbers(content: RecordDict) -> dict[str, float | list[float]]:
    """The `numbers` of a reply: floats and lists of floats."""
    record = content.get("numbers", MetricRecord())
    if not isinstance(record, MetricRecord):
        raise Refused("its numbers are not numbers")
    return {k: [float(x) for x in v] if isinstance(v, list) else float(v) for k, v in record.items()}
