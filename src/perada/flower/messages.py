"""What crosses the network: states as safetensors, and a few words about what they are for.

A message holds an ArrayRecord `state` (one array: the tensors `params/NAME` and `buffers/NAME`, each `[lanes, ...]`, in
the safetensors format), a ConfigRecord `about` and, in a reply, a MetricRecord `numbers`. Nothing here is pickled. A
state is used only if its names, shapes and dtypes are those expected.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from safetensors.torch import load, save
from torch import Tensor

from ..lanes import State
from ..server.checks import Refused, check_finite

STATE, FORMAT = "state", "safetensors"  # the name and the type of the one array
UNDONE = re.compile(r"(\d{1,6}(,\d{1,6}){0,999})?")  # the field `undone` of a request
MOST_ENTRIES, MOST_NUMBERS = 100, 1000  # of a record, and of a list in it
PRIVACY_SPENT = "its privacy budget is spent"  # the error of a site that takes no further part
Numbers = Mapping[str, float | list[float]]


# Words


@dataclass(frozen=True)
class Subject:
    """What a message belongs to. A reply repeats it, so a late reply cannot pass for the answer to another request."""

    federation: str
    run: str
    round: int
    kind: str  # hello, weights, train, score, evaluate or finish

    @property
    def subject(self) -> tuple[str, str, int, str]:
        return self.federation, self.run, self.round, self.kind


@dataclass(frozen=True)
class Request(Subject):
    """What the server asks for."""

    plan: str = ""  # `Plan.text`
    start: str = ""  # the run whose personal state a new run continues,
    start_round: int = 0  # as it was when this round of it began
    evaluate: bool = False  # whether to send the site's scores before (finish: after) the work
    within: float = 0.0  # seconds until the server stops waiting
    undone: str = ""  # the rounds to which the run went back, such as "5,12": what was trained after them is undone


@dataclass(frozen=True)
class Reply(Subject):
    """What a site says about its answer. It does not send the plan back."""

    site: str
    error: str = ""  # why it did not do what was asked
    needs: str = ""  # "weights": it does not have the server's backbone yet
    failed: bool = False  # its training stopped being finite; then it sends no state


Words = TypeVar("Words", Request, Reply)


def read_request(content: RecordDict) -> Request:
    return _read(content, Request)


def read_reply(content: RecordDict) -> Reply:
    return _read(content, Reply)


def _read(content: RecordDict, kind: type[Words]) -> Words:
    record = content.get("about")
    if not isinstance(record, ConfigRecord):
        raise Refused("there is no record 'about' in it")
    if len(record) > MOST_ENTRIES:
        raise Refused(f"it has {len(record)} words")
    words: dict[str, Any] = {f.name: record.get(f.name, f.default) for f in fields(kind)}
    for field in fields(kind):
        if type(words[field.name]) is not field.type:
            raise Refused(f"{field.name} is not {getattr(field.type, '__name__', field.type)}")
    return kind(**words)


def message(words: Subject, state: State | None = None, numbers: Numbers | None = None) -> RecordDict:
    """Returns the content of a request, or with `numbers` of a reply."""
    content = RecordDict({"about": ConfigRecord(dict(vars(words)))})
    if numbers is not None:
        content["numbers"] = MetricRecord(dict(numbers))
    if state is not None:
        content["state"] = pack(state)
    return content


def read_numbers(content: RecordDict) -> dict[str, float | list[float]]:
    """Returns the `numbers` of a reply: floats and lists of floats."""
    record = content.get("numbers", MetricRecord())
    if not isinstance(record, MetricRecord):
        raise Refused("its numbers are not numbers")
    if len(record) > MOST_ENTRIES or any(len(v) > MOST_NUMBERS for v in record.values() if isinstance(v, list)):
        raise Refused("it has too many numbers")
    return {k: [float(x) for x in v] if isinstance(v, list) else float(v) for k, v in record.items()}


# States


def flat(state: State) -> dict[str, Tensor]:
    """Returns every tensor under the name that it has in messages and files."""
    params = {f"params/{n}": t for n, t in state.params.items()}
    return params | {f"buffers/{n}": t for n, t in state.buffers.items()}


def unflat(tensors: Mapping[str, Tensor]) -> State:
    """Reverses `flat`."""
    params = {n.removeprefix("params/"): t for n, t in tensors.items() if n.startswith("params/")}
    return State(params, {n.removeprefix("buffers/"): t for n, t in tensors.items() if n.startswith("buffers/")})


def pack(state: State) -> ArrayRecord:
    """Returns a state as one array in the safetensors format.

    Flower 1.41 makes two objects of every array and moves each by a signed request, which costs its SuperLink 10 to 20
    ms. As a hundred arrays, a state took most of a minute per round.
    """
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in flat(state).items()})
    return ArrayRecord({STATE: Array("uint8", (len(data),), FORMAT, data)})


def most_bytes(like: State, lanes: int = 1) -> int:
    """Returns the most bytes in which a state like this may come: a quarter more than it needs, for a clear refusal."""
    return _most_header(like) + lanes * like.bytes_per_lane() * 5 // 4


def _most_header(like: State) -> int:
    """Returns the most bytes of the list of tensors with which the safetensors format begins."""
    return 4096 + sum(200 + len(name) for name in flat(like))


def _tensors(content: RecordDict, like: State, lanes: int) -> dict[str, Tensor]:
    """Returns the tensors of a message. A lie about a tensor's size is an error: it must fit the message's bytes.

    Nothing is read of a message that is larger than such a state can be, or lists many more tensors.
    """
    record = content.get("state", ArrayRecord())
    if not isinstance(record, ArrayRecord) or (record and (list(record) != [STATE] or record[STATE].stype != FORMAT)):
        raise Refused("its state is not in the safetensors format")
    data = record[STATE].data if record else b""
    most, header = most_bytes(like, lanes), int.from_bytes(data[:8], "little")
    if len(data) > most or _most_header(like) < header < len(data):
        raise Refused(f"its state has {len(data)} bytes with a list of {header}, more than such a state can have")
    try:
        return load(data) if record else {}
    except Exception as error:  # safetensors does not list what it may raise
        raise Refused("its state is not in the safetensors format") from error


def unpack(content: RecordDict, like: State, lanes: int = 1, finite: bool = True) -> State:
    """Returns the state of a message if it has exactly the names, shapes and dtypes of `like`.

    `like` has one lane; the result is on its device. finite: refuses numbers that are not finite.
    """
    expected, tensors = flat(like), _tensors(content, like, lanes)
    missing, more = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing:
        raise Refused(f"{_some(missing)} missing")
    if more:
        raise Refused(f"{_some(more)} not shared by this method")
    for name, one in expected.items():
        tensor, shape = tensors[name], (lanes, *one.shape[1:])
        if tuple(tensor.shape) != shape:
            raise Refused(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype != one.dtype:
            raise Refused(f"{name} has dtype {_name(tensor.dtype)}, not {_name(one.dtype)}")
    state = unflat({name: tensors[name].to(one.device) for name, one in expected.items()})
    if finite:
        check_finite(state)
    return state


def _some(names: Iterable[str]) -> str:
    """Returns `'params/a' and 3 more are`; names from outside are shortened."""
    first, *rest = sorted(names)
    return f"{first[:80]!r}" + (f" and {len(rest)} more are" if rest else " is")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(state: State, *words: str) -> str:
    """Returns a sha256 of a state and some words: the same digest gives the same training."""
    sha256 = hashlib.sha256("\x1f".join(words).encode())
    for name, tensor in sorted(flat(state).items()):
        array: np.ndarray[Any, Any] = np.ascontiguousarray(tensor.detach().cpu().numpy())
        sha256.update(name.encode())
        sha256.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return sha256.hexdigest()
