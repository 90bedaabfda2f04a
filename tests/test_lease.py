"""The tools that take the experiments to a lent GPU: nothing is lost on the way, and nothing waits in vain."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))
import lease  # noqa: E402
from lease_queue import Item, Queue  # noqa: E402

# Stands for `perada`: as many evaluations as its config says, each after a while that grows with the runs.
FAKE = """
import json, pathlib, sys, time
args = dict(zip(sys.argv[3::2], sys.argv[4::2]))
runs = args["--only"].split(",")
home = pathlib.Path(args["--out"]) / sys.argv[2]
for run in runs:
    (home / run).mkdir(parents=True, exist_ok=True)
    (home / run / "config.toml").write_text("[train]\\nrounds = 10\\n")
for at in range(1, 11):
    time.sleep(0.02)
    for run in runs:
        with (home / run / "metrics.jsonl").open("a") as file:
            print(json.dumps({"round": at}), file=file)
out = pathlib.Path(args["--results"]) / sys.argv[2]
out.mkdir(parents=True, exist_ok=True)
for run in runs:
    (out / f"{run}.json").write_text("{}")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("log", "runs", "data", "tree", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "fake.py").write_text(FAKE)
    return tmp_path


class Played(Queue):
    """A queue on a clock of its own: a run's round takes a second, those of an item that runs beside another twice as
    long as alone."""

    def __init__(self, home: Path, seconds: float, *items: str, shared: bool = False, slow: float = 1.0) -> None:
        self.at, self.slow = 0.0, slow
        self.progress: dict[str, float] = {}
        super().__init__(home, seconds, "", [Item.parse(i) for i in items], {} if shared else None, lambda: self.at)

    def begin(self, item: Item) -> None:
        item.process, item.began = Process(), self.now()  # type: ignore[assignment]
        self.progress[item.runs[0]] = 0.0
        self.log(f"{item.runs[0]}: begun")

    def signal(self, item: Item, number: int) -> None:
        pass

    def rounds(self, item: Item) -> int:
        return 100

    def round(self, item: Item, run: str) -> int:
        return int(self.progress[item.runs[0]]) // 10 * 10

    def finished(self, item: Item) -> bool:
        return self.progress.get(item.runs[0], 0) >= 100

    def tick(self) -> None:
        self.at += 1
        running = [i for i in self.items if i.process is not None and not i.stopped]
        for item in running:
            self.progress[item.runs[0]] += 1 / len(running) / len(item.runs) / self.slow
            if self.finished(item):
                item.process.returncode = 0  # type: ignore[union-attr]
            elif item.runs[0] == "broken":
                item.process.returncode = 3  # type: ignore[union-attr]

    def play(self) -> list[str]:
        """What was said, without times and numbers of rounds."""
        self.work(self.tick)
        lines = [line[8:] for line in (self.home / "log" / "queue.txt").read_text().splitlines()]
        return [line.split(" after")[0].split(",")[0] for line in lines if ": round" not in line]


class Process:
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> None:
        pass


def test_pieces_bring_everything_through_a_narrow_door(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.integers(0, 256, (10_101, 4, 6, 3), np.uint8), "y_train": np.arange(10_101)}
    np.savez(tmp_path / "photos.npz", **arrays)
    np.savez(tmp_path / "grey.npz", x=rng.integers(0, 256, (50, 4, 4), np.uint8))
    (tmp_path / "weights.safetensors").write_bytes(b"w" * 1000)
    files = [tmp_path / n for n in ("photos.npz", "grey.npz", "weights.safetensors")]
    assert lease.pieces(files, tmp_path / "out", most=0.71) == 2
    home = tmp_path / "home"
    assert lease.take(tmp_path / "out" / "0", home) == ["weights.safetensors"]
    assert lease.take(tmp_path / "not carried", home) == ["weights.safetensors"]  # which is no failure
    assert lease.take(tmp_path / "out" / "1", home) == []
    lease.unpack(home)
    found = dict(np.load(home / "data" / "photos.npz"))
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[k], arrays[k]) for k in arrays)
    assert (home / "data" / "grey.npz").read_bytes() == (tmp_path / "grey.npz").read_bytes()
    assert (home / "data" / "weights.safetensors").read_bytes() == b"w" * 1000
    (home / "in" / "weights.safetensors").write_bytes(b"v" * 1000)
    with pytest.raises(SystemExit, match="damaged on its way"):
        lease.unpack(home)


