"""Runs for TensorBoard (extra `tensorboard`): one file of events per run."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..runs.folder import write_atomic
from ..runs.rows import Evaluation

NAME = "events.out.tfevents.0.perada"  # TensorBoard looks for files with `tfevents` in their name


class EventWriter:
    """Writes the evaluations of one run to a folder, afterwards or while the run goes on.

    The file is written anew with `evaluations`, so that a resumed run has each round once; `add` appends to it.
    """

    def __init__(self, folder: str | Path, evaluations: Iterable[Evaluation] = ()) -> None:
        self.path = Path(folder) / NAME
        events = _records([None, *evaluations])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, events)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error

    def add(self, evaluation: Evaluation) -> None:
        with self.path.open("ab") as file:
            file.write(_records([evaluation]))


def write_events(runs: Sequence[tuple[str, Sequence[Evaluation]]], out: Path) -> None:
    """Writes runs (name and evaluations), each to its own folder below `out`. Existing files are replaced."""
    names = [name for name, _ in runs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"two runs are called {twice[0]}: write them into two folders, one after the other")
    for name, evaluations in runs:
        EventWriter(out / name, evaluations)


def _records(evaluations: Iterable[Evaluation | None]) -> bytes:
    """Returns events in TensorBoard's format; None is the head of a file. The clock is a run's seconds of training."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise InputError(f"files for TensorBoard need pip install 'perada[tensorboard]' ({error})") from error
    file = io.BytesIO()
    write = RecordWriter(file)
    for row in evaluations:
        event = Event(file_version="brain.Event:2")
        if row is not None:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row.as_dict()).items()]
            event = Event(step=row.round, wall_time=row.seconds, summary=Summary(value=values))
        write.write(event.SerializeToString())
    return file.getvalue()


def scalars(row: Mapping[str, Any], under: str = "") -> dict[str, float]:
    """Returns every number of a row by its place: `local_test/mean`, `clients/local_test/client-03`, `train_loss`."""
    found = dict[str, float]()
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"clients/{under}" if key == "per_client" else f"{under}{key}/")
        elif isinstance(value, int | float) and (under or key != "round"):
            found[f"{under}{key}"] = float(value)
    return found
