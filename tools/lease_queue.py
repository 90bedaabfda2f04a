"""The process that `tools/lease.py start` leaves behind: it goes through a queue until the time is over.

    python tools/lease_queue.py HOME SECONDS COMMAND ITEM ...

An item is EXPERIMENT:RUN,RUN,...=SECONDS, for example main:ditto-0,ditto-1=620: runs trained
together, and how long they take alone; it is begun only if that much is left. The first one in the queue that is not
done has the right of way. Where processes may share the GPU (NVIDIA's MPS), the next one runs beside it, since one
process leaves gaps that another fills, and is stopped (SIGSTOP) when the first could not be finished otherwise: its
pace without company is measured over its first evaluations. If that shows that it cannot be finished, its runs are
begun anew in two halves, where there is time for one, or given up. What fails while it runs is tried once more, and
from then on nothing is shared. Whatever is not done at the end is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FINISHING, MARGIN = 25.0, 40.0  # seconds of a run's corrupted test sets; of all else behind the last round
PACE_FROM, SLACK = 2, 1.06  # evaluations after which the pace is believed; how much slower it may become
JUDGED_AT = 3  # evaluations after which that decides whether it can be done
BESIDE = 1.4  # a guess: what runs beside another gets this much more done than it takes from it
HALF = 0.6  # a guess: what half of the runs take of the time of all


@dataclass
class Item:
    experiment: str
    runs: list[str]
    seconds: float
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    over: bool = False  # done, or given up
    began: float = 0.0
    wall: float = 0.0  # the same, by the clock that files have
    rounds: int = 0  # of each run, once it is known
    part: float = 0.0  # of them that is done
    seen: list[tuple[float, int]] = field(default_factory=list)  # (time, round) of evaluations
    pace: float | None = None  # seconds a round, alone
    company: bool = False  # whether it was not alone, or stopped, since its last evaluation
    judged: bool = False
    failed: bool = False  # once

    @classmethod
    def parse(cls, text: str) -> Item:
        names, _, seconds = text.partition("=")
        experiment, _, runs = names.partition(":")
        if not (experiment and runs and seconds):
            raise SystemExit(f"{text!r}: write EXPERIMENT:RUN,RUN=SECONDS")
        return cls(experiment, runs.split(","), float(seconds))

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.runs[0]}"


class Queue:
    """`env`: an environment in which processes share the GPU, if there is one."""

    def __init__(
        self,
        home: Path,
        seconds: float,
        command: str,
        items: list[Item],
        env: dict[str, str] | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.home, self.command, self.items, self.now = home, shlex.split(command), items, now
        self.plain = dict(os.environ)
        self.shared, self.env = env is not None, env or self.plain
        self.begun, self.end = now(), now() + seconds

    @property
    def left(self) -> float:
        return self.end - self.now()

    def log(self, text: str) -> None:
        with (self.home / "log" / "queue.txt").open("a") as file:
            print(f"{self.now() - self.begun:7.1f} {text}", file=file)

    def folder(self, item: Item) -> Path:
        return self.home / "runs" / item.name

    def finished(self, item: Item) -> bool:
        """Whether all of its results were written since it was begun."""
        files = [self.home / "results" / item.experiment / f"{run}.json" for run in item.runs]
        return all(f.is_file() and f.stat().st_mtime >= item.wall - 1 for f in files)

    def begin(self, item: Item) -> None:
        data, weights = self.home / "data", sorted((self.home / "data").glob("*.safetensors"))
        main = [w for w in weights if "statistics" not in w.name]
        over = [w for w in weights if "statistics" in w.name] if item.experiment in ("pacs", "xrays") else []
        more = ["--out", str(self.folder(item)), "--results", str(self.home / "results"), "--only", ",".join(item.runs)]
        if item.experiment != "digits":  # which brings its own: a rehearsal
            more += ["--data", str(data), *(["--weights", str(main[0])] if main else [])]
        more += ["--statistics", str(over[0])] if over and main else []
        # A cache that knows kernels of another method would keep `perada` from starting processes that compile.
        own = {
            "TRITON_CACHE_DIR": str(self.home / "triton" / item.name),
            "PERADA_SHARED_GPU": "1" if self.shared else "",
        }
        item.began, item.wall = self.now(), time.time()
        with (self.home / "log" / f"{item.name}.txt").open("a") as output:
            item.process = subprocess.Popen(
                [*self.command, item.experiment, *more],
                env={**self.env, **own},
                cwd=self.home / "tree",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.log(f"{item.runs[0]}: begun, {len(item.runs)} runs, {self.left:.0f} s left")

    def signal(self, item: Item, number: int) -> None:
        if item.process is not None and item.process.poll() is None:
            os.killpg(item.process.pid, number)

    def look(self, item: Item, alone: bool) -> None:
        """How far it is; whether it ended."""
        assert item.process is not None
        item.company = item.company or not alone
        at = min((self.round(item, run) for run in item.runs), default=0)
        if at > (item.seen[-1][1] if item.seen else 0):
            item.seen.append((self.now(), at))
            if not item.company and len(item.seen) >= PACE_FROM:
                (t0, r0), (t1, r1) = item.seen[-2:]
                item.pace = min(item.pace or 1e9, (t1 - t0) / (r1 - r0))
            item.company = False
            item.rounds = item.rounds or self.rounds(item)
            item.part = at / item.rounds if item.rounds else 0.0
            pace = "" if item.pace is None else f", {item.pace:.2f} s a round alone"
            self.log(f"{item.runs[0]}: round {at}{pace}, {self.left:.0f} s left")
        if item.process.poll() is not None:
            done = self.finished(item)
            words = "done" if done else f"FAILED with {item.process.returncode}"
            self.log(f"{item.runs[0]}: {words} after {self.now() - item.began:.0f} s")
            again = item.process.returncode not in (0, 2) and not item.failed  # those would do the same again
            self._drop(item)
            item.over = done or not again
            if not done and again:
                item.failed, self.shared, self.env = True, False, self.plain

    def _drop(self, item: Item) -> None:
        """As if it had not been begun; a run folder stays and is gone on with."""
        self.signal(item, signal.SIGKILL)
        if item.process is not None:
            item.process.wait()
        item.process, item.stopped, item.pace, item.seen, item.judged = None, False, None, [], False

    def judge(self, item: Item) -> bool:
        """Whether there is time for it; where there is not, for half of its runs, or none."""
        item.judged = True
        assert item.pace is not None
        rest = (item.rounds - item.seen[-1][1]) * item.pace + MARGIN
        if rest <= self.left:
            return True
        half = item.rounds * item.pace * HALF + MARGIN < self.left and len(item.runs) > 1
        then = "in two halves" if half else "given up"
        self.log(f"{item.runs[0]}: too slow, {rest:.0f} s where {self.left:.0f} are left: {then}")
        self._drop(item)
        item.over = not half
        if half:
            self._halve(item)
        return False

    def _halve(self, item: Item) -> None:
        shutil.rmtree(self.folder(item), ignore_errors=True)
        middle, where = len(item.runs) // 2, self.items.index(item)
        parts = (item.runs[:middle], item.runs[middle:])
        self.items[where : where + 1] = [Item(item.experiment, runs, item.seconds * HALF) for runs in parts]

    def round(self, item: Item, run: str) -> int:
        path = self.folder(item) / item.experiment / run / "metrics.jsonl"
        try:
            return int(json.loads(path.read_text().splitlines()[-1])["round"])
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    def rounds(self, item: Item) -> int:
        """0 if it cannot be said now."""
        path = self.folder(item) / item.experiment / item.runs[0] / "config.toml"
        try:
            return int(tomllib.loads(path.read_text())["train"]["rounds"])
        except (OSError, ValueError, KeyError):
            return 0

    def needs(self, item: Item) -> float:
        """Seconds that it needs yet, alone."""
        if item.pace is None or not item.rounds:
            return max(item.seconds - (self.now() - item.began), 0.0) + MARGIN
        return (item.rounds - item.seen[-1][1]) * item.pace * SLACK + FINISHING * len(item.runs) + MARGIN

    def step(self) -> bool:
        """Whether there is more to do."""
        running = [i for i in self.items if i.process is not None]
        for item in running:
            self.look(item, alone=all(o.stopped != (o is item) for o in running))
        running = [i for i in running if i.process is not None]
        first = running[0] if running else None
        ripe = first is not None and first.pace is not None and first.rounds and len(first.seen) >= JUDGED_AT
        if first is not None and ripe and not first.judged and not self.judge(first):
            return True
        spare = self.left - (self.needs(first) if first else 0.0)
        for item in running[1:]:
            if (spare <= 0) != item.stopped:
                item.stopped = not item.stopped
                self.signal(item, signal.SIGSTOP if item.stopped else signal.SIGCONT)
                self.log(f"{item.runs[0]}: {'stopped' if item.stopped else 'goes on'}, {spare:.0f} s to spare")
        if first is not None and first.stopped:
            first.stopped = False
            self.signal(first, signal.SIGCONT)
            self.log(f"{first.runs[0]}: goes on, {self.left:.0f} s left")
        room = first is None or (self.shared and len(running) == 1 and first.pace is not None)
        if room:
            waiting = [i for i in self.items if i.process is None and not i.over]
            for item in waiting:
                if spare * (BESIDE if first else 1.0) >= item.seconds * (1 - item.part):
                    self.begin(item)
                    return True
            return bool(running)
        return True

    def work(self, pause: Callable[[], None] = lambda: time.sleep(2.0)) -> None:
        try:
            while self.left > 0 and self.step():
                pause()
        finally:
            for item in self.items:
                self.signal(item, signal.SIGKILL)
            self.log(f"end, {self.left:.0f} s left")


def sharing(home: Path) -> dict[str, str] | None:
    """An environment in which processes share the GPU; None where that cannot be had."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return None
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(home / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(home / "mps-log")}
    for name in ("mps", "mps-log"):
        (home / name).mkdir(exist_ok=True)
    trial = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    try:
        subprocess.run([control, "-d"], env=env, timeout=20, check=False)  # it may be there from a start before
        subprocess.run(trial, env=env, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"no MPS: {error}", flush=True)
        return None
    return env


def metered(log: Path) -> subprocess.Popen[bytes] | None:
    """How busy the GPU is, every ten seconds."""
    meter = shutil.which("nvidia-smi")
    what = "--query-gpu=utilization.gpu,utilization.memory,memory.used,power.draw"
    with log.open("a") as output:
        return meter and subprocess.Popen([meter, what, "--format=csv,noheader", "-l", "10"], stdout=output)


def main() -> None:
    home, (seconds, command, *texts) = Path(sys.argv[1]), sys.argv[2:]
    begun, meter = time.monotonic(), None
    os.environ["PYTHONPATH"] = str(home / "tree" / "src")
    os.environ.setdefault("PERADA_CACHE", str(home / "cache"))
    try:
        queue = Queue(home, 0.0, command, [Item.parse(text) for text in texts], sharing(home))
        queue.begun, queue.end = begun, begun + float(seconds)
        queue.log(f"{seconds} s, processes {'share the GPU' if queue.shared else 'one after another'}")
        meter = metered(home / "log" / "gpu.txt")
        queue.work()
    finally:
        (home / "pid").unlink(missing_ok=True)
        if meter:
            meter.kill()


if __name__ == "__main__":
    main()
