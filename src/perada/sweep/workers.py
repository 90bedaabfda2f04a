"""Trainings of a plan: one after another, several processes where there are cores, or one pool of lanes on a GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

import torch

from ..callbacks import Callback, OnRound
from ..errors import Interrupted, RunError
from ..experiment import Say
from ..lanes import Pool
from ..lanes.machine import cores, keep_memory
from ..runs.moment import Progress

OnRun = Callable[[int, int, str], None]  # finished runs, all runs, the name of the one that begins
Train = Callable[[str, Sequence[Callback], Say, Pool | None], None]


def jobs_for(runs: int, device: torch.device) -> int:
    """Returns how many runs to train at once.

    On a CPU that is one process per core, but at least two runs per process, which takes seconds to start, and at most
    four, because of their memory. On a GPU the runs share a process and its lanes.
    """
    return min(runs, 6) if shares(device) else max(1, min(cores(), runs // 2, 4))


def shares(device: torch.device) -> bool:
    """Returns whether several runs there share a process and their lanes."""
    return device.type == "cuda"


@dataclass
class Trainings:
    """The trainings of a plan. `after` is called after each of them."""

    names: Sequence[str]
    finished: Callable[[], Collection[str]]
    train: Train
    after: Callable[[], None] = lambda: None

    def run(
        self,
        jobs: int,
        device: torch.device,
        on_run: OnRun,
        callbacks: Sequence[Callback],
        say: Say,
        worker: tuple[Any, ...] | None = None,
    ) -> None:
        """Trains what is not finished, `jobs` at once (0: as many as is sensible).

        worker: a function that returns `train` in a process of its own, and its arguments.
        """
        finished = self.finished()
        left = [n for n in self.names if n not in finished]
        speak = cache(say)  # several runs would say the same of their data

        def tell(text: str) -> None:
            on_run(len(self.finished()), len(self.names), text)

        def done(name: str) -> None:
            self.after()
            tell("done" if len(self.finished()) == len(self.names) else f"{name} done")

        def pooled(name: str, pool: Pool) -> None:
            def heard(progress: Progress) -> None:
                _warn(name, speak, progress)
                tell(f"{name} and others, round {progress.round} of {progress.rounds}")

            self.train(name, [OnRound(heard)], speak, pool)

        tell(left[0] if left else "done")
        jobs = jobs or jobs_for(len(left), device)
        if jobs > 1 and shares(device):
            share_lanes(left, jobs, pooled, done)
        elif jobs > 1 and worker is not None:
            work_through(left, jobs, *worker, done=done, say=speak)
        else:
            for name in left:
                tell(name)
                self.train(name, callbacks, speak, None)
                done(name)


def _warn(name: str, say: Say, progress: Progress) -> None:
    for client in progress.failed:
        say(f"warning: {name}: {client}: training stopped being finite; its last state is kept")


def share_lanes(
    names: Sequence[str],
    jobs: int,
    train: Callable[[str, Pool], None],
    done: Callable[[str], None],
) -> None:
    """Trains `names`, `jobs` at a time, in threads that take turns: `train(name, pool)`.

    The first failure or an interrupt ends the others as Ctrl-C would, so that they save their work.
    """
    many, failures = min(jobs, len(names)), list[BaseException]()
    pool, left = Pool(many), iter(names)

    def work() -> None:
        with pool.member():
            for name in left:  # safe without a lock: one thread runs at a time
                try:
                    if not failures:
                        train(name, pool)
                        done(name)
                except BaseException as error:
                    failures.append(error)
                    pool.stop()

    with ThreadPoolExecutor(many, "perada-run") as threads:
        running = [threads.submit(work) for _ in range(many)]
        try:
            for future in running:
                future.result()
        except BaseException as error:
            failures.insert(0, error)
            pool.stop()
    real = [e for e in failures if not isinstance(e, (KeyboardInterrupt, Interrupted))]
    if failures:
        raise (real or failures)[0]


def work_through(
    names: Sequence[str],
    jobs: int,
    worker: Callable[..., Train],
    *args: Any,
    done: Callable[[str], None],
    say: Say,
) -> None:
    """Trains `names` in processes: each makes `worker(*args)` once, and calls it with one name after another.

    The first failure or an interrupt ends the others as Ctrl-C would, so that they save their work.
    """
    context = get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for name in [*names, *[None] * jobs]:
        tasks.put(name)
    processes = [context.Process(target=_process, args=(tasks, results, worker, args)) for _ in range(jobs)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; this one tells the others
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, before)
    try:
        left = len(names)
        while left:
            what, text = _next(results, processes)
            if isinstance(what, BaseException):
                raise what
            if what == "said":
                say(text)
            else:
                left -= 1
                done(text)
    except BaseException:
        for process in processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGTERM)
        raise
    finally:
        for process in processes:
            process.join()


def _next(results: Any, processes: Sequence[BaseProcess]) -> tuple[str | BaseException, str]:
    while True:
        try:
            result: tuple[str | BaseException, str] = results.get(timeout=1.0)
            return result
        except Empty:
            if any(p.exitcode not in (None, 0) for p in processes):
                raise RunError(
                    "a training process was killed (out of memory?); what it had finished is saved"
                ) from None


def _follow() -> None:
    """Ends this process with the one that started it, whatever ended that: else this one would be left over."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # safe: files are written atomically


def _process(tasks: Any, results: Any, worker: Callable[..., Train], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_follow, daemon=True).start()
    keep_memory()
    torch.set_num_threads(1)
    try:
        train = worker(*args)

        def say(text: str) -> None:
            results.put(("said", text))

        for name in iter(tasks.get, None):
            train(name, [OnRound(partial(_warn, name, say))], say, None)
            results.put(("done", name))
    except KeyboardInterrupt:
        results.put((KeyboardInterrupt(), ""))
    except Exception as error:
        results.put((error, ""))