def test_start_refuses_while_something_is_missing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lease.start(home, 60, ["main:ditto-0=1"], "false") == 1
    assert "not here yet: pieces.json" in capsys.readouterr().out
    for strange, words in (("maim:ditto-0=1", "maim is no experiment"), ("main:dito-0=1", "main has no run dito-0")):
        with pytest.raises(SystemExit, match=words):
            lease.start(home, 60, [strange], "false")


def test_a_second_start_keeps_what_the_first_has_made(tmp_path: Path) -> None:
    """The tree is copied anew; what lies in the results since is newer than what it has."""
    (tmp_path / "weights.safetensors").write_bytes(b"w")
    lease.pieces([tmp_path / "weights.safetensors"], tmp_path / "out", most=1)
    home = tmp_path / "home"
    lease.take(tmp_path / "out", home)
    start = [sys.executable, str(TOOLS / "lease.py"), "start", "--seconds", "60", "digits:perada-0=1000"]  # too long
    for _ in range(2):
        subprocess.run(start, env={**os.environ, "PERADA_LEASE": str(home)}, check=True)
        assert (home / "results" / "main" / "perada-0.json").is_file()
        waited = time.monotonic()
        while lease.alive(home):
            assert time.monotonic() - waited < 60
            time.sleep(0.1)
        (home / "results" / "main" / "perada-0.json").write_text("newer")
    assert (home / "results" / "main" / "perada-0.json").read_text() == "newer"
    assert "end" in (home / "log" / "queue.txt").read_text()


