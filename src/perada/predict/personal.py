"""A client's personal model, whichever place it comes from: what it sees in pictures, and the model as one file."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from .. import __version__
from ..adapters.merged import merged_state
from ..config import Config
from ..data import Federation
from ..data.images import about_lost, about_others, image_and_other_files, read_and_measure
from ..errors import InputError, RunError
from ..inputs import user_path
from ..lanes import LaneModel, State
from ..runs.files import write_output
from .program import Program, compiled

ENDINGS = (".safetensors", ".pt2", ".onnx")
TOGETHER = 1 << 22  # pixels of pictures that are predicted at once
MIDDLE = 0.5  # the threshold of a label for which none was chosen


def check_out(out: Path) -> None:
    """Refuses a file name that does not say what to write, and a kind of file whose packages are missing."""
    if out.suffix not in ENDINGS:
        raise InputError(f"--out {out}: the name must end in {' or '.join(ENDINGS)}")
    if out.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise InputError(f"--out {out}: ONNX files need pip install 'perada[onnx]'")


def silent(text: str) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class PersonalModel:
    """What one client predicts with. Of the federation only classes, image shape and normalisation count."""

    client: str
    config: Config
    federation: Federation
    network: LaneModel
    state: State  # one lane: the personal adapter (or model)
    say: Callable[[str], None] = silent  # receives what is not used of the pictures
    thresholds: Mapping[str, float | None] | None = None  # of labels, chosen on the client's validation data

    def module(self) -> nn.Module:
        """Returns a plain torch module on the CPU, in eval mode."""
        return self.network.plain(self.state).cpu()

    def predict(self, paths: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Returns class names with probabilities, most probable first; label probabilities for multi-label data.

        paths: image files, and folders of them.
        """
        data, files = self.federation, self._files(paths)
        rows = self._probabilities(files)
        if not np.isfinite(rows).all():
            raise RunError(
                f"the model of {self.client} predicts what is not a number", "its training may have diverged"
            )
        predictions = []
        for path, row in zip(files, rows.tolist(), strict=True):
            shares = dict(zip(data.classes, row, strict=True))
            if not data.multilabel:
                shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
            about = {"image": str(path), "client": self.client, "multilabel": data.multilabel}
            more = {"thresholds": self.own_thresholds} if data.multilabel else {}
            predictions.append({**about, "probabilities": shares, **more})
        return predictions

    @property
    def own_thresholds(self) -> dict[str, float]:
        """The probability from which each label counts as present."""
        chosen = {k: v for k, v in (self.thresholds or {}).items() if v is not None}
        return {name: chosen.get(name, MIDDLE) for name in self.federation.classes}

    def _files(self, paths: Sequence[str | Path]) -> list[Path]:
        """Returns the image files, and those in the folders; says what else is there."""
        files: list[Path] = []
        others: list[Path] = []
        for path in map(user_path, paths):
            if not path.is_dir():
                files.append(path)
                continue
            images, rest = image_and_other_files(path)
            if not images:
                found = f" ({about_others(rest)})" if rest else ""
                raise InputError(f"no images in {path}{found}")
            files += images
            others += rest
        if others:
            self.say(about_others(others))
        return files

    @torch.no_grad()
    def _probabilities(self, files: Sequence[Path]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Returns the probabilities `[files, classes]`; says what the pictures lose at their sides."""
        data, module, fit = self.federation, self.module(), self.config.data.fit
        dtype, (height, width) = next(module.parameters()).dtype, self._size
        together, rows, lost = max(1, TOGETHER // (height * width)), list[Tensor](), list[float]()
        for start in range(0, len(files), together):
            read = [read_and_measure(path, (height, width), fit) for path in files[start : start + together]]
            pixels = np.stack([pixels for pixels, _ in read])
            lost += [share for _, share in read]
            if data.images.shape[1] == 1:
                pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
            logits = module(data.prepare(torch.from_numpy(pixels), dtype))
            rows.append(logits.sigmoid() if data.multilabel else logits.softmax(-1))
        if remark := about_lost(lost, fit):
            self.say(remark)
        return torch.cat(rows).double().numpy()

    def export(self, out: Path, merged: bool = False) -> None:
        """Writes one file: .safetensors is the personal part, or with `merged` the whole network.

        .pt2 and .onnx are the whole network as a program: pictures of any shape in, uint8
        `[batch, height, width, 3]`, and probabilities out.
        """
        check_out(out)
        notes = json.dumps(self.notes())
        if out.suffix != ".safetensors":
            data = self.federation
            program = Program(
                self.module(), data.images.shape[1:], self.config.data.fit, data.mean, data.std, data.multilabel
            )
            content = compiled(program, out.suffix, notes)
        else:
            one = {n: t[0] for part in (self.state.params, self.state.buffers) for n, t in part.items()}
            tensors = self._merged() if merged else one
            content = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, {"perada": notes})
        write_output(out, content)

    def _merged(self) -> dict[str, Tensor]:
        """Returns the whole network under its own names, with the adapters merged into it."""
        module, adapter = self.module(), self.config.model.strategy()
        state = module.state_dict()
        if adapter is None or not any(".adapter." in f".{name}" for name in state):
            return state
        exact = copy.deepcopy(module).double()
        found = merged_state(exact, adapter.merge(exact), (3, *self._size))
        return {n: t.to(state[n].dtype) for n, t in found.items()}

    @property
    def _size(self) -> tuple[int, int]:
        height, width = self.federation.images.shape[2:]
        return height, width

    def notes(self) -> dict[str, Any]:
        """Returns what a file says of itself: what becomes of an image, and what the outputs mean."""
        data = self.federation
        return {
            "perada": __version__,
            "client": self.client,
            "method": self.config.method_name,
            "backbone": self.config.model.backbone,
            "classes": list(data.classes),
            "multilabel": data.multilabel,
            "thresholds": self.own_thresholds if data.multilabel else None,
            "size": list(self._size),
            "fit": self.config.data.fit,
            "interpolation": "bicubic",
            "antialias": True,
            "grey": data.images.shape[1] == 1,
            "mean": list(data.mean),
            "std": list(data.std),
        }
