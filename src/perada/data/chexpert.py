"""CheXpert-v1.0-small: chest X-rays with five labels, from `train.csv`.

The paper cuts its 180,973 training, 20,099 test and 22,342 validation images out of the 223,414 rows of
`train.csv` (the official `valid.csv` has 234), so all those rows are given, frontal and lateral, without a test
mask. A blank label means "not mentioned" and counts as negative.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from .federation import Source
from .images import IMAGENET, decode, names_of, require_files, unread

ARCHIVE = "CheXpert-v1.0-small"
DISEASES = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
Uncertain = Literal["ones", "zeros", "ignore"]
_VALUES = {"": 0, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "-1": -1, "-1.0": -1}


def chexpert(root: str, size: int = 64, uncertain: Uncertain = "ones", skip_bad: bool = False) -> Source:
    """Images `[n, 3, size, size]`, targets uint8 `[n, 5]`.

    `uncertain` says what a label of -1 is: "ones" positive (U-Ones, the paper's), "zeros" negative (U-Zeros).
    U-Ignore masks single labels out of the loss; there is no such mask here, so "ignore" leaves out every image
    with an uncertain one among the five.
    """
    if uncertain not in get_args(Uncertain):
        raise unknown("policy for uncertain labels", uncertain, get_args(Uncertain))
    base = Path(root or ".").expanduser()
    base = base / ARCHIVE if (base / ARCHIVE).is_dir() else base
    table = base / "train.csv"
    if not table.is_file():
        raise InputError(
            f"data.root: no {ARCHIVE}/train.csv in {root!r}: 'perada data get chexpert' says how to get it"
        )
    rows, files, labels = _table(table)
    if uncertain == "ignore":
        sure = np.asarray((labels >= 0).all(1))
        rows = [row for row, good in zip(rows, sure, strict=True) if good]
        files = [path for path, good in zip(files, sure, strict=True) if good]
        labels = labels[sure]
    if not files:
        raise InputError(f"{table}: no images in it")
    if not skip_bad:
        require_files(table, rows, files)
    images, kept = decode(files, base, size, skip_bad)
    targets = np.where(labels < 0, uncertain == "ones", labels).astype(np.uint8)
    names, skipped = names_of(files, kept), unread(files, kept)
    return Source("chexpert", images, targets[kept], DISEASES, *IMAGENET, names=names, skipped=skipped)


def _table(table: Path) -> tuple[list[int], list[Path], NDArray[np.int8]]:
    """Line numbers, image files and labels -1, 0 or 1 `[n, 5]`. `Path` starts with the archive's own folder."""
    rows: list[int] = []
    files: list[Path] = []
    labels: list[list[int]] = []
    try:
        with table.open(newline="", encoding="utf-8-sig") as f:
            reader = csv.DictReader(f)
            for column in ("Path", *DISEASES):
                if column not in (reader.fieldnames or ()):
                    raise InputError(f"{table}: no column {column!r}: expected CheXpert's own train.csv")
            for row in reader:
                values = [(row[name] or "").strip() for name in DISEASES]
                for name, value in zip(DISEASES, values, strict=True):
                    if value not in _VALUES:
                        raise InputError(f"{table}: row {reader.line_num}: {name} is {value!r}, not 1, 0, -1 or blank")
                rows.append(reader.line_num)
                files.append(table.parent.joinpath(*_below_archive(row["Path"] or "")))
                labels.append([_VALUES[value] for value in values])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {table}: damaged, or no CSV file") from error
    return rows, files, np.array(labels, np.int8).reshape(-1, len(DISEASES))


def _below_archive(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.strip().split("/") if part)
    return parts[1:] if parts and parts[0].startswith("CheXpert-v1.0") else parts
