"""The GPU kernels are compiled, for a GPU that need not be here, and by other processes."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is a Linux package", allow_module_level=True)

from perada.lanes.ops import triton
from perada.lanes.ops.triton import compile_pool


def test_the_compiler_takes_them(tmp_path: Path) -> None:
    """For a GPU that need not be here; the interpreter is not as strict. All are compiled by other processes."""
    script = Path(__file__).with_name("compile_kernels.py")
    unset = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script], env={**unset, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    files = Path(triton.__file__).parent.glob("*.py")
    started = {name for f in files for name in re.findall(r"launch\(\s*(_\w+)", f.read_text())}
    compiled_here, *names = done.stdout.split()
    assert set(names) == started
    assert compiled_here == "0"


def test_where_no_process_is_left_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end when they are not asked for a while; one that is asked for what it cannot read goes on."""
    gone = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    gone.wait()
    monkeypatch.setattr(compile_pool, "_started", [gone] * 3)
    monkeypatch.setattr(compile_pool, "_idle", queue.Queue())
    compile_pool._idle.put(gone)
    began = time.monotonic()
    for _ in range(3):
        compile_pool.ask(None, None, {})
    assert time.monotonic() - began < 1
    for pipe in (gone.stdin, gone.stdout):
        assert pipe is not None
        pipe.close()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        monkeypatch.setattr(compile_pool, "_started", [one])
        compile_pool._idle.put(one)
        compile_pool.ask(None, None, {})  # no source
        assert compile_pool._idle.get_nowait() is one
