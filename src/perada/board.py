"""Metrics for TensorBoard (`run.tensorboard`, extra `tensorboard`): event files beside metrics.jsonl, made from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from .errors import InputError
from .runs import RunFolder

Show = Callable[[Mapping[str, Any]], None]
FOLDER = "tensorboard"


def check_board(wanted: bool) -> None:
    if wanted and not find_spec("tensorboard"):
        raise InputError("run.tensorboard=true needs pip install 'perada[tensorboard]'")


@contextmanager
def board(folder: RunFolder, wanted: bool) -> Iterator[Show]:
    """Shows rows of metrics.jsonl; those that are there already are shown at once, and what was shown before a run was
    interrupted is forgotten, as rounds may be measured again."""
    check_board(wanted)
    if not wanted:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder.path / FOLDER, ignore_errors=True)
    with SummaryWriter(str(folder.path / FOLDER)) as writer:

        def show(row: Mapping[str, Any]) -> None:
            for tag, value in scalars(row).items():
                writer.add_scalar(tag, value, row["round"])
            writer.flush()

        for row in folder.metrics():
            show(row)
        yield show


def scalars(row: Mapping[str, Any], under: str = "") -> dict[str, float]:
    """Every number of a row by its place in it: `local_test/mean`, `clients/local_test/client-03`, `train_loss`."""
    found = dict[str, float]()
    for key, value in row.items():
        if key == "per_client":
            found |= scalars(value, f"clients/{under}")
        elif isinstance(value, Mapping):
            found |= scalars(value, f"{under}{key}/")
        elif isinstance(value, int | float) and (under or key != "round"):
            found[f"{under}{key}"] = float(value)
    return found
