"""A client's personal model, whichever place it comes from: what it sees in pictures, and the model as one file."""

import io
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from .. import __version__
from ..adapters import Exports
from ..config import Config
from ..data import Federation, read_image
from ..errors import InputError, RunError
from ..lanes import LaneModel, State
from ..runs.files import write_output

ENDINGS = (".safetensors", ".pt2", ".onnx")


def check_out(out: Path) -> None:
    """Refuses a file name that does not say what to write, and a kind of file whose packages are missing."""
    if out.suffix not in ENDINGS:
        raise InputError(f"--out {out}: the name must end in {' or '.join(ENDINGS)}")
    if out.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise InputError(f"--out {out}: ONNX files need pip install 'perada[onnx]'")


@dataclass(frozen=True)
class PersonalModel:
    """What one client predicts with. Of the federation only classes, image shape and normalisation count."""

    client: str
    config: Config
    federation: Federation
    network: LaneModel
    state: State  # one lane: the personal adapter (or model)

    def module(self) -> nn.Module:
        """Returns a plain torch module on the CPU, in eval mode."""
        return self.network.plain(self.state).cpu()

    def predict(self, paths: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Returns class names with probabilities, most probable first; label probabilities for multi-label data."""
        data, module = self.federation, self.module()
        pixels = np.stack([read_image(Path(p), data.images.shape[-1]) for p in paths])
        if data.images.shape[1] == 1:
            pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
        with torch.no_grad():
            logits = module(data.prepare(torch.from_numpy(pixels), next(module.parameters()).dtype))
        if not logits.isfinite().all():
            raise RunError(
                f"the model of {self.client} predicts what is not a number", "its training may have diverged"
            )
        predictions = []
        for path, row in zip(
            paths, (logits.sigmoid() if data.multilabel else logits.softmax(-1)).tolist(), strict=True
        ):
            shares = dict(zip(data.classes, row, strict=True))
            if not data.multilabel:
                shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
            about = {"image": str(path), "client": self.client, "multilabel": data.multilabel}
            predictions.append({**about, "probabilities": shares})
        return predictions

    def export(self, out: Path, merged: bool = False) -> None:
        """Writes one file: .safetensors is the personal part, or with `merged` the whole network.

        .pt2 and .onnx are the whole network as a program: normalised images `[n, 3, H, W]` in, logits out. A name
        without an ending is a folder in the format of others, where the adapter has one (LoRA: PEFT's).
        """
        adapter = self.config.model.strategy()
        if not out.suffix and not merged and isinstance(adapter, Exports):
            head = next(iter(self.network.group("output").params)).rpartition(".")[0]
            names = [*self.state.params, *self.state.buffers]
            for name, content in adapter.export(self.module(), names, head).items():
                write_output(out / name, content, parents=True)
            return
        check_out(out)
        if out.suffix != ".safetensors":
            content = self._program(out.suffix)
        else:
            one = {n: t[0] for part in (self.state.params, self.state.buffers) for n, t in part.items()}
            tensors = self.module().state_dict() if merged else one
            content = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, self._notes())
        write_output(out, content)

    @property
    def _size(self) -> list[int]:
        return list(self.federation.images.shape[2:])

    def _notes(self) -> dict[str, str]:
        """Returns the file's metadata: what an image has to be, and what the outputs mean."""
        data = self.federation
        facts = {"classes": list(data.classes), "mean": data.mean, "std": data.std, "size": self._size}
        return {
            "perada": __version__,
            "client": self.client,
            "method": self.config.method_name,
            "backbone": self.config.model.backbone,
            **{k: json.dumps(v) for k, v in {**facts, "multilabel": data.multilabel}.items()},
        }

    def _program(self, ending: str) -> bytes:
        module = self.module()
        example = torch.zeros(2, 3, *self._size, dtype=next(module.parameters()).dtype)
        log = logging.getLogger("torch.onnx")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # torch's own, about its insides
                program = torch.export.export(
                    module, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
                )
                if ending == ".pt2":
                    buffer = io.BytesIO()
                    torch.export.save(program, buffer, extra_files={"perada.json": json.dumps(self._notes())})
                    return buffer.getvalue()
                names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "verbose": False}
                onnx = torch.onnx.export(program, dynamo=True, **names)
                assert onnx is not None
                onnx.model.metadata_props.update(self._notes())
                return bytes(onnx.model_proto.SerializeToString())
        finally:
            log.setLevel(level)
