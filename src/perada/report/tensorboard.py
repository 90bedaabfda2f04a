"""Runs for TensorBoard (extra `tensorboard`): one file of events per run."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..runs.folder import write_atomic
from ..runs.moment import Evaluation

NAME = "events.out.tfevents.0.perada"  # TensorBoard looks for files with `tfevents` in their name


class EventWriter:
    """Writes the evaluations of one run to a folder, while the run goes on.

    after: the last round that counts of an existing file, for a resumed run; TensorBoard then forgets later rounds.
    """

    def __init__(self, folder: str | Path, after: int = 0) -> None:
        self.path = Path(folder) / NAME
        if after and self.path.is_file():
            self._append(_records(start=after + 1))
        else:
            _write(self.path, ())

    def add(self, evaluation: Evaluation) -> None:
        self._append(_records([evaluation]))

    def _append(self, records: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(records)


def write_events(runs: Sequence[tuple[str, Sequence[Evaluation]]], out: Path) -> None:
    """Writes runs (name and evaluations), each to its own folder below `out`. Existing files are replaced."""
    names = [name for name, _ in runs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"two runs are called {twice[0]}: write them into two folders, one after the other")
    for name, evaluations in runs:
        _write(out / name / NAME, evaluations)


def _write(path: Path, evaluations: Iterable[Evaluation]) -> None:
    records = _records(evaluations, head=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, records)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _records(evaluations: Iterable[Evaluation] = (), head: bool = False, start: int | None = None) -> bytes:
    """Returns events in TensorBoard's format; the clock is a run's seconds of training.

    head: begins a file. start: the round at which a resumed run goes on.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise InputError(f"files for TensorBoard need pip install 'perada[tensorboard]' ({error})") from error
    events = [Event(file_version="brain.Event:2")] if head else []
    if start is not None:
        events.append(Event(step=start, session_log=SessionLog(status=SessionLog.START)))
    for row in evaluations:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row.as_dict()).items()]
        events.append(Event(step=row.round, wall_time=row.seconds, summary=Summary(value=values)))
    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
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
