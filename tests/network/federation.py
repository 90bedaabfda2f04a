"""A server and three sites as real processes on loopback, over TLS and with keys, for tests to use and to hurt."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any
from unittest.mock import patch

from flower.wire import SITES, World, make_world, write_server

from perada.cli import main as cli
from perada.flower import certs
from perada.flower.address import Address, NoAnswer, free_port, probe
from perada.flower.guards import die_with_parent
from perada.flower.processes import descendants
from perada.flower.project import app_file
from perada.runs.files import write_atomic

PERADA = [sys.executable, "-m", "perada"]
HOOKS = Path(__file__).parent / "hooks"
DEMO = Path(__file__).parents[2] / "examples" / "flower_demo.py"
LIMITS = {"min_sites": 2, "deadline_s": 30.0, "hello_s": 40.0, "poll_s": 0.2, "retries": 3}


def until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return found


class Net:
    """Everything below `home`; processes are known again by a word in their environment, whoever their parent is."""

    def __init__(self, home: Path) -> None:
        self.home, self.port, self.word = home, free_port(), f"PERADA_TEST_{token_hex(8)}"
        self.world: World = make_world(home, LIMITS)
        certs.make(home / "certs", ["127.0.0.1"], SITES)
        (home / "app").mkdir()
        (home / "app" / "pyproject.toml").write_text(app_file("digits"))
        for site in SITES:
            (home / site / "certs").symlink_to(home / "certs")
        (home / "tmp").mkdir()
        self.misbehave({})
        self.env = {**os.environ, self.word: "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(home / "tmp")}
        path = os.pathsep.join([str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env |= {"PYTHONPATH": path, "MISBEHAVE": str(home / "misbehave.json"), "CUDA_VISIBLE_DEVICES": ""}
        self.env["TORCHINDUCTOR_CACHE_DIR"] = str(home / "torch")  # it makes one in TMPDIR by itself
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    # Processes

    def start(self, name: str) -> None:
        """`server`, or a site."""
        words = ["server", str(self.home), "--port", str(self.port)]
        if name != "server":
            words = ["site", "--dir", str(self.home / name), "--server", f"127.0.0.1:{self.port}"]
        with (self.home / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                [*PERADA, "flower", *words],
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,  # should pytest itself be killed
            )

    def up(self) -> None:
        """The server and all sites, and wait until they are connected."""
        for name in ("server", *SITES):
            if name not in self.running:
                self.start(name)
        until(self.ready, 60, "the server is up")
        for site in SITES:
            until(lambda site=site: "connected to" in self.said(site), 60, f"{site} is connected")

    def ready(self) -> bool:
        try:
            probe(Address("127.0.0.1", self.port), self.home / "certs" / "ca.crt")
        except NoAnswer:
            return False
        return (self.home / "state" / "flower" / "ready").exists()

    def said(self, name: str) -> str:
        return (self.home / f"{name}.out").read_text()

    def kill(self, name: str) -> None:
        """SIGKILL, the whole tree at once, as a power cut would do."""
        process = self.running.pop(name)
        for pid in sorted({process.pid} | descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> int:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(30)

    def ours(self) -> dict[int, str]:
        """All living processes with our word in their environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.word.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def close(self) -> None:
        """Stop everything; nothing may be left: no process, no open port, no temporary file."""
        codes = {name: self.stop(name) for name in reversed(list(self.running))}
        assert codes == dict.fromkeys(codes, 0), {name: self.said(name)[-2000:] for name in codes}
        left = self.ours()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == {}
        try:
            probe(Address("127.0.0.1", self.port), None, 1)
            raise AssertionError("somebody still listens")
        except NoAnswer:
            pass
        assert [p.name for p in (self.home / "tmp").iterdir()] == []

    # Runs

    def perada(self, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        command = [*PERADA, "flower", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False)

    def setting(self, limits: dict[str, Any] | None = None, **set: Any) -> None:
        """Another server.toml for the runs to come."""
        self.world.settings = write_server(self.home, {**LIMITS, **(limits or {})}, train__cohort=0, **set)

    def begin(self, name: str, *words: str) -> None:
        """Start a run from this process (one of its own takes seconds) and leave it to the server."""
        with patch.dict(os.environ, self.env):
            assert cli.main(["flower", "run", str(self.home), "--name", name, "--detach", *words]) == 0

    def run(self, name: str) -> Path:
        """A new run, until it has ended well."""
        self.begin(name)
        return self.finished(name)

    def finished(self, name: str) -> Path:
        until(lambda: self.status(name).get("status") in ("finished", "failed"), 240, f"the end of {name}")
        assert self.status(name)["status"] == "finished", (self.status(name)["error"], self.said("server")[-3000:])
        return self.home / "state" / "runs" / name

    def misbehave(self, plan: dict[str, dict[str, str]]) -> None:
        for mark in self.home.glob("asleep-*"):
            mark.unlink()
        write_atomic(self.home / "misbehave.json", json.dumps(plan).encode())

    def events(self, run: str) -> list[dict[str, Any]]:
        file = self.home / "state" / "runs" / run / "events.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def trained(self) -> list[tuple[str, int]]:
        """Every round that a site has really trained so far, and not answered from its disk."""
        file = self.home / "trained"
        words = map(str.split, file.read_text().splitlines() if file.exists() else ())
        return [(site, int(round)) for site, round in words]

    def greeted(self, site: str) -> int:
        """Returns how often a site has told its name so far."""
        file = self.home / "greeted"
        return file.read_text().split().count(site) if file.exists() else 0

    def status(self, run: str) -> dict[str, Any]:
        file = self.home / "state" / "runs" / run / "flower.json"
        return json.loads(file.read_text()) if file.exists() else {}


class DemoProcess:
    """examples/flower_demo.py with two rounds, beside everything else."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, str(DEMO), str(self.home / "demo"), "train.rounds=2", "distill.steps=5"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(self.home)}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.home / "torch")
        with (self.home / "out").open("wb") as out:
            self.process = subprocess.Popen(words, env=env, stdout=out, stderr=out, preexec_fn=die_with_parent)

    @property
    def said(self) -> str:
        return (self.home / "out").read_text()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(300)

    def stop(self) -> None:
        """It ends its own processes."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in (path / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)
