"""A client's personal model, whichever place it comes from: what it sees in pictures, and the model as one file."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from .. import __version__
from ..adapters import Exports
from ..adapters.merged import merged_network
from ..config import Config
from ..data import Federation
from ..errors import InputError, RunError
from ..lanes import LaneModel, State
from ..runs.files import write_output
from .pictures import Say, batches, files_in, silent
from .predictor import Predictor
from .program import Program, compiled

ENDINGS = (".safetensors", ".pt2", ".onnx")
MIDDLE = 0.5  # the threshold of a label for which none was chosen


def check_out(out: Path) -> None:
    """Refuses a file name that does not say what to write, and a kind of file whose packages are missing."""
    if out.suffix not in ENDINGS:
        raise InputError(f"--out {out}: the name must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if out.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise InputError(f"--out {out}: ONNX files need pip install 'perada[onnx]'")


def predictions_on(
    files: Sequence[Path], client: str, data: Federation, rows: Sequence[Sequence[float]], **more: Any
) -> list[dict[str, Any]]:
    """Returns class names with probabilities, most probable first; label probabilities for multi-label data.

    more: what is said of every image.
    """
    predictions = []
    for path, row in zip(files, rows, strict=True):
        shares = dict(zip(data.classes, row, strict=True))
        if not data.multilabel:
            shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
        about = {"image": str(path), "client": client, "multilabel": data.multilabel}
        predictions.append({**about, "probabilities": shares, **more})
    return predictions


def aware_predictions(predictor: Predictor, paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Returns the predictions of a client that notices drift, with what was said of each image's window."""
    files = files_in(paths, predictor.say)
    answers = predictor.predict(files)
    rows = predictions_on(files, predictor.client, predictor.federation, answers.probabilities.tolist())
    about = zip(answers.drifted.tolist(), answers.z.tolist(), answers.share.tolist(), strict=True)
    return [
        {**row, "drift": drifted, "z": z, "home_share": share}
        for row, (drifted, z, share) in zip(rows, about, strict=True)
    ]


@dataclass(frozen=True)
class PersonalModel:
    """What one client predicts with. Of the federation only classes, image shape and normalisation count."""

    client: str
    config: Config
    federation: Federation
    network: LaneModel
    state: State  # one lane: the personal adapter (or model)
    say: Say = silent  # receives what is not used of the pictures
    thresholds: Mapping[str, float | None] | None = None  # of labels, chosen on the client's validation data

    def module(self) -> nn.Module:
        """Returns a plain torch module on the CPU, in eval mode."""
        return self.network.plain(self.state).cpu()

    def predict(self, paths: Sequence[str | Path]) -> list[dict[str, Any]]:
        """Returns class names with probabilities, most probable first; label probabilities for multi-label data.

        paths: image files, and folders of them.
        """
        data, files = self.federation, files_in(paths, self.say)
        rows = self._probabilities(files)
        if not rows.isfinite().all():
            raise RunError(
                f"the model of {self.client} predicts what is not a number", "its training may have diverged"
            )
        more = {"thresholds": self.own_thresholds} if data.multilabel else {}
        return predictions_on(files, self.client, data, rows.tolist(), **more)

    @property
    def own_thresholds(self) -> dict[str, float]:
        """The probability from which each label counts as present."""
        chosen = {k: v for k, v in (self.thresholds or {}).items() if v is not None}
        return {name: chosen.get(name, MIDDLE) for name in self.federation.classes}

    @torch.no_grad()
    def _probabilities(self, files: Sequence[Path]) -> Tensor:
        """Returns the probabilities `[files, classes]`; says what the pictures lose at their sides."""
        data, module, rows = self.federation, self.module(), list[Tensor]()
        dtype = next(module.parameters()).dtype
        for pixels in batches(files, data, self.config.data.fit, self.say):
            logits = module(data.prepare(pixels, dtype))
            rows.append(logits.sigmoid() if data.multilabel else logits.softmax(-1))
        return torch.cat(rows).double()

    def export(self, out: Path, merged: bool = False) -> None:
        """Writes one file: .safetensors is the personal part, or with `merged` the whole network.

        .pt2 and .onnx are the whole network as a program: pictures of any shape in, uint8
        `[batch, height, width, 3]`, and probabilities out. A name without an ending is a folder in the format of
        others, where the adapter has one (LoRA: PEFT's).
        """
        adapter = self.config.model.strategy()
        if not out.suffix and not merged and isinstance(adapter, Exports):
            head = next(iter(self.network.group("output").params)).rpartition(".")[0]
            names = [*self.state.params, *self.state.buffers]
            for name, content in adapter.export(self.module(), names, head).items():
                write_output(out / name, content, parents=True)
            return
        check_out(out)
        if out.suffix == ".safetensors":
            write_output(out, self._tensors(merged))
            return
        data = self.federation
        shape, fit = data.images.shape[1:], self.config.data.fit
        program = Program(self.module(), shape, fit, data.mean, data.std, data.multilabel)
        write_output(out, compiled(program, out.suffix, json.dumps(self.notes())))

    def _tensors(self, merged: bool) -> bytes:
        """Returns a file of weights: the personal part, or the whole network with the adapters merged into it."""
        notes = self.notes()
        if merged:
            tensors, notes["extra"] = self._merged()
            if extra := notes["extra"]:
                more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
                self.say(
                    "every adapter that does not fit into its convolution became an extra 1×1 convolution, at "
                    f"{', '.join(extra[:3])}{more}; docs/export.md shows how to load them"
                )
        else:
            tensors = {n: t[0] for part in (self.state.params, self.state.buffers) for n, t in part.items()}
        whole = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        return save(whole, {"perada": json.dumps(notes)})

    def _merged(self) -> tuple[dict[str, Tensor], list[str]]:
        """Returns the whole network under its own names, and the convolutions with an extra one behind them."""
        module, adapter = self.module(), self.config.model.strategy()
        state = module.state_dict()
        if adapter is None or not any(".adapter." in f".{name}" for name in state):
            return state, []
        exact = copy.deepcopy(module).double()
        found, extra = merged_network(exact, adapter, (3, *self._size))
        dtype = next(module.parameters()).dtype
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in found.items()}, extra

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
