"""Runs for TensorBoard (extra `tensorboard`): one file of events a run, made from metrics.jsonl."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..runs.folder import write_atomic

NAME = "events.out.tfevents.0.perada"  # TensorBoard looks for the middle of it


def write_events(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], out: Path) -> None:
    """`runs`: name and rows. Each has its folder below `out`; what was there of it is replaced."""
    names = [name for name, _ in runs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"two runs are called {twice[0]}: write them into two folders, one after the other")
    made = {name: events(rows) for name, rows in runs}
    for name, data in made.items():
        path = out / name / NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error


def events(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """TensorBoard's own format; its clock is a run's seconds of training."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise InputError(f"files for TensorBoard need pip install 'perada[tensorboard]' ({error})") from error
    file = io.BytesIO()
    write = RecordWriter(file)
    write.write(Event(file_version="brain.Event:2").SerializeToString())
    for row in rows:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        event = Event(step=row["round"], wall_time=row.get("seconds") or 0.0, summary=Summary(value=values))
        write.write(event.SerializeToString())
    return file.getvalue()


def scalars(row: Mapping[str, Any], under: str = "") -> dict[str, float]:
    """Every number of a row by its place in it: `local_test/mean`, `clients/local_test/client-03`, `train_loss`."""
    found = dict[str, float]()
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"clients/{under}" if key == "per_client" else f"{under}{key}/")
        elif isinstance(value, int | float) and (under or key != "round"):
            found[f"{under}{key}"] = float(value)
    return found
