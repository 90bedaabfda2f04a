"""CheXpert-v1.0-small: chest X-rays with five labels, from `train.csv`.

The paper cuts its 180,973 training, 20,099 test and 22,342 validation images out of the 223,414 rows of `train.csv`
(the official `valid.csv` has 234). So all those rows are read, frontal and lateral, without a test mask. A blank label
means "not mentioned" and counts as negative.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ..errors import InputError, unknown
from .images import IMAGENET, decode, image_names, require_files
from .manifest import BINARY, read_table
from .source import Source

ARCHIVE = "CheXpert-v1.0-small"
DISEASES = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
Uncertain = Literal["ones", "zeros", "ignore"]


def chexpert(root: str, size: int = 64, uncertain: Uncertain = "ones", skip_bad: bool = False) -> Source:
    """Returns images `[n, 3, size, size]` and targets uint8 `[n, 5]`.

    uncertain: what a label of -1 is: "ones" positive (U-Ones, as in the paper), "zeros" negative (U-Zeros), "ignore"
    drops the image. U-Ignore would mask that label in the loss, and the loss has no such mask.
    """
    if uncertain not in get_args(Uncertain):
        raise unknown("policy for uncertain labels", uncertain, get_args(Uncertain))
    base = Path(root or ".").expanduser()
    base = base / ARCHIVE if (base / ARCHIVE).is_dir() else base
    if not (base / "train.csv").is_file():
        raise InputError(
            f"DataOptions.root: no {ARCHIVE}/train.csv in {root!r}: 'perada data get chexpert' says how to get it"
        )
    table = read_table(base / "train.csv")
    for column in ("Path", *DISEASES):
        if column not in table.columns:
            raise InputError(f"{table.file}: no column {column!r}: expected CheXpert's own train.csv")
    labels = table.numbers(DISEASES, {**BINARY, "": 0, "-1": -1, "-1.0": -1}, "not 1, 0, -1 or blank")
    chosen = np.flatnonzero((labels >= 0).all(1) | (uncertain != "ignore")).tolist()
    files = [base.joinpath(*_below_archive(table.columns["Path"][row])) for row in chosen]
    if not files:
        raise InputError(f"{table.file}: no images in it")
    if not skip_bad:
        require_files(table.file, [table.lines[row] for row in chosen], files)
    images, kept = decode(files, base, size, skip_bad)
    targets = np.where(labels < 0, uncertain == "ones", labels).astype(np.uint8)[chosen][kept]
    return Source("chexpert", images, targets, DISEASES, *IMAGENET, None, None, None, *image_names(files, kept))


def _below_archive(name: str) -> tuple[str, ...]:
    """The parts of a `Path`, which starts with the archive's own folder."""
    parts = tuple(part for part in name.split("/") if part)
    return parts[1:] if parts and parts[0].startswith("CheXpert-v1.0") else parts
