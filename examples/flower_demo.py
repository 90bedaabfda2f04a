"""A whole federation on this machine: a server and three sites, each in its own process, over TLS and with keys.

    python examples/flower_demo.py [FOLDER]      (or: make flower-demo; FOLDER is runs/flower-demo, or the next free)

Three sites hold scikit-learn's handwritten digits as class/image.png folders, each its own share of every digit. They
train PerAda for ten rounds. Then the demo prints the table and stops everything. Every half second it looks at the
sockets of all these processes: only this machine's loopback address may be at the other end of any of them.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from perada.data.digits import digits
from perada.flower.processes import descendants

SITES = ("north", "south", "west")
PERADA = (sys.executable, "-m", "perada")


def split_digits(root: Path, alpha: float = 0.5, seed: int = 0) -> dict[str, int]:
    """Writes root/SITE/DIGIT/NUMBER.png, with shares drawn from Dir(alpha). Returns the number of images per site."""
    data, rng = digits(), np.random.default_rng(seed)
    counts = dict.fromkeys(SITES, 0)
    for label in range(10):
        mine = np.flatnonzero(data.targets == label)
        cuts = np.rint(np.cumsum(rng.dirichlet([alpha] * len(SITES)))[:-1] * len(mine)).astype(int)
        for site, part in zip(SITES, np.split(mine, cuts), strict=True):
            folder = root / site / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            for n in part:
                Image.fromarray(data.images[n, 0]).save(folder / f"{n:04d}.png")
            counts[site] += len(part)
    return counts


def peers(pids: set[int]) -> set[str]:
    """Returns the addresses at the other end of these processes' sockets, from /proc."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    addresses = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for words in (line.split() for line in lines):
            packed = bytes.fromhex(words[2].split(":")[0])
            words4 = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))  # the kernel's byte order
            if words[9] in inodes and any(words4):
                addresses.add(str(ipaddress.ip_address(words4)))
    return addresses


class Watch(threading.Thread):
    """Records, every half second, which addresses this process and its children talk to."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.5):
            self.seen |= peers({os.getpid()} | descendants(os.getpid()))


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a `perada` command in the background and stops it at the end."""
    process = subprocess.Popen([*PERADA, *words], start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def demo(home: Path, *settings: str) -> int:
    """Runs the demo and returns its exit code. `settings` are KEY=VALUE, for a shorter run."""
    began = time.monotonic()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    counts = split_digits(home / "data")
    print("images at the sites:", ", ".join(f"{site} {n}" for site, n in counts.items()), flush=True)
    project, watch = home / "project", Watch()
    watch.start()
    words = [word for setting in settings for word in ("--set", setting)]
    subprocess.run([*PERADA, "flower", "init", str(project), "--server", f"127.0.0.1:{port}", *words], check=True)
    words = ["flower", "certs", str(project / "certs"), "--server-name", "127.0.0.1", "--sites", ",".join(SITES)]
    subprocess.run([*PERADA, *words], check=True, stdout=subprocess.DEVNULL)
    here = ["flower", "site", "--dir", str(project)]
    with (
        running("flower", "server", str(project)),
        running(*here, "--name", "north", "--data", str(home / "data" / "north")),
        running(*here, "--name", "south", "--data", str(home / "data" / "south")),
        running(*here, "--name", "west", "--data", str(home / "data" / "west")),
    ):
        code = _train(project)
    watch.stop.set()
    watch.join()
    left = descendants(os.getpid())
    print(f"addresses contacted: {', '.join(sorted(watch.seen))}; processes left: {len(left)}")
    print(f"{time.monotonic() - began:.0f} seconds in all")
    return code or wrong(watch.seen) or bool(left)


def wrong(seen: set[str]) -> bool:
    """Returns whether another machine was contacted, or no socket was seen, which proves nothing."""
    strangers = sorted(a for a in seen if not ipaddress.ip_address(a).is_loopback)
    if strangers or "127.0.0.1" not in seen:
        print(f"wrong: {f'contacted {strangers}' if strangers else 'the sockets were not seen'}", file=sys.stderr)
    return bool(strangers) or "127.0.0.1" not in seen


def _train(project: Path) -> int:
    """Waits for the server, trains and prints the table. Returns the exit code."""
    for _ in range(120):
        if (project / "state" / "flower" / "ready").exists():
            return subprocess.run([*PERADA, "flower", "run", str(project)], check=False).returncode
        time.sleep(0.5)
    print("the server did not come up", file=sys.stderr)
    return 1


def orderly() -> None:
    """Lets SIGTERM end this process as Ctrl-C does, together with everything it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    orderly()
    threads = max(1, (os.cpu_count() or 1) // len(SITES))  # the sites share this machine
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    names = (Path("runs") / f"flower-demo{f'-{n}' if n > 1 else ''}" for n in count(1))
    home = Path(sys.argv[1]) if len(sys.argv) > 1 else next(path for path in names if not path.exists())
    home.mkdir(parents=True)
    sys.exit(demo(home.absolute(), *sys.argv[2:]))
