"""The SuperExec of a site: it forks ClientApps, and ends work that hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perada.flower.processes import marked

LAUNCH = """
import os, sys
import flwr.supercore.cli, flwr.supernode.cli
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from perada.flower import superexec

def client_app():
    print(os.getpid() != parent, "torch" in sys.modules, sys.argv, flush=True)

def launch():
    executor = SubprocessExecutor()
    executor.launch(ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:9", "secret", True, None, False, None, False, 1))
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    executor.reconcile()

parent = os.getpid()
flwr.supernode.cli.flwr_clientapp, flwr.supercore.cli.flower_superexec = client_app, launch
superexec.main()
"""


def test_a_clientapp_is_forked_with_flowers_arguments_and_torch_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=True, timeout=120)
    words = ["flwr-clientapp", "--runtime-api-address", "127.0.0.1:9", "--token", "secret", "--insecure"]
    assert done.stdout == f"True True {words}\n"


FORK = """
import ctypes, os, sys, time
from perada.flower import processes, superexec
processes.LATE = processes.GRACE = 0.1

def work():
    try:
        with superexec.limited(float(sys.argv[1])):
            {work}
    except superexec.TooLate:
        sys.exit(3)

child = superexec.fork(work, ["work", {within!r}])
print(os.waitstatus_to_exitcode(os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT).si_status << 8), flush=True)
superexec.reap()
"""


@pytest.mark.parametrize(
    ("work", "within", "code", "said"),
    [
        ("time.sleep(60)", "0.1", 3, "gave up on a message"),  # its exception ends the work, and is the answer
        ("ctypes.PyDLL(None).sleep(60)", "0.1", None, "ended a ClientApp that hung"),  # no Python code runs any more
        ("sys.exit(7)", "0", 7, ""),
        ("time.sleep(0.01)", "60", 0, ""),
    ],
)
def test_work_that_hangs_is_ended(work: str, within: str, code: int | None, said: str) -> None:
    program = FORK.format(work=work, within=within)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert said in (next(filter(None, map(marked, lines)), ""))
    if code is not None:
        assert str(code) in lines


def test_work_that_is_done_in_time_is_left_alone() -> None:
    """Its process continues to send the answer, longer than the limit was."""
    program = """
import time
from perada.flower import processes, superexec
processes.LATE, processes.GRACE = 0.1, 60
with superexec.limited(0.1):
    pass
time.sleep(0.4)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
