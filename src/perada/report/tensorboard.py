"""Runs for TensorBoard (extra `tensorboard`): one file of events per run."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..runs.files import write_output
from ..runs.moment import Evaluation

NAME = "events.out.tfevents.0.perada"  # TensorBoard looks for files with `tfevents` in their name


class EventWriter:
    """Writes the evaluations of one run to a folder, while the run goes on. The clock is its seconds of training.

    after: the last round that counts of an existing file, for a resumed run; TensorBoard then forgets later rounds.
    """

    def __init__(self, folder: str | Path, after: int = 0) -> None:
        self.path = Path(folder) / NAME
        if after and self.path.is_file():
            self._append(step=after + 1, session_log={"status": "START"})
        else:
            write_output(self.path, _record(file_version="brain.Event:2"), parents=True)

    def add(self, evaluation: Evaluation) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars(evaluation.as_dict()).items()]
        self._append(step=evaluation.round, wall_time=evaluation.seconds, summary={"value": values})

    def _append(self, **fields: Any) -> None:
        with self.path.open("ab") as file:
            file.write(_record(**fields))


def write_events(runs: Sequence[tuple[str, Sequence[Evaluation]]], out: Path) -> None:
    """Writes runs (name and evaluations), each to its own folder below `out`. Existing files are replaced."""
    names = [name for name, _ in runs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"two runs are called {twice[0]}: write them into two folders, one after the other")
    for name, evaluations in runs:
        writer = EventWriter(out / name)
        for evaluation in evaluations:
            writer.add(evaluation)


def _record(**fields: Any) -> bytes:
    """Returns one event in TensorBoard's format."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise InputError(f"files for TensorBoard need pip install 'perada[tensorboard]' ({error})") from error
    file = io.BytesIO()
    RecordWriter(file).write(Event(**fields).SerializeToString())
    return file.getvalue()


def scalars(row: Mapping[str, Any], under: str = "") -> dict[str, float]:
    """Returns every number of a row by its place: `local_test/mean`, `clients/local_test/client-03`, `train_loss`."""
    numbers = dict[str, float]()
    for key, value in row.items():
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"clients/{under}" if key == "per_client" else f"{under}{key}/")
            if key == "per_client":  # over how many the mean is
                numbers[f"{under}clients"] = float(sum(v is not None for v in value.values()))
        elif isinstance(value, int | float) and (under or key != "round"):
            numbers[f"{under}{key}"] = float(value)
    return numbers
