"""`flwr-clientapp` at a site: asks the fork server for a child process, or else runs Flower's own program.

The real program's path is the first argument. This file runs without packages, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(real: str, words: list[str]) -> int:
    try:
        with socket.socket(socket.AF_UNIX) as line, line.makefile("r", encoding="utf8") as answer:
            folder, name = os.path.split(os.environ["PERADA_FLOWER_SOCKET"])
            os.chdir(folder)  # the path of a socket must be short
            line.connect(name)
            line.sendall(json.dumps(words).encode() + b"\n")
            child = int(answer.readline())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame: os.kill(child, number))
            return int(answer.readline() or 1) & 0xFF
    except (OSError, KeyError, ValueError):
        os.execv(real, [real, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
