"""Callbacks: they see what happens in a training and may stop it, but never change its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError
from .runs.moment import Evaluation

if TYPE_CHECKING:
    from .experiment import Experiment
    from .runs.folder import RunFolder
    from .runs.moment import Progress


LIKE_HOOKS = ("on_", "start", "round", "eval", "end")  # how a misspelled hook begins


class Callback:
    """Listens to a training; every hook does nothing unless a subclass has its own.

    A callback stops a run with `experiment.stop()`: the next round is then the last one. Other public methods of a
    subclass must not begin like a hook, since a misspelled hook would never be called.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in vars(cls).items():
            if callable(value) and name.startswith(LIKE_HOOKS) and not hasattr(Callback, name):
                raise InputError(
                    f"{cls.__name__}.{name} is never called: the hooks are start, round, evaluation and end; "
                    f"rename it, to _{name} if it is a method of your own"
                )

    def start(self, experiment: Experiment) -> None:
        """Called when the training begins or continues."""

    def round(self, progress: Progress) -> None:
        """Called after a round, and after its evaluation if there is one."""

    def evaluation(self, row: Evaluation) -> None:
        """Called with the scores of the clients' models."""

    def end(self, experiment: Experiment) -> None:
        """Called after the last round, but not if the training is interrupted."""


def check_callbacks(callbacks: object) -> None:
    """Refuses anything but a list of callbacks."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(c, Callback) for c in callbacks):
        raise InputError("callbacks must be a list of objects, such as [callbacks.EarlyStopping()]")


class OnRound(Callback):
    """Calls a function after every round."""

    def __init__(self, call: Callable[[Progress], None]) -> None:
        self.call = call

    def round(self, progress: Progress) -> None:
        self.call(progress)


class Metrics(Callback):
    """Appends every evaluation to a run folder's metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def evaluation(self, row: Evaluation) -> None:
        self.folder.append_metrics(row.as_dict())


class TensorBoard(Callback):
    """Writes every evaluation as TensorBoard events, for `tensorboard --logdir FOLDER`; extra `tensorboard`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder

    def start(self, experiment: Experiment) -> None:
        from .report.tensorboard import EventWriter

        self.writer = EventWriter(self.folder, after=experiment.now.round)

    def evaluation(self, row: Evaluation) -> None:
        self.writer.add(row)


class EarlyStopping(Callback):
    """Stops when the mean of a score has not risen for some evaluations; by default the clients' validation score."""

    def __init__(self, patience: int = 5, score: str = "local_val") -> None:
        self.patience, self.score = patience, score

    def start(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.best, self.waited = -1.0, 0

    def evaluation(self, row: Evaluation) -> None:
        scores = row.scores.get(self.score)
        mean = None if scores is None else scores.mean
        if mean is None or mean > self.best:
            self.best, self.waited = self.best if mean is None else mean, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.experiment.stop()
