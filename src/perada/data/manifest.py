"""Images by a table: your own CSV or TSV file `path,site,split,label…`, one row per image, or CheXpert's `train.csv`.

- `path`: relative to the table's folder, or absolute;
- `site`, optional: who holds the image; without it sites can only be simulated (partition=dirichlet);
- `split`, optional: train, val or test; blank is train;
- labels: a column `label`, or the only column left, has class names or numbers (one class per image; other columns
  besides one named `label` are ignored). Several columns left are labels of 0 and 1 each; blank is not known.

CheXpert-v1.0-small has chest X-rays with five labels. The paper cuts its 180,973 training, 20,099 test and 22,342
validation images out of the 223,414 rows of `train.csv` (the official `valid.csv` has 234). So all those rows are read,
frontal and lateral, without a test mask. A blank label means "not mentioned" and counts as negative.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..inputs import CLASSES, plain_file, user_path
from .arrays import SPLITS, split_masks
from .fit import Fit
from .images import IMAGENET, decode, noted
from .source import UNKNOWN, Source, Targets, check_classes

KNOWN = ("path", "site", "split")
BINARY = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
CHEXPERT = "CheXpert-v1.0-small"
DISEASES = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
Uncertain = Literal["ones", "zeros", "mask", "ignore"]


@dataclass(frozen=True)
class Table:
    """Holds the columns of a CSV or TSV file by name, and the line number of each row."""

    file: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def refuse(self, row: int, why: str) -> InputError:
        """Returns the error that names a row by its line."""
        return InputError(f"{self.file}: row {self.lines[row]}: {why}")

    def numbers(self, names: Sequence[str], known: dict[str, int], advice: str) -> NDArray[np.int8]:
        """Returns the columns as numbers `[rows, names]`, where each value is one of `known`."""
        for name in names:
            for row, value in enumerate(self.columns[name]):
                if value not in known:
                    raise self.refuse(row, f"{name} is {value!r}, {advice}")
        return np.array([[known[value] for value in self.columns[name]] for name in names], np.int8).T.copy()

    def require(self, rows: Sequence[int], files: Sequence[Path]) -> None:
        """Refuses a table that names images which are not there; the first such row shows a wrong folder best."""
        for row, path in zip(rows, files, strict=True):
            if not os.path.isfile(path):  # Path.is_file raises an error where a name is too long
                raise self.refuse(
                    row,
                    f"no image {path}: correct the path, or skip missing images with DataOptions.skip_bad=true",
                )


def manifest(
    path: str,
    size: int = 64,
    skip_bad: bool = False,
    labels: Sequence[str] = (),
    site_column: str = "site",
    fit: Fit = "crop",
    asked: Sequence[str] = (),
) -> Source:
    """Returns images `[n, 3, size, size]` and targets, int64 `[n]`, or uint8 `[n, labels]` with several label columns.

    labels: the label columns, if there are further columns; site_column: the column that has the sites.
    asked: the labels of a federation, of which a site may know only some: then only those that it knows are returned.
    """
    table = read_table(user_path(path), (*KNOWN, "label"))
    has = f"it has {', '.join(table.columns)}"
    if site_column != "site":
        if site_column not in table.columns:
            raise InputError(f"{table.file}: no column {site_column!r} (DataOptions.site): {has}")
        table.columns["site"] = table.columns.pop(site_column)
    if "path" not in table.columns:
        raise InputError(f"{table.file}: no column 'path': expected path,site,label or path,site,split,label…")
    if asked:
        labels = [name for name in asked if any(table.columns.get(name, ()))]
        if not labels:
            raise InputError(f"{table.file}: none of the federation's labels ({', '.join(asked)}) is known: {has}")
    for name in labels:
        if name not in table.columns:
            raise InputError(f"{table.file}: no column {name!r} (DataOptions.labels): {has}")
    names = [name for name in table.columns if name not in KNOWN]
    names = list(labels) or (["label"] if "label" in names else names)
    if not names:
        raise InputError(f"{table.file}: no column 'label': expected path,site,label or path,site,split,label…")
    for column in ("path", "site", *(names if len(names) == 1 and not asked else ())):
        for row, value in enumerate(table.columns.get(column, ())):
            if not value:
                raise table.refuse(row, f"{column} is blank")
    targets, classes = _targets(table, names, several=bool(asked) or len(names) > 1)
    splits = _splits(table)
    files = [table.file.parent / name for name in table.columns["path"]]
    _once(table, files)
    if not skip_bad:
        table.require(range(len(files)), files)
    decoded = decode(files, table.file.parent, size, skip_bad, fit=fit)
    readable = decoded.readable
    site = np.array(table.columns["site"])[readable] if "site" in table.columns else None
    test, val = split_masks(list(compress(splits, readable)))
    notes = noted(files, decoded, fit)
    return Source(
        table.file.stem, decoded.images, targets[readable], classes, *IMAGENET, test=test, site=site, val=val, **notes
    )


def read_table(file: Path, lower: Sequence[str] = ()) -> Table:
    """Returns the table in a file; column names in `lower` may be written in capitals, too."""
    try:
        with plain_file(file).open(newline="", encoding="utf-8-sig") as f:
            header = f.readline()
            f.seek(0)
            # By what the header has and not by the file's ending: spreadsheets also write ';' into a .csv.
            reader = csv.reader(f, delimiter=max(",\t;", key=header.count))
            names = [n.lower() if n.lower() in lower else n for n in map(str.strip, next(reader, []))]
            if len(names) > CLASSES:
                raise InputError(f"{file}: {len(names):,} columns, and the most is {CLASSES:,}")
            if len(set(names)) != len(names) or "" in names:
                raise InputError(f"{file}: the first row must name the columns, each by a name of its own")
            rows, lines = [], []
            for row in filter(any, reader):
                if len(row) != len(names):
                    raise InputError(f"{file}: row {reader.line_num}: {len(row)} values for {len(names)} columns")
                rows.append([value.strip() for value in row])
                lines.append(reader.line_num)
    except FileNotFoundError as error:
        raise InputError(f"DataOptions.root: no such manifest: {file}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {file}: it is damaged, or not a CSV or TSV file in UTF-8") from error
    if not lines:
        raise InputError(f"{file}: no images in it: expected a row of column names, and then one row per image")
    return Table(file, dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), lines)


def _targets(table: Table, names: Sequence[str], several: bool) -> tuple[Targets, tuple[str, ...]]:
    if several:
        advice = "not 0 or 1: name the label columns with DataOptions.labels"
        labels = table.numbers(names, {**BINARY, "": -1}, advice)
        for name, column in zip(names, labels.T, strict=True):
            if (column < 0).all():
                raise InputError(f"{table.file}: column {name} is blank: name the labels with DataOptions.labels")
        return np.where(labels < 0, UNKNOWN, labels).astype(np.uint8), tuple(names)
    values = table.columns[names[0]]
    numbers = all(value.isascii() and value.isdigit() and len(value) < 20 for value in values)
    classes = sorted(set(values), key=lambda value: (int(value) if numbers else 0, value))
    check_classes(f"{table.file}: column {names[0]}", classes)
    number = {value: i for i, value in enumerate(classes)}
    return np.array([number[value] for value in values], np.int64), tuple(classes)


def _splits(table: Table) -> list[str]:
    words = [value.lower() or "train" for value in table.columns.get("split", [""] * len(table.lines))]
    for row, word in enumerate(words):
        if word not in SPLITS:
            raise table.refuse(row, f"split is {word!r}, not train, val or test")
    return words


def _once(table: Table, files: Sequence[Path]) -> None:
    """Refuses an image that is listed twice: it could be trained on and tested with."""
    rows: dict[str, int] = {}
    for row, path in enumerate(files):
        first = rows.setdefault(os.path.abspath(path), row)
        if first != row:
            name, line = table.columns["path"][row], table.lines[first]
            raise table.refuse(row, f"{name} is in row {line} already: list each image once")


def chexpert(
    root: str, size: int = 64, uncertain: Uncertain = "ones", skip_bad: bool = False, fit: Fit = "crop"
) -> Source:
    """Returns images `[n, 3, size, size]` and targets uint8 `[n, 5]`.

    uncertain: what a label of -1 is: "ones" positive (U-Ones, as in the paper), "zeros" negative (U-Zeros), "mask" not
    known (U-Ignore); "ignore" drops the image.
    """
    if uncertain not in get_args(Uncertain):
        raise unknown("policy for uncertain labels", uncertain, get_args(Uncertain))
    base = user_path(root or ".")
    base = base / CHEXPERT if (base / CHEXPERT).is_dir() else base
    if not (base / "train.csv").is_file():
        raise InputError(
            f"DataOptions.root: no {CHEXPERT}/train.csv in {root!r}: 'perada data get chexpert' says how to get it"
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
        table.require(chosen, files)
    decoded = decode(files, base, size, skip_bad, fit=fit)
    meant = {"ones": 1, "mask": UNKNOWN}.get(uncertain, 0)
    targets = np.where(labels < 0, meant, labels).astype(np.uint8)[chosen][decoded.readable]
    return Source("chexpert", decoded.images, targets, DISEASES, *IMAGENET, **noted(files, decoded, fit))


def _below_archive(name: str) -> tuple[str, ...]:
    """Returns the parts of a `Path` without the archive's own folder, with which it starts."""
    parts = tuple(part for part in name.split("/") if part)
    return parts[1:] if parts and parts[0].startswith("CheXpert-v1.0") else parts
