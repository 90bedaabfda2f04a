"""How long a short training takes on a machine with other work: OpenMP's ways to wait, side by side.

    python benchmarks/busy.py                       # 8 busy processes on 2 cores, 3 repeats; about half an hour
    python benchmarks/busy.py --busy 0              # the same on idle cores: what the setting costs

Each repeat runs every way once, in turn, pinned to the same cores. The table shows the median seconds of the whole
`perada train digits` command, and its ratio to one thread. `spinning` is what OpenMP does when nobody sets anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAYS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "passive": {},  # what `perada` sets
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # GNU OpenMP's default, which this variable restores
}
COMMAND = ("-m", "perada", "train", "digits", "--set", "run.shifts=false", "--set", "distill.steps=10")
LOAD = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # never outlives this program
OURS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keeps so many processes busy; they end with the block."""
    started = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def seconds(variables: dict[str, str], rounds: int, limit: float) -> float:
    """Returns how long one training takes, or infinity if it is not done after `limit` seconds."""
    clean = {k: v for k, v in os.environ.items() if k not in OURS}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *COMMAND, "--set", f"train.rounds={rounds}", "--out", f"{folder}/run"]
        begin = time.perf_counter()
        try:
            subprocess.run(words, env={**clean, **variables}, check=True, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return float("inf")
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside the training")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a training is ended")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, help="a JSON file with all times")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # children inherit it
    times: dict[str, list[float]] = {way: [] for way in args.ways.split(",")}
    with load(args.busy):
        for repeat in range(args.repeats):
            for way, found in times.items():
                found.append(seconds(WAYS[way], args.rounds, args.limit))
                others = os.getloadavg()[0]
                print(f"{repeat + 1}: {way} {found[-1]:.1f} s (load average {others:.1f})", file=sys.stderr, flush=True)
    medians = {way: statistics.median(found) for way, found in times.items()}
    one = medians.get("one thread", float("nan"))
    print(f"{args.busy} busy processes on {args.cores} cores, {args.rounds} rounds, {args.repeats} repeats")
    for way, found in times.items():
        print(f"{way:12} {medians[way]:6.1f} s [{min(found):.1f}-{max(found):.1f}]  {medians[way] / one:5.2f}")
    if args.out:
        known = {way: [t if t != float("inf") else None for t in found] for way, found in times.items()}
        args.out.write_text(json.dumps({**vars(args), "out": None, "seconds": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
