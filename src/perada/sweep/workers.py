"""Several runs of a comparison at once: a process each where there are cores, in one pool of lanes on a GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any

import torch

from ..errors import Interrupted, RunError
from ..lanes import Pool
from ..machine import cores, keep_memory

Work = Callable[[str, Callable[[str], None]], None]


def jobs_for(runs: int, device: torch.device) -> int:
    """A core each, two runs a process at least (a process takes seconds to start), four processes at most (memory). On
    a GPU the runs share a process and its lanes."""
    return min(runs, 6) if shares(device) else max(1, min(cores(), runs // 2, 4))


def shares(device: torch.device) -> bool:
    """Whether several runs there share a process and their lanes."""
    return device.type == "cuda"


def share_lanes(
    names: Sequence[str],
    jobs: int,
    train: Callable[[str, Pool], None],
    done: Callable[[str], None],
) -> None:
    """Do all of `names`, `jobs` at a time, in threads that take turns: `train(name, pool)`.

    The first failure or an interrupt ends the others as Ctrl-C would, so that they save what they have.
    """
    many, failures = min(jobs, len(names)), list[BaseException]()
    pool, left = Pool(many), iter(names)

    def work() -> None:
        with pool.member():
            for name in left:  # only one thread has its turn
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
            for one in running:
                one.result()
        except BaseException as error:
            failures.insert(0, error)
            pool.stop()
    real = [e for e in failures if not isinstance(e, (KeyboardInterrupt, Interrupted))]
    if failures:
        raise (real or failures)[0]


def work_through(
    names: Sequence[str],
    jobs: int,
    worker: Callable[..., Work],
    *args: Any,
    done: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Do all of `names`: each process makes `worker(*args)`, a function, once and calls it with one name after another
    and a function to speak with.

    The first failure or an interrupt ends the others as Ctrl-C would, so that they save what they have.
    """
    context = get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for name in [*names, *[None] * jobs]:
        tasks.put(name)
    processes = [context.Process(target=_process, args=(tasks, results, worker, args)) for _ in range(jobs)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: this process tells the others
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
            found: tuple[str | BaseException, str] = results.get(timeout=1.0)
            return found
        except Empty:
            if any(p.exitcode not in (None, 0) for p in processes):
                raise RunError(
                    "a training process was killed (out of memory?); what it had finished is saved"
                ) from None


def _follow() -> None:
    """End with the process that started this one, whatever ended it: nobody else would know of this one."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # what is written is whole at any moment


def _process(tasks: Any, results: Any, worker: Callable[..., Work], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_follow, daemon=True).start()
    keep_memory()
    torch.set_num_threads(1)
    try:
        work = worker(*args)
        for name in iter(tasks.get, None):
            work(name, lambda text: results.put(("said", text)))
            results.put(("done", name))
    except KeyboardInterrupt:
        results.put((KeyboardInterrupt(), ""))
    except Exception as error:
        results.put((error, ""))
