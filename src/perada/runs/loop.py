"""From the first round to the last: saving, evaluating, reporting on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..experiment import Simulation
from .folder import RunFolder


@dataclass(frozen=True)
class Progress:
    """What happened in a round, for progress bars and logs."""

    round: int
    rounds: int
    metrics: dict[str, Any] | None  # where this round was evaluated
    failed: tuple[str, ...]  # clients whose training stopped being finite
    stage: str = "training"  # or pretraining


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


def run(
    sim: Simulation,
    folder: RunFolder,
    on_round: Callable[[Progress], None] = lambda progress: None,
    splits: Sequence[str] = ("local", "val", "global"),
) -> dict[str, Any]:
    """Train to the last round, saving and evaluating (on `splits`) on the way; returns the last evaluation.

    An interruption saves the last finished round before it goes on up.
    """
    options, last = sim.config.run, sim.config.train.rounds
    rows = {r["round"]: r for r in folder.metrics()}
    saver = Saver(beside=sim.model.device.type != "cpu")
    try:
        while True:
            at = sim.now.round
            if at == last and not sim.now.finished:
                sim.finish()
                if sim.now.finished:
                    saver.take(sim.snapshot(folder))
            due = at == last or (at and at % options.eval_every == 0)
            if due and at not in rows:  # it may be there already: the run was stopped just after it
                rows[at] = sim.evaluate(splits)
                folder.append_metrics(rows[at])
            on_round(Progress(at, last, rows.get(at), tuple(sim.now.last.get("failed", ()))))
            if at >= last:
                return rows[at]
            sim.step()
            if sim.now.round == last or (sim.now.round % options.checkpoint_every == 0 and saver.due()):
                saver.take(sim.snapshot(folder))
    except KeyboardInterrupt:
        if sim.now.changed:
            saver.take(sim.snapshot(folder))
        raise
    finally:
        saver.close()
