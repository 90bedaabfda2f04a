"""The paper's experiments on a GPU that is lent for half an hour, behind a door that small files pass.

Here, once:

    python tools/lease.py pieces DATA/*.npz WEIGHTS.safetensors --out PIECES --most 56

makes folders PIECES/0, PIECES/1, ... of at most so many MiB: photographs as lossless sheets, all else as it is. There,
in a copy of this repository, for every piece that was carried and then for the work:

    python tools/lease.py take PIECES/0                                   # what is still missing
    python tools/lease.py start --seconds 1640 QUEUE ...                  # what is left of the time
    python tools/lease.py poll 560 --bring OUT                            # every call one piece of the waiting

`start` leaves a process behind that goes through the queue (`lease_queue.py`: its docstring says what QUEUE is). `poll`
waits only while that lives, and brings results and logs, fresh every few seconds, so that a call that is cut off brings
them too. Each step may be repeated, and none waits for something that is not there: time on such a machine is dear.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
from lease_queue import Item

SIDE, MOST = 100, 16_383  # images in a row of a sheet at most, and WebP's pixels
LIST = "pieces.json"
Image.MAX_IMAGE_PIXELS = None  # sheets are large, and our own
HOME = Path(os.environ.get("PERADA_LEASE") or "/tmp/perada-lease")  # there; the repository's copy may be replaced


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def photographs(array: np.ndarray[Any, Any]) -> bool:
    return array.ndim == 4 and array.dtype == np.uint8 and array.shape[3] == 3


def sheets(path: Path, into: Path) -> list[Path]:
    """An .npz file's photographs as sheets, what else it has as another .npz file."""
    held = dict(np.load(path, allow_pickle=False))
    made = list[Path]()
    for key in [k for k, a in held.items() if photographs(a)]:
        images = held.pop(key)
        count, height, width, _ = images.shape
        side = _side(images.shape)
        held[f"{key}.shape"] = np.array(images.shape)
        for number, first in enumerate(range(0, count, side * side)):
            block = images[first : first + side * side]
            rows = -(-len(block) // side)
            whole = np.zeros((rows * side, height, width, 3), np.uint8)
            whole[: len(block)] = block
            sheet = whole.reshape(rows, side, height, width, 3).transpose(0, 2, 1, 3, 4)
            file = into / f"{path.stem}.{key}.{number}.webp"
            Image.fromarray(sheet.reshape(rows * height, side * width, 3)).save(file, lossless=True, quality=75)
            made.append(file)
    if not made:
        return [Path(shutil.copy(path, into))]
    rest = into / f"{path.stem}.rest.npz"
    np.savez_compressed(rest, **held)
    return [*made, rest]


def _side(shape: Sequence[int]) -> int:
    return min(SIDE, MOST // max(shape[1:3]))


def unsheet(rest: Path, out: Path) -> None:
    """The .npz file again."""
    held, name = dict(np.load(rest, allow_pickle=False)), rest.name.removesuffix(".rest.npz")
    for key in [k.removesuffix(".shape") for k in held if k.endswith(".shape")]:
        shape = tuple(int(n) for n in held.pop(f"{key}.shape"))
        files = sorted(rest.parent.glob(f"{name}.{key}.*.webp"), key=lambda p: int(p.suffixes[-2][1:]))
        with ThreadPoolExecutor(8) as threads:
            parts = list(threads.map(_sheet, files, [shape] * len(files)))
        held[key] = np.concatenate(parts)[: shape[0]]
    np.savez(out / f"{name}.npz", **held)


def _sheet(file: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    _, height, width, _ = shape
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB"))
    blocks = pixels.reshape(-1, height, _side(shape), width, 3).transpose(0, 2, 1, 3, 4)
    return blocks.reshape(-1, height, width, 3)


def pieces(files: list[Path], out: Path, most: float) -> int:
    """Folders of at most `most` MiB, each with the list of all files. Returns how many."""
    if out.exists():
        raise SystemExit(f"{out} exists: remove it first")
    loose = out / "loose"
    loose.mkdir(parents=True)
    made = [p for f in files for p in (sheets(f, loose) if f.suffix == ".npz" else [Path(shutil.copy(f, loose))])]
    about = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in made}
    folders: list[int] = []  # bytes in each
    for path in sorted(made, key=lambda p: -p.stat().st_size):
        size = path.stat().st_size
        if size > most * 2**20:
            raise SystemExit(f"{path.name} has {size / 2**20:.0f} MiB: more than --most")
        number = next((k for k, held in enumerate(folders) if held + size <= most * 2**20), len(folders))
        if number == len(folders):
            folders.append(0)
            (out / str(number)).mkdir()
            (out / str(number) / LIST).write_text(json.dumps(about, indent=1))
        folders[number] += size
        path.chmod(0o644)
        path.rename(out / str(number) / path.name)
    loose.rmdir()
    return len(folders)


def take(folder: Path, home: Path) -> list[str]:
    """Move what arrived below `folder` (nothing, if it is not there) to `home`. Returns what is missing still."""
    into = home / "in"
    into.mkdir(parents=True, exist_ok=True)
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        shutil.move(path, into / path.name)
    if not (into / LIST).is_file():
        return [LIST]
    about = json.loads((into / LIST).read_text())
    return [n for n, a in about.items() if not (into / n).is_file() or (into / n).stat().st_size != a["bytes"]]


def unpack(home: Path) -> None:
    """All files as they were, in `home/data`."""
    data = home / "data"
    data.mkdir(exist_ok=True)
    about = json.loads((home / "in" / LIST).read_text())
    for name, facts in about.items():
        if digest(home / "in" / name) != facts["sha256"]:
            raise SystemExit(f"{name} was damaged on its way: carry it again")
    for path in [home / "in" / n for n in about]:
        if path.name.endswith(".rest.npz"):
            unsheet(path, data)
        elif path.suffix != ".webp":
            shutil.copy(path, data)


def alive(home: Path) -> bool:
    """Whether a process of `start` is at work: it holds its number in a file and takes that away at its end."""
    try:
        pid = int((home / "pid").read_text())
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # dead, and nobody looked
    except (OSError, ValueError):
        return False


def start(home: Path, seconds: float, queue: list[str], command: str) -> int:
    check(queue)
    if missing := take(home / "nothing", home):
        print(f"not here yet: {', '.join(missing)}")
        return 1
    if alive(home):
        print("at work already")
        return 0
    unpack(home)
    tree = home / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    here = Path(__file__).resolve().parents[1]
    shutil.copytree(here, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
    for name in ("log", "runs", "results"):
        (home / name).mkdir(exist_ok=True)
    for path in (tree / "results").rglob("*.json"):  # what was made here since is newer
        there = home / "results" / path.relative_to(tree / "results")
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)
    driver = [sys.executable, str(tree / "tools" / "lease_queue.py"), str(home), str(seconds), command, *queue]
    with (home / "log" / "queue.err").open("a") as errors:
        process = subprocess.Popen(
            driver, cwd=tree, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
        )
    (home / "pid").write_text(str(process.pid))
    return 0


def check(queue: list[str]) -> None:
    """Names that are none would be found out on the machine that is paid for."""
    from experiments import experiments  # here: the other verbs need not wait for torch

    known = experiments()
    for item in map(Item.parse, queue):
        if item.experiment not in known:
            raise SystemExit(f"{item.experiment} is no experiment: {', '.join(known)}")
        if strange := set(item.runs) - {t.name for t in known[item.experiment].trials}:
            raise SystemExit(f"{item.experiment} has no run {', '.join(sorted(strange))}")


def bring(home: Path, out: Path) -> None:
    """Archives of logs and results; where one cannot be made now, as files come and go, the one before stays."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("log", "results"):
        part = out / f"{name}.part"
        with contextlib.suppress(OSError):
            with tarfile.open(part, "w:gz") as archive:
                archive.add(home / name, name, filter=lambda entry: None if entry.name.endswith(".part") else entry)
            part.replace(out / f"{name}.tgz")
        part.unlink(missing_ok=True)


def poll(home: Path, seconds: float, out: Path, every: float = 8.0) -> int:
    end = time.monotonic() + seconds
    while alive(home) and time.monotonic() < end:
        bring(home, out)
        time.sleep(min(every, max(0.0, end - time.monotonic())))
    bring(home, out)
    print("at work" if alive(home) else "NOT at work")
    for path in sorted((home / "log").glob("*"), key=lambda p: p.name.startswith("queue")):
        print(f"{path.name}:\n{path.read_text(errors='replace')[-4000 if path.name == 'queue.txt' else -500 :]}")
    return 0 if alive(home) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="The experiments on a lent GPU; the docstring says how.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    cut = verbs.add_parser("pieces")
    cut.add_argument("files", nargs="+", type=Path)
    cut.add_argument("--out", type=Path, required=True)
    cut.add_argument("--most", type=float, default=56.0, help="MiB of one piece")
    verbs.add_parser("take").add_argument("folder", type=Path)
    begin = verbs.add_parser("start")
    begin.add_argument("--seconds", type=float, required=True)
    begin.add_argument("--command", default=f"{sys.executable} -m experiments", help="what runs an experiment")
    begin.add_argument("queue", nargs="+")
    wait = verbs.add_parser("poll")
    wait.add_argument("seconds", type=float)
    wait.add_argument("--bring", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "pieces":
        print(f"{pieces(args.files, args.out, args.most)} pieces in {args.out}")
        return 0
    if args.verb == "take":
        missing = take(args.folder, HOME)
        print(f"missing: {', '.join(missing)}" if missing else "complete")
        return 0
    if args.verb == "start":
        return start(HOME, args.seconds, args.queue, args.command)
    return poll(HOME, args.seconds, args.bring)


if __name__ == "__main__":
    sys.exit(main())
