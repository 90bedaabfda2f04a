"""Your own images by a table: a CSV or TSV file `path,site,split,label…`, one row per image.

- `path`: relative to the table's folder, or absolute;
- `site`, optional: who holds the image; without it sites can only be simulated (partition=dirichlet);
- `split`, optional: train, val or test; blank is train;
- labels: a column `label`, or the only column left, has class names or numbers (one class per image; other columns
  beside one named `label` are ignored). Several columns left are labels of 0 and 1 each.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .arrays import SPLITS, split_masks
from .images import IMAGENET, decode, image_names, require_files
from .source import Source, Targets

KNOWN = ("path", "site", "split")
BINARY = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


@dataclass(frozen=True)
class Table:
    """The columns of a CSV or TSV file by name, and the line number of each row."""

    file: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def refuse(self, row: int, why: str) -> InputError:
        return InputError(f"{self.file}: row {self.lines[row]}: {why}")

    def numbers(self, names: Sequence[str], known: dict[str, int], advice: str) -> NDArray[np.int8]:
        """Returns the columns as numbers `[rows, names]`, where each value is one of `known`."""
        for name in names:
            for row, value in enumerate(self.columns[name]):
                if value not in known:
                    raise self.refuse(row, f"{name} is {value!r}, {advice}")
        return np.array([[known[value] for value in self.columns[name]] for name in names], np.int8).T.copy()


def manifest(
    path: str, size: int = 64, skip_bad: bool = False, labels: Sequence[str] = (), site_column: str = "site"
) -> Source:
    """Returns images `[n, 3, size, size]` and targets, int64 `[n]`, or uint8 `[n, labels]` with several label columns.

    labels: the label columns, if there are other columns beside them; site_column: whose values are the sites.
    """
    table = read_table(Path(path).expanduser(), (*KNOWN, "label"))
    has = f"it has {', '.join(table.columns)}"
    if site_column != "site":
        if site_column not in table.columns:
            raise InputError(f"{table.file}: no column {site_column!r} (DataOptions.site): {has}")
        table.columns["site"] = table.columns.pop(site_column)
    if "path" not in table.columns:
        raise InputError(f"{table.file}: no column 'path': expected path,site,label or path,site,split,label…")
    for name in labels:
        if name not in table.columns:
            raise InputError(f"{table.file}: no column {name!r} (DataOptions.labels): {has}")
    names = [name for name in table.columns if name not in KNOWN]
    names = list(labels) or (["label"] if "label" in names else names)
    if not names:
        raise InputError(f"{table.file}: no column 'label': expected path,site,label or path,site,split,label…")
    for column in ("path", "site", *(names if len(names) == 1 else ())):
        for row, value in enumerate(table.columns.get(column, ())):
            if not value:
                raise table.refuse(row, f"{column} is blank")
    targets, classes = _targets(table, names)
    splits = _splits(table)
    files = [table.file.parent / name for name in table.columns["path"]]
    _once(table, files)
    if not skip_bad:
        require_files(table.file, table.lines, files)
    images, kept = decode(files, table.file.parent, size, skip_bad)
    site = np.array(table.columns["site"])[kept] if "site" in table.columns else None
    test, val = split_masks(list(compress(splits, kept)))
    stem = table.file.stem
    return Source(stem, images, targets[kept], classes, *IMAGENET, test, site, val, *image_names(files, kept))


def read_table(file: Path, lower: Sequence[str] = ()) -> Table:
    """Returns the table in a file; column names in `lower` may be written in capitals, too."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as f:
            header = f.readline()
            f.seek(0)
            # By what the header has and not by the file's ending: spreadsheets also write ';' into a .csv.
            reader = csv.reader(f, delimiter=max(",\t;", key=header.count))
            names = [n.lower() if n.lower() in lower else n for n in map(str.strip, next(reader, []))]
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


def _targets(table: Table, names: Sequence[str]) -> tuple[Targets, tuple[str, ...]]:
    if len(names) > 1:
        advice = "not 0 or 1: name the label columns with DataOptions.labels"
        return table.numbers(names, BINARY, advice).astype(np.uint8), tuple(names)
    values = table.columns[names[0]]
    numbers = all(value.isascii() and value.isdigit() for value in values)
    classes = sorted(set(values), key=lambda value: (int(value) if numbers else 0, value))
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
