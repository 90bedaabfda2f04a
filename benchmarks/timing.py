"""Shared by the benchmarks: interleaved timing, quartiles, tables, and where the numbers were measured."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # the device machine has torch and little else
    Console = None  # type: ignore[assignment, misc]

Job = Callable[[], object]


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(job: Job, device: str, inner: int = 1) -> float:
    sync(device)
    begin = time.perf_counter()
    for _ in range(inner):
        job()
    sync(device)
    return (time.perf_counter() - begin) / inner


def _others() -> float:
    """Seconds of processor time used so far by everyone but this process (Linux; elsewhere 0)."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.read_text().split()[1:9])
    mine = os.times()
    busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy - mine.user - mine.system


def interleaved(
    jobs: Mapping[str, Job], device: str, repeats: int, at_least: float = 0.0, patience: float = 10.0
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each job, `repeats` times: A B C A B C ..., so that a slow spell of the machine hits all.

    A job shorter than `at_least` seconds is run several times for each measurement. A round in which other
    processes took more than a tenth of a core is made again, for up to `patience` seconds; the quietest
    rounds are kept. Also returns what others took, in cores, in the noisiest round kept.
    """
    for job in jobs.values():
        job()
    inner = dict.fromkeys(jobs, 1)
    if at_least:
        inner = {name: max(1, int(at_least / seconds(job, device))) for name, job in jobs.items()}
    rounds: list[tuple[float, dict[str, float]]] = []
    give_up = time.perf_counter() + patience
    quiet = 0
    while quiet < repeats and (len(rounds) < repeats or time.perf_counter() < give_up):
        begin, others = time.perf_counter(), _others()
        taken = {name: seconds(job, device, inner[name]) for name, job in jobs.items()}
        noise = (_others() - others) / (time.perf_counter() - begin)
        rounds.append((noise, taken))
        quiet += noise < 0.1
        if noise >= 0.1:
            time.sleep(0.2)
    best = sorted(rounds, key=lambda r: r[0])[:repeats]
    return {name: [taken[name] for _, taken in best] for name in jobs}, best[-1][0]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile)."""
    low, median, high = np.percentile(np.asarray(values), (25, 50, 75))
    return float(median), float(low), float(high)


def spread(values: Sequence[float], digits: int = 2) -> str:
    median, low, high = quartiles(values)
    return f"{median:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def machine(device: str) -> dict[str, object]:
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if Console is None:
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
        print(title)
        for row in [head, *rows]:
            print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)))
        return
    table = Table(title=title.replace("[", r"\["))
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def write(path: str | None, content: Mapping[str, object]) -> None:
    if path:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")
