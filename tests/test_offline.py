"""No network in tests, none at import, and optional packages only when they are asked for."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import no_network
import pytest

OUTSIDE = ("192.0.2.1", 80)  # an address that documentation may use: nobody answers
OUTSIDE6 = ("2001:db8::1", 80)


def udp(send: Callable[[socket.socket], object]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        send(s)


TRIES: dict[str, Callable[[], object]] = {
    "IPv4": lambda: socket.create_connection(OUTSIDE, 60),
    "IPv6": lambda: socket.create_connection(OUTSIDE6, 60),
    "UDP": lambda: udp(lambda s: s.sendto(b"x", OUTSIDE)),
    "UDP, connected": lambda: udp(lambda s: s.connect(OUTSIDE)),
    "everybody here": lambda: udp(lambda s: s.sendto(b"x", ("255.255.255.255", 9))),
    "a message": lambda: udp(lambda s: s.sendmsg([b"x"], [], 0, OUTSIDE)),
    "a name to connect to": lambda: udp(lambda s: s.connect(("example.org", 80))),
    "a name": lambda: socket.getaddrinfo("example.org", 80),
    "a name, the old way": lambda: socket.gethostbyname("example.org"),
    "an address to name": lambda: socket.gethostbyaddr("192.0.2.1"),
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is blocked here is written to this file, and not held against the test."""
    path = tmp_path / "blocked.log"
    monkeypatch.setenv(no_network.LOG, str(path))
    return path


@pytest.mark.parametrize("way", TRIES)
def test_no_test_can_leave_this_machine(way: str, log: Path) -> None:
    start = time.monotonic()
    with pytest.raises(OSError, match="may not leave this machine"):
        TRIES[way]()
    assert time.monotonic() - start < 1
    assert len(log.read_text().splitlines()) == 1


def test_a_process_that_a_test_starts_cannot_either(log: Path) -> None:
    code = f"import socket; socket.create_connection({OUTSIDE!r}, 60)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "may not leave this machine" in done.stderr
    assert OUTSIDE[0] in log.read_text()


def test_this_machine_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
        pass
    assert socket.getaddrinfo("localhost", 80)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        monkeypatch.chdir(tmp_path)  # such a path has about 100 bytes at most
        server.bind("s")
        server.listen()
        client.connect("s")


# Imports every module outside the room `perada.flower` and reads every public name, then imports that room.
WALK = """
import pkgutil, sys
from importlib.util import find_spec

sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
import perada

here = [p for p in ("triton", "flwr") if find_spec(p)]
names = [m.name for m in pkgutil.walk_packages(perada.__path__, "perada.")]
names = [n for n in names if ("triton" not in n or "triton" in here) and (".flower" not in n or "flwr" in here)]
theirs = [n for n in names if n.startswith("perada.flower")]
optional = {"torchvision", "timm", "flwr", "ray", "onnx", "onnxscript", "onnxruntime", "tensorboard", "matplotlib"}
optional |= {"pydicom"}
for room in ([n for n in names if n not in theirs], theirs):
    for name in room:
        __import__(name)
    for name in perada.__all__:
        getattr(perada, name)
    print(len(room) > 10, sockets, sorted(optional & set(sys.modules)))
"""


def test_importing_opens_no_socket_and_loads_no_optional_package() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", WALK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours, theirs = done.stdout.splitlines()
    assert ours == "True [] []"
    assert theirs == ("True [] ['flwr']" if find_spec("flwr") else "False [] []")
