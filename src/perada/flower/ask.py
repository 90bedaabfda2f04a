"""`flwr-clientapp` at a site (see warm.py): asks the warm process for a child, else runs the real one, given first.

Run as a file, without packages: it is there to be quick.
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
            line.connect(os.environ["PERADA_FLOWER_WARM"])
            line.sendall(json.dumps(words).encode() + b"\n")
            child = int(answer.readline())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame: os.kill(child, number))
            return int(answer.readline() or 1) & 0xFF
    except (OSError, KeyError, ValueError):
        os.execv(real, [real, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
