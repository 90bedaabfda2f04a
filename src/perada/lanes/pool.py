"""Several trainings as one: loops that run the same step on the same frozen weights run together.

A few more lanes cost a step almost nothing, so seeds, hyper-parameters and methods of a comparison share steps. Each
training is a thread that knows nothing of the others. Only one thread computes at a time. When all threads wait for a
loop, the last one runs the loops of all. Loops that no other training can share (a distillation) run first, and the
others wait. Otherwise a run without distillation would be a round ahead and would train alone.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from .model import LaneModel
from .state import State, repeat, stack
from .train import Job, Result, alone


@runtime_checkable
class Mergeable(Protocol):
    """Batches that can be merged with others."""

    def merge_key(self) -> Hashable:
        """Returns what batches must have in common to be merged; None if these cannot be merged."""

    def merged(self, others: Sequence[Any]) -> Any:
        """Returns batches for the lanes of all, starting with these."""


class Pool:
    """Runs the loops of several threads together.

    members: the number of threads. limit: the most lanes at once; fewer where a model's `room` says so.
    """

    def __init__(self, members: int, limit: int = 64) -> None:
        self.limit = limit
        self._turn = threading.Condition()
        self._members = members
        self._requests: dict[Future[Result], Job] = {}
        self._models: dict[Hashable, LaneModel] = {}
        self._stopped = False

    @contextmanager
    def member(self) -> Iterator[None]:
        """Surrounds everything that one of the threads does."""
        with self._turn:
            try:
                yield
            finally:
                self._members -= 1
                self._run_if_all_wait()

    def stop(self) -> None:
        """Interrupts every training at its next loop."""
        self._stopped = True  # without waiting for the turn, which may take long
        threading.Thread(target=self._wake, daemon=True).start()

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def run(self, job: Job) -> Result:
        """Runs a job. Returns what it would return alone, up to rounding."""
        if self._stopped:
            raise KeyboardInterrupt
        request: Future[Result] = Future()
        self._requests[request] = job
        self._run_if_all_wait()
        while not request.done():
            self._turn.wait()
            if self._stopped and not request.done():
                del self._requests[request]
                raise KeyboardInterrupt
        return request.result()

    def _run_if_all_wait(self) -> None:
        if not self._requests or len(self._requests) < self._members:
            return
        groups: dict[Hashable, dict[Future[Result], Job]] = {}
        for request, job in self._requests.items():
            groups.setdefault(self._alike(job), {})[request] = job
        single = {key: group for key, group in groups.items() if isinstance(key, int)}
        later = [group for key, group in groups.items() if single and key not in single]
        self._requests = {request: job for group in later for request, job in group.items()}
        for key, group in (single or groups).items():
            try:
                jobs = list(group.values())
                model = self._models.setdefault(key[0], jobs[0].model) if isinstance(key, tuple) else None
                for request, result in zip(group, _together(jobs, model, self.limit), strict=True):
                    request.set_result(result)
            except BaseException as error:
                for request in group:
                    request.set_exception(error)
        self._turn.notify_all()

    @staticmethod
    def _alike(job: Job) -> Hashable:
        """Returns what jobs must have in common to run as one; a number of its own for a job that runs alone."""
        if not isinstance(job.batches, Mergeable) or job.batches.merge_key() is None:
            return id(job)
        shapes = tuple(
            (i, n, tuple(t.shape[1:])) for i, s in enumerate(job.start) for n, t in {**s.params, **s.buffers}.items()
        )
        return job.model.signature, job.key, job.options, job.loss, shapes, job.batches.merge_key()


def _together(jobs: Sequence[Job], model: LaneModel | None, limit: int) -> list[Result]:
    """Returns the result of each job, computed by `model`, as one loop if there are several."""
    if len(jobs) == 1:
        return [alone(jobs[0] if model is None else replace(jobs[0], model=model))]
    start = tuple(
        stack(*(_own(s, j.lanes) for s, j in zip(states, jobs, strict=True))) if states[0].lanes else State()
        for states in zip(*(j.start for j in jobs), strict=True)
    )
    whole = replace(
        jobs[0],
        model=model or jobs[0].model,
        start=start,
        batches=jobs[0].batches.merged([j.batches for j in jobs[1:]]),  # type: ignore[attr-defined]
        steps=[n for j in jobs for n in j.steps],
        slots=min(n for n in (limit, *(j.slots for j in jobs), *(j.model.room for j in jobs)) if n),
    )
    result, out, first = alone(whole), [], 0
    for job in jobs:
        at = slice(first, first + job.lanes)
        states = tuple(
            s.map(lambda t, at=at: t[at].clone()) if own.lanes == job.lanes else own  # type: ignore[misc]
            for s, own in zip(result.states, job.start, strict=True)
        )
        out.append(Result(states, result.trace[: max(job.steps, default=0), at], result.finite[at]))
        first += job.lanes
    return out


def _own(state: State, lanes: int) -> State:
    """Returns a state with one copy per lane, also of a state that the job's lanes share."""
    return state if state.lanes == lanes else repeat(state, lanes)
