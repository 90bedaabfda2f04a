"""The trainings of a plan: one after another, in several processes (CPU), or over one pool of lanes (GPU)."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection

import torch

from ..callbacks import Callback, OnRound
from ..experiment import Say
from ..lanes import Pool
from ..lanes.machine import cores, keep_memory
from ..runs.moment import Progress
from .plan import Plan

OnRun = Callable[[int, int, str], None]  # finished runs, all runs, the name of the one that begins
Train = Callable[[str, Sequence[Callback], Say, Pool | None], None]
Worker = AbstractContextManager[Callable[[str], None]]  # entered by a thread; trains one name after another


def jobs_for(runs: int, device: torch.device) -> int:
    """Returns how many runs to train at once.

    On a CPU that is one process per core, but at least two runs per process, which takes seconds to start, and at most
    four, because of their memory. On a GPU the runs share a process and its lanes.
    """
    return min(runs, 6) if shares(device) else max(1, min(cores(), runs // 2, 4))


def shares(device: torch.device) -> bool:
    """Returns whether several runs on this device share a process and its lanes."""
    return device.type == "cuda"


def train_all(
    plan: Plan,
    train: Train,
    jobs: int,
    device: torch.device,
    on_run: OnRun,
    callbacks: Sequence[Callback],
    say: Say,
    factory: Callable[[], Train] | None = None,
) -> None:
    """Trains what is not finished of a plan, `jobs` at once (0: as many as is sensible).

    factory: returns `train` in another process.
    """
    names, finished = plan.names, plan.finished()
    left = [n for n in names if n not in finished]
    say_once = cache(say)  # several runs would say the same about their data

    def tell(text: str) -> None:
        on_run(len(plan.finished()), len(names), text)

    def done(name: str) -> None:
        plan.after_each()
        tell("done" if len(plan.finished()) == len(names) else f"{name} done")

    def pooled(name: str, pool: Pool) -> None:
        def report(progress: Progress) -> None:
            _warn(name, progress, say_once)
            tell(f"{name} and others, round {progress.round} of {progress.rounds}")

        train(name, [OnRound(report)], say_once, pool)

    tell(left[0] if left else "done")
    jobs = jobs or jobs_for(len(left), device)
    if jobs > 1 and shares(device):
        share_lanes(left, jobs, pooled, done)
    elif jobs > 1 and factory is not None:
        share_cores(left, jobs, factory, done, say_once)
    else:
        for name in left:
            tell(name)
            train(name, callbacks, say_once, None)
            done(name)


def _warn(name: str, progress: Progress, say: Say) -> None:
    """Says which clients a run goes on without."""
    for client in progress.failed:
        say(f"warning: {name}: {client}: training stopped being finite: this round goes on without it")


def share_lanes(
    names: Sequence[str], jobs: int, train: Callable[[str, Pool], None], done: Callable[[str], None]
) -> None:
    """Trains `names`, `jobs` at a time, in threads that take turns: `train(name, pool)`."""
    many = min(jobs, len(names))
    pool = Pool(many)

    @contextmanager
    def worker() -> Iterator[Callable[[str], None]]:
        with pool.member():
            yield lambda name: train(name, pool)

    _in_threads(names, [worker() for _ in range(many)], done, pool.stop)


def share_cores(
    names: Sequence[str], jobs: int, factory: Callable[[], Train], done: Callable[[str], None], say: Say
) -> None:
    """Trains `names` in processes; each makes its `train` once, with `factory`."""
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(min(jobs, len(names)))]
    processes = [context.Process(target=_process, args=(far_end, factory)) for _, far_end in pipes]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; this one tells the others
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, before)

    @contextmanager
    def worker(at: int) -> Iterator[Callable[[str], None]]:
        pipe, far_end = pipes[at]
        far_end.close()  # so that the pipe ends when the process does
        try:
            yield lambda name: _ask(pipe, name, say)
        finally:
            with suppress(OSError):  # a process that was killed
                pipe.send(None)
            processes[at].join()

    def stop() -> None:
        for process in processes:
            process.terminate()

    _in_threads(names, [worker(at) for at in range(len(pipes))], done, stop)


def _in_threads(
    names: Sequence[str], workers: Sequence[Worker], done: Callable[[str], None], stop: Callable[[], None]
) -> None:
    """Lets a thread per worker train the next of `names` until none is left.

    The first failure or an interrupt stops the others as Ctrl-C would, so that they save their work.
    """
    left, failures, lock = iter(names), list[BaseException](), threading.Lock()

    def fail(error: BaseException) -> None:
        failures.append(error)
        if len(failures) == 1:
            stop()

    def work(worker: Worker) -> None:
        with worker as train:
            for name in left:
                try:
                    if not failures:
                        train(name)
                        with lock:
                            done(name)
                except BaseException as error:
                    fail(error)

    with ThreadPoolExecutor(len(workers), "perada-run") as threads:
        running = [threads.submit(work, worker) for worker in workers]
        try:
            for future in running:
                future.result()
        except BaseException as error:
            fail(error)
    if failures:
        raise failures[0]


def _ask(pipe: Connection, name: str, say: Say) -> None:
    """Lets a process train a run, and passes on what it says; raises what it raises."""
    try:
        pipe.send(name)
        while (answer := pipe.recv()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            say(answer)
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError("a training process was killed (out of memory?)") from error


def _process(pipe: Connection, factory: Callable[[], Train]) -> None:
    """Trains the runs that the pipe names, in a process of its own, until it says None."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_follow, daemon=True).start()
    keep_memory()
    torch.set_num_threads(1)
    try:
        train = factory()
        for name in iter(pipe.recv, None):
            train(name, [OnRound(partial(_warn, name, say=pipe.send))], pipe.send, None)
            pipe.send(None)
    except KeyboardInterrupt:
        with suppress(OSError):  # the other process may not wait for an answer
            pipe.send(KeyboardInterrupt())
    except Exception as error:
        pipe.send(error)


def _follow() -> None:
    """Ends this process when the one that started it ends, for whatever reason."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # safe: files are written atomically
