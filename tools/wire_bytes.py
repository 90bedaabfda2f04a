"""What crosses the wire between one site and the server, in bytes as the network sees them (TLS, HTTP and all).

    python tools/wire_bytes.py

The demo's federation (examples/flower_demo.py) with a counting forwarder between `north` and the server: a minute
without work, then runs of one and of six rounds. docs/deploy.md has the numbers.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from flower_demo import PERADA, SITES, orderly, running, split_digits

BUSY_S = 140  # for so long a node looks for messages more often (guards.BUSY), and a little
IDLE_S = 60


class Forwarder:
    """Listens, dials the server for whoever comes, and counts: `up` from the site, `down` to it."""

    def __init__(self, port: int) -> None:
        self.port, self.count = port, {"up": 0, "down": 0}
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            site, _ = self.listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                site.close()
                continue
            for way, source, target in (("up", site, server), ("down", server, site)):
                threading.Thread(target=self._pass, args=(way, source, target), daemon=True).start()

    def _pass(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.count[way] += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def take(self) -> tuple[int, int]:
        found = self.count["up"], self.count["down"]
        self.count = {"up": 0, "down": 0}
        return found


def main(home: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    split_digits(home / "data")
    project = home / "project"
    words = ["flower", "init", str(project), "--server", f"127.0.0.1:{port}", "--set", "train.rounds=1"]
    subprocess.run([*PERADA, *words], check=True, stdout=subprocess.DEVNULL)
    words = ["flower", "certs", str(project / "certs"), "--server-name", "127.0.0.1", "--sites", ",".join(SITES)]
    subprocess.run([*PERADA, *words], check=True, stdout=subprocess.DEVNULL)
    between = Forwarder(port)
    dial = {"north": f"127.0.0.1:{between.listener.getsockname()[1]}"}
    dial |= {site: f"127.0.0.1:{port}" for site in SITES if site != "north"}
    site = [
        [*("flower", "site", "--dir", str(project), "--name", s, "--data", str(home / "data" / s)), "--server", to]
        for s, to in dial.items()
    ]
    with running("flower", "server", str(project)), running(*site[0]), running(*site[1]), running(*site[2]):
        while not (project / "state" / "flower" / "ready").exists():
            time.sleep(0.2)
        time.sleep(BUSY_S)
        between.take()
        time.sleep(IDLE_S)
        print(f"idle, a minute: {_said(between.take(), 60 / IDLE_S)}", flush=True)
        found = {}
        for rounds in (1, 6):
            text = (project / "server.toml").read_text()
            (project / "server.toml").write_text(text.replace("rounds = 1\n", f"rounds = {rounds}\n"))
            between.take()
            subprocess.run([*PERADA, "flower", "run", str(project)], check=True)
            found[rounds] = between.take()
            print(f"a run of {rounds} rounds: {_said(found[rounds])}", flush=True)
        up, down = ((found[6][i] - found[1][i]) / 5 for i in (0, 1))
        print(f"a round: {_said((round(up), round(down)))}")


def _said(counts: tuple[int, int], scale: float = 1.0) -> str:
    return f"{counts[0] * scale:,.0f} bytes up, {counts[1] * scale:,.0f} down"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    orderly()
    with tempfile.TemporaryDirectory(prefix="perada-wire-") as folder:
        main(Path(folder))
