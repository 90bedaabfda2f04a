"""States as safetensors files, and folders of them with their checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import Damaged, InputError
from ..lanes import State
from .files import Kinds, read_file, read_object, write_atomic

ENDING = ".safetensors"


def save_state(path: Path, state: State, lane: int = 0) -> str:
    """Writes one lane as safetensors (`params/NAME`, `buffers/NAME`); returns the sha256."""
    tensors = {f"params/{n}": t[lane] for n, t in state.params.items()}
    tensors |= {f"buffers/{n}": t[lane] for n, t in state.buffers.items()}
    data = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def load_state(path: Path) -> State:
    """Returns the lane that `save_state` wrote, on the CPU."""
    try:
        return _parsed(read_file(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _parsed(data: bytes) -> State:
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for name, tensor in sorted(load(data).items()):
        kind, _, rest = name.partition("/")
        (params if kind == "params" else buffers)[rest] = tensor.unsqueeze(0)
    return State(params, buffers)


def checked_state(path: Path, digest: str) -> State:
    """Returns the lane in a file that has this sha256."""
    data = read_file(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged(f"{path.name} does not match its checksum")
    try:
        return _parsed(data)
    except SafetensorError as error:
        raise Damaged(f"cannot read {path}: {error}") from error


def states_in(folder: Path, sums: dict[str, Any]) -> dict[str, State]:
    """Returns the states of a folder by name, if every file has its checksum. sums: sha256 by file."""
    if any(Path(name).name != name or not name.endswith(ENDING) for name in sums):
        raise Damaged("state.json names files elsewhere")
    return {name.removesuffix(ENDING): checked_state(folder / name, sums[name]) for name in sorted(sums)}


def read_states(folder: Path, kinds: Kinds) -> tuple[dict[str, Any], dict[str, State]]:
    """Returns a folder's state.json, and its states by name, if every file has the checksum that is noted there."""
    note = read_object(folder / "state.json", {**kinds, "sha256": dict}, "it is not what was written")
    return note, states_in(folder, note["sha256"])
