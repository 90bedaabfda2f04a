"""From the first round to the last in a run folder: saving, evaluating, telling callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ..callbacks import Callback, Metrics
from ..client.cohort import SPLITS, LocalCohort
from ..experiment import Experiment
from .folder import RunFolder
from .rows import Evaluation

MARKS = {"gathered": "gathered", "trained": "updated"}  # what the boundaries inside a round are called
PAUSE = 15.0  # seconds from a checkpoint to the next, on a GPU: taking one there stops the training for a moment


class Saver:
    """Writes checkpoints, one after another: `beside` the training, where that leaves a processor idle. Rounds may be
    short there, so that not all of them are saved."""

    def __init__(self, beside: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, "perada-save") if beside else None
        self._last: Future[None] | None = None
        self._now, self._at = now, now()

    def due(self) -> bool:
        """Whether one may be taken without waiting for the one before."""
        written = self._last is None or self._last.done()
        return self._thread is None or (written and self._now() >= self._at + PAUSE)

    def take(self, write: Callable[[], None]) -> None:
        """Waits for the one before, and raises what went wrong with it."""
        self._wait()
        self._at = self._now()
        if self._thread is None:
            write()
        else:
            self._last = self._thread.submit(write)

    def close(self) -> None:
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


def train_in(
    experiment: Experiment,
    folder: RunFolder,
    callbacks: Sequence[Callback] = (),
    splits: Sequence[str] = SPLITS,
    stage: str = "training",
) -> Evaluation:
    """Trains to the last round, saving and evaluating (on `splits`) on the way; returns the last evaluation.

    An interruption saves the last finished round before it is passed on.
    """
    local, every = isinstance(experiment.cohort, LocalCohort), experiment.options.checkpoint_every
    rows = {row.round: row for row in folder.evaluations()}
    saver = Saver(beside=local and experiment.device.type != "cpu")
    listeners = [Metrics(folder), *callbacks]
    try:
        for callback in listeners:
            callback.start(experiment)
        for step in experiment.progress(rows, splits):
            began = step.round - (step.event == "trained")  # a round is called by its number when it began
            if step.event in MARKS:
                experiment.mark(MARKS[step.event], began)
            if step.row is not None:
                rows[step.round] = step.row
                for callback in listeners:
                    callback.evaluation(step.row)
                experiment.mark("measured", step.round)
            if step.event == "round":
                for callback in listeners:
                    callback.round(replace(step, row=rows.get(step.round), stage=stage))
            last = step.round >= experiment.last_round
            if step.event == "trained" and (last or not local or (step.round % every == 0 and saver.due())):
                saver.take(experiment.snapshot(folder))
                experiment.mark("saved", began)
            if step.event == "finished":
                saver.take(experiment.snapshot(folder))
                experiment.mark("finished", began)
        for callback in listeners:
            callback.end(experiment)
        return rows[experiment.now.round]
    except KeyboardInterrupt:
        if experiment.now.changed:
            saver.take(experiment.snapshot(folder))
        raise
    finally:
        saver.close()
