"""A client's model as one file: its weights (.safetensors), or the whole network for another runtime (.pt2, .onnx)."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from .. import __version__
from ..config import Config
from ..errors import InputError
from ..lanes import State
from ..runs.folder import write_atomic

ENDINGS = (".safetensors", ".pt2", ".onnx")


def check_out(out: Path) -> None:
    """Before anything is opened: a name that says what to write, and what is needed to write it."""
    if out.suffix not in ENDINGS:
        raise InputError(f"--out {out}: the name must end in {' or '.join(ENDINGS)}")
    if out.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise InputError(f"--out {out}: ONNX files need pip install 'perada[onnx]'")


def about(config: Config, client: str, classes: Sequence[str], **more: object) -> dict[str, str]:
    """What the file says of itself; `more` as JSON."""
    found = {"perada": __version__, "client": client, "method": config.method_name, "backbone": config.model.backbone}
    return found | {k: json.dumps(v) for k, v in {"classes": list(classes), **more}.items()}


def weights_of(state: State) -> dict[str, Tensor]:
    """Of one lane."""
    return {n: t[0] for part in (state.params, state.buffers) for n, t in part.items()}


def write_weights(out: Path, held: Mapping[str, Tensor], said: Mapping[str, str]) -> None:
    _write(out, save({n: t.detach().cpu().contiguous().clone() for n, t in held.items()}, dict(said)))


def _write(out: Path, made: bytes) -> None:
    try:
        write_atomic(out, made)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error


def write_program(out: Path, module: nn.Module, image: Sequence[int], said: Mapping[str, str]) -> None:
    """The whole network: `images`, any number of them, normalised, `[n, 3, *image]`, in, `logits` out."""
    _write(out, _program(module, out.suffix, image, said))


def _program(module: nn.Module, ending: str, image: Sequence[int], said: Mapping[str, str]) -> bytes:
    example = torch.zeros(2, 3, *image, dtype=next(module.parameters()).dtype)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    with warnings.catch_warnings(), _quiet("torch.onnx"), torch.no_grad():
        warnings.simplefilter("ignore")  # about their own insides
        program = torch.export.export(module, (example,), dynamic_shapes=shapes)
        if ending == ".pt2":
            buffer = io.BytesIO()
            torch.export.save(program, buffer, extra_files={"perada.json": json.dumps(dict(said))})
            return buffer.getvalue()
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "verbose": False}
        made = torch.onnx.export(program, dynamo=True, **names)
        assert made is not None
        made.model.metadata_props.update(said)
        return bytes(made.model_proto.SerializeToString())


class _quiet:
    """Less of what a library says to its log."""

    def __init__(self, name: str) -> None:
        self.log = logging.getLogger(name)

    def __enter__(self) -> None:
        self.before = self.log.level
        self.log.setLevel(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        self.log.setLevel(self.before)