def test_who_died_unnoticed_is_not_at_work(home: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    (home / "pid").write_text(str(child.pid))
    waited = time.monotonic()
    while lease.alive(home):  # it ends, and as nobody waits for it, stays as a zombie
        assert time.monotonic() - waited < 60
        time.sleep(0.05)
    child.wait()


def test_poll_does_not_wait_for_what_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    assert lease.poll(home, 60, home / "out") == 1
    (home / "pid").write_text("999999999")
    assert lease.poll(home, 60, home / "out") == 1
    assert time.monotonic() - begun < 5
    assert "NOT at work" in capsys.readouterr().out


def test_poll_waits_while_it_works_and_brings_results(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (home / "pid").write_text(str(work.pid))
    (home / "results" / "a.json").write_text("{}")
    (home / "results" / ".a.json.part").write_text("")
    try:
        assert lease.poll(home, 0.3, home / "out", every=0.1) == 0
    finally:
        work.kill()
        work.wait()
    assert (home / "out" / "results.tgz").is_file()
    assert (home / "out" / "log.tgz").is_file()


def test_a_real_process_is_started_and_watched(home: Path) -> None:
    command = f"{sys.executable} {home / 'fake.py'}"
    queue = Queue(home, 600, command, [Item.parse("main:a,b=2"), Item.parse("other:c=1")], None)
    queue.work(lambda: time.sleep(0.05))
    assert sorted(p.stem for p in (home / "results").rglob("*.json")) == ["a", "b", "c"]
    assert [i.rounds for i in queue.items] == [10, 10]
    assert "too slow" not in (home / "log" / "queue.txt").read_text()


def test_whatever_goes_wrong_in_the_queue_its_processes_end_with_it(home: Path) -> None:
    queue = Queue(home, 600, f"{sys.executable} -c 'import time; time.sleep(600)'", [Item.parse("main:a=2")], None)
    steps = iter([None])
    with pytest.raises(StopIteration):
        queue.work(lambda: next(steps))
    process = queue.items[0].process
    assert process is not None
    assert process.wait(timeout=30) != 0


def test_a_result_of_before_is_not_what_was_asked_for(home: Path) -> None:
    item = Item.parse("main:a=2")
    queue = Queue(home, 600, "", [item], None)
    (home / "results" / "main").mkdir()
    (home / "results" / "main" / "a.json").write_text("{}")
    assert queue.finished(item)
    item.wall = time.time() + 100
    assert not queue.finished(item)


def test_one_after_another_as_long_as_there_is_time(home: Path) -> None:
    queue = Played(home, 500, "main:a,b=200", "main:c=100", "other:d=250", "other:e=90")
    assert queue.play() == ["a: begun", "a: done", "c: begun", "c: done", "e: begun", "e: done", "end"]


def test_beside_the_first_where_they_share(home: Path) -> None:
    """When its pace is known, and both are done, in the time of both."""
    queue = Played(home, 500, "main:a,b=200", "main:c=100", shared=True)
    assert queue.play() == ["a: begun", "c: begun", "c: done", "a: done", "end"]
    assert queue.at == pytest.approx(300, abs=5)


def test_the_first_has_the_right_of_way(home: Path) -> None:
    """c is stopped when a, which would be done after 200 seconds alone, could not be done otherwise."""
    queue = Played(home, 370, "main:a,b=200", "main:c,d,e=60", shared=True)
    said = queue.play()
    assert said[:3] == ["a: begun", "c: begun", "c: stopped"]
    assert said.index("a: done") > 3
    assert "c: done" not in said  # which alone would have taken 300 seconds


def test_what_cannot_be_done_together_is_done_in_halves(home: Path) -> None:
    queue = Played(home, 700, "main:a,b,c,d=300", slow=1.8)  # 720 s
    assert queue.play()[:4] == ["a: begun", "a: too slow", "a: begun", "a: done"]
    assert queue.items[0].runs == ["a", "b"]


def test_what_cannot_be_done_at_all_makes_room(home: Path) -> None:
    queue = Played(home, 300, "main:a=200", "main:b=100", slow=4.0)
    queue.items[1].runs = ["b"]
    said = queue.play()
    assert said[:3] == ["a: begun", "a: too slow", "b: begun"]


def test_what_fails_late_goes_on_where_it_was(home: Path) -> None:
    """With 60 of 100 rounds done, the 130 seconds that are left are enough, though it had asked for 150."""
    queue = Played(home, 190, "main:a=150")
    queue.begin(queue.items[0])
    for _ in range(60):
        queue.tick()
        queue.round()
    queue.items[0].process.returncode = 9  # type: ignore[union-attr]
    queue.round()
    assert queue.items[0].part == 0.6
    assert queue.items[0].process is not None


@pytest.mark.parametrize("code", [0, 2])
def test_what_would_fail_again_is_not_tried_again(home: Path, code: int) -> None:
    queue = Played(home, 500, "main:a=100", "main:b=100", shared=True)
    queue.begin(queue.items[0])
    queue.items[0].process.returncode = code  # type: ignore[union-attr]
    assert queue.play()[1:] == [f"a: FAILED with {code}", "b: begun", "b: done", "end"]
    assert queue.shared


def test_a_failure_is_tried_once_more_and_ends_the_sharing(home: Path) -> None:
    queue = Played(home, 500, "main:broken=100", "main:a=100", shared=True)
    assert queue.play() == ["broken: begun", "broken: FAILED with 3"] * 2 + ["a: begun", "a: done", "end"]
    assert not queue.shared


def test_an_item_that_is_none() -> None:
    with pytest.raises(SystemExit, match="write EXPERIMENT:RUN,RUN=SECONDS"):
        Item.parse("main")
