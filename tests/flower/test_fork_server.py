"""The process that ClientApps are forked from: what it runs, what it tells, and when it ends work that hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perada.flower.fork_server import CLIENT
from perada.flower.processes import marked


def test_without_a_fork_server_process_flowers_own_program_runs(tmp_path: Path) -> None:
    """Nobody listens there: what is given first is run instead, with the same words."""
    command = [sys.executable, "-I", "-S", str(CLIENT), "/bin/echo", "--token", "a b"]
    env = {"PERADA_FLOWER_SOCKET": str(tmp_path / "gone")}
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "--token a b\n"
    assert subprocess.run(command, env={}, capture_output=True, text=True, check=True).stdout == "--token a b\n"


@contextmanager
def fork_server_process(socket: Path, entry: str) -> Iterator[Callable[[str], tuple[int, str]]]:
    """One with this for a ClientApp. What it gives sends words there and returns the exit code and what was printed."""
    program = f"""
import ctypes, socket, sys, time
from perada.flower import fork_server, processes
listener = socket.socket(socket.AF_UNIX)
listener.bind({str(socket)!r})
listener.listen()
print("up", flush=True)
{entry}
fork_server.serve(listener, entry)
"""
    command = [sys.executable, "-I", "-S", str(CLIENT), "/bin/false"]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        out = server.stdout

        def send(word: str) -> tuple[int, str]:
            env = {"PERADA_FLOWER_SOCKET": str(socket)}
            return subprocess.run([*command, word], env=env, check=False, timeout=20).returncode, out.readline()

        try:
            assert out.readline() == "up\n"
            yield send
        finally:
            server.kill()


def test_the_fork_server_process_forks_and_tells_the_exit_code(tmp_path: Path) -> None:
    entry = """
def entry():
    print(sys.argv[1:], flush=True)
    sys.exit(int(sys.argv[1]))
"""
    with fork_server_process(tmp_path / "socket", entry) as send:
        for number in (0, 7):
            assert send(str(number)) == (number, f"['{number}']\n")


@pytest.mark.parametrize(
    ("hang", "code", "said"),
    [
        ("time.sleep(60)", 3, "gave up on a message"),  # its exception ends the work, which is answered for
        ("ctypes.PyDLL(None).sleep(60)", 1, "ended a ClientApp"),  # none of our code runs
    ],
)
def test_work_that_hangs_is_ended(tmp_path: Path, hang: str, code: int, said: str) -> None:
    """Whoever asked is told, and the next one is served."""
    entry = f"""
processes.LATE = processes.GRACE = 0.1
def entry():
    try:
        with fork_server.limited(float(sys.argv[1])):
            {hang} if sys.argv[1] != "0" else print("done", flush=True)
    except fork_server.TooLate:
        sys.exit(3)
"""
    with fork_server_process(tmp_path / "socket", entry) as send:
        found, line = send("0.1")
        assert found == code
        assert said in (marked(line) or "")
        assert send("0") == (0, "done\n")


def test_work_that_is_done_in_time_is_left_alone() -> None:
    """Its process goes on to send the answer, longer than the limit was."""
    program = """
import time
from perada.flower import fork_server, processes
processes.LATE, processes.GRACE = 0.1, 60
with fork_server.limited(0.1):
    pass
time.sleep(0.4)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=20).returncode == 0
