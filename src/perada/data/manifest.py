"""Your own images by a table: a CSV or TSV file `path,site,split,label…`, one row an image.

- `path`: relative to the table's folder, or absolute;
- `site`, optional: who holds the image; without it sites can only be simulated (data.partition=dirichlet);
- `split`, optional: train, val or test; blank is train;
- labels: a column `label`, or the only column left, holds class names or numbers (one class an image; beside a
  column named `label` further ones are notes and passed over). Several columns left are labels of 0 and 1 each.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .arrays import SPLITS
from .federation import Source
from .images import IMAGENET, Mask, decode, names_of, require_files, unread

KNOWN = ("path", "site", "split")
_BINARY = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


@dataclass(frozen=True)
class _Table:
    """The columns by name (those of `KNOWN` in small letters), and each row's line number."""

    file: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def refuse(self, row: int, why: str) -> InputError:
        return InputError(f"{self.file}: row {self.lines[row]}: {why}")


def manifest(
    path: str, size: int = 64, skip_bad: bool = False, labels: Sequence[str] = (), site_column: str = "site"
) -> Source:
    """Images `[n, 3, size, size]`; targets int64 `[n]`, or uint8 `[n, labels]` with several label columns.

    labels: the label columns, where there are other columns beside them; site_column: whose values are the sites.
    """
    table = _read(Path(path).expanduser())
    if site_column != "site":
        if site_column not in table.columns:
            raise InputError(f"{table.file}: no column {site_column!r} (data.site): it has {', '.join(table.columns)}")
        table.columns["site"] = table.columns.pop(site_column)
    if "path" not in table.columns:
        raise InputError(f"{table.file}: no column 'path': expected path,site,label or path,site,split,label…")
    names = [name for name in table.columns if name not in KNOWN]
    names = ["label"] if "label" in names else names
    for name in labels:
        if name not in table.columns:
            raise InputError(f"{table.file}: no column {name!r} (data.labels): it has {', '.join(table.columns)}")
    names = list(labels) or names
    if not names:
        raise InputError(f"{table.file}: no column 'label': expected path,site,label or path,site,split,label…")
    for column in ("path", "site"):
        for row, value in enumerate(table.columns.get(column, ())):
            if not value:
                raise table.refuse(row, f"{column} is blank")
    targets, classes = _one_label(table, names[0]) if len(names) == 1 else _labels(table, names)
    splits = _splits(table)
    files = [table.file.parent / name for name in table.columns["path"]]
    _once(table, files)
    if not skip_bad:
        require_files(table.file, table.lines, files)
    images, kept = decode(files, table.file.parent, size, skip_bad)
    site = np.array(table.columns["site"])[kept] if "site" in table.columns else None
    test, val = (_mask(splits, name, kept) for name in ("test", "val"))
    source = Source(table.file.stem, images, targets[kept], classes, *IMAGENET, test=test, site=site, val=val)
    return replace(source, names=names_of(files, kept), skipped=unread(files, kept))


def _read(file: Path) -> _Table:
    try:
        with file.open(newline="", encoding="utf-8-sig") as f:
            header = f.readline()
            f.seek(0)
            # By what the header holds and not by the file's ending: spreadsheets write ';' into a .csv, too.
            reader = csv.reader(f, delimiter=max(",\t;", key=header.count))
            names = [_known(name) for name in next(reader, [])]
            if len(set(names)) != len(names) or "" in names:
                raise InputError(f"{file}: the first row must name the columns, each by a name of its own")
            columns: dict[str, list[str]] = {name: [] for name in names}
            lines = []
            for row in reader:
                if not any(row):
                    continue
                if len(row) != len(names):
                    raise InputError(f"{file}: row {reader.line_num}: {len(row)} values for {len(names)} columns")
                for name, value in zip(names, row, strict=True):
                    columns[name].append(value.strip())
                lines.append(reader.line_num)
    except FileNotFoundError as error:
        raise InputError(f"data.root: no such manifest: {file}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {file}: damaged, or no CSV or TSV file in UTF-8") from error
    if not lines:
        raise InputError(f"{file}: no images in it: expected a row path,site,label and then one row an image")
    return _Table(file, columns, lines)


def _known(name: str) -> str:
    """Column names in small letters where they mean something to us; others are labels' own names."""
    name = name.strip()
    return name.lower() if name.lower() in (*KNOWN, "label") else name


def _one_label(table: _Table, name: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    values = table.columns[name]
    for row, value in enumerate(values):
        if not value:
            raise table.refuse(row, f"{name} is blank")
    found = set(values)
    numbers = all(value.isascii() and value.isdigit() for value in found)
    classes = sorted(found, key=lambda value: (int(value), value)) if numbers else sorted(found)
    number = {value: i for i, value in enumerate(classes)}
    return np.array([number[value] for value in values], np.int64), tuple(classes)


def _labels(table: _Table, names: Sequence[str]) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    for name in names:
        for row, value in enumerate(table.columns[name]):
            if value not in _BINARY:
                raise table.refuse(row, f"{name} is {value!r}, not 0 or 1: name the label columns with data.labels")
    columns = [[_BINARY[value] for value in table.columns[name]] for name in names]
    return np.array(columns, np.uint8).T.copy(), tuple(names)


def _splits(table: _Table) -> NDArray[np.str_] | None:
    if "split" not in table.columns:
        return None
    spoken = [value.lower() or "train" for value in table.columns["split"]]
    for row, value in enumerate(spoken):
        if value not in SPLITS:
            raise table.refuse(row, f"split is {value!r}, not train, val or test")
    return np.array([SPLITS[value] for value in spoken])


def _once(table: _Table, files: Sequence[Path]) -> None:
    """Refuse an image that is listed twice: it could be trained on and tested with."""
    rows: dict[str, int] = {}
    for row, path in enumerate(files):
        first = rows.setdefault(os.path.abspath(path), row)
        if first != row:
            name, line = table.columns["path"][row], table.lines[first]
            raise table.refuse(row, f"{name} is in row {line} already: list each image once")


def _mask(splits: NDArray[np.str_] | None, name: str, kept: Mask) -> Mask | None:
    """Which images are of a split, None where none is."""
    mask = None if splits is None else np.asarray(splits == name)[kept]
    return mask if mask is not None and mask.any() else None
