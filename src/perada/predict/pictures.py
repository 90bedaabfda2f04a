"""What a personal model sees in pictures: the same at a run's folder and at a site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data import Federation, read_image


def predictions(
    model: nn.Module, held: Federation, dtype: torch.dtype, client: str, paths: Sequence[str | Path]
) -> list[dict[str, Any]]:
    """Class names with probabilities, most probable first; label probabilities for multi-label data. Of `held` only
    the classes, the size and the normalisation count."""
    pixels = np.stack([read_image(Path(p), held.images.shape[-1]) for p in paths])
    if held.images.shape[1] == 1:
        pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
    with torch.no_grad():
        logits = model(held.prepare(torch.from_numpy(pixels), dtype))
    found = logits.sigmoid() if held.multilabel else logits.softmax(-1)
    out = []
    for path, row in zip(paths, found.tolist(), strict=True):
        each = dict(zip(held.classes, row, strict=True))
        if not held.multilabel:
            each = dict(sorted(each.items(), key=lambda pair: -pair[1]))
        about = {"image": str(path), "client": client, "multilabel": held.multilabel}
        out.append({**about, "probabilities": each})
    return out
