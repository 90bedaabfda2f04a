"""Carrying run folders to another machine, in pieces that a narrow door lets through.

A folder becomes one tar archive, cut into numbered pieces of at most so many bytes, and a small JSON file with each
piece's sha256. Left out is what the other machine does not need to go on: all but the newest whole checkpoint of a run,
every checkpoint of a finished run, its report. Equal files of weights (the backbone, which every run keeps) are stored
once.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perada.errors import InputError
from perada.runs.folder import RunFolder, write_atomic
from perada.runs.jsonfiles import fits

PIECE = 15 * 2**20  # four of them and the list go through a door of 64 MiB
KIND = "perada pieces"


class _Pieces(io.RawIOBase):
    """A file that is written as numbered pieces."""

    def __init__(self, out: Path, name: str, most: int) -> None:
        self.out, self.name, self.most = out, name, most
        self.held, self.written = bytearray(), list[dict[str, Any]]()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.held += data
        while len(self.held) >= self.most:
            self._cut(self.most)
        return len(data)

    def _cut(self, size: int) -> None:
        piece = bytes(self.held[:size])
        del self.held[:size]
        name = f"{self.name}.tar.{len(self.written):03d}"
        write_atomic(self.out / name, piece)
        self.written.append({"name": name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})

    def close(self) -> None:
        if self.held:
            self._cut(len(self.held))
        super().close()


class _Joined(io.RawIOBase):
    """The pieces, read as one file; each is checked before a byte of it is given."""

    def __init__(self, folder: Path, pieces: list[dict[str, Any]]) -> None:
        self.left, self.held = iter([(folder / p["name"], p) for p in pieces]), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.held:
            path, piece = next(self.left, (None, {}))
            if path is None:
                return 0
            self.held = memoryview(_checked(path, piece))
        size = min(len(buffer), len(self.held))
        buffer[:size], self.held = self.held[:size], self.held[size:]
        return size


def _checked(path: Path, piece: dict[str, Any]) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != piece["sha256"]:
        raise InputError(f"{path} does not match its checksum: carry it again")
    return data


def needed(folder: Path) -> Iterator[Path]:
    """The files below `folder` that are needed to go on with its runs, or to make results of them."""
    inside = {p for p in folder.rglob("*") if p.is_file()}
    for run in {p.parent for p in inside if p.name == "config.toml"}:
        done = (run / "summary.json").is_file()
        checkpoints = {p for p in inside if (run / "checkpoints") in p.parents}
        keep = None if done else _newest(RunFolder(run))
        inside -= {p for p in checkpoints if keep is None or keep not in p.parents}
        inside.discard(run / "report.html")
        if done:
            inside.discard(run / "backbone.safetensors")
    return iter(sorted(p for p in inside if not p.name.endswith(".part")))


def _newest(run: RunFolder) -> Path | None:
    """Its newest whole checkpoint: a damaged one is not worth carrying."""
    found, _ = run.load()
    return None if found is None else run.checkpoints / f"round-{found.round:04d}"


def pack(folder: Path, out: Path, piece: int = PIECE) -> dict[str, Any]:
    """`out/NAME.json` and `out/NAME.tar.000`, ...; returns what the JSON file says."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    name = folder.resolve().name
    if out.is_dir() and any(out.glob(f"{name}.tar.*")):
        raise InputError(f"{out} has pieces of {name} already: remove them, or choose another --out")
    files = list(needed(folder))
    if not files:
        raise InputError(f"{folder} holds nothing to carry")
    stream, seen = _Pieces(out, name, piece), dict[str, str]()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=stream, mode="w|", dereference=True) as archive:
            for path in files:
                _add(archive, path, str(path.relative_to(folder)), seen)
        stream.close()
        about = {"kind": KIND, "name": name, "files": len(files), "pieces": stream.written}
        write_atomic(out / f"{name}.json", (json.dumps(about, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}") from error
    return about


def _add(archive: tarfile.TarFile, path: Path, name: str, seen: dict[str, str]) -> None:
    """A file of weights that is there already is a link to it: weights are replaced, never written to, so that two
    runs may share a file; other files are not shared."""
    entry = archive.gettarinfo(path, name)
    entry.type = tarfile.REGTYPE  # on this disk it may be a link to a checkpoint that is left out
    entry.size, entry.linkname = path.stat().st_size, ""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    if path.suffix == ".safetensors":
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest in seen:
            entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, seen[digest], 0
            archive.addfile(entry)
            return
        seen[digest] = name
    with path.open("rb") as f:
        archive.addfile(entry, f)


def unpack(about: Path, out: Path) -> int:
    """The folder again, `out/NAME`, whole or not at all; refuses where a piece is missing or damaged. Returns how many
    files it has."""
    held = _listed(about)
    pieces, target = held["pieces"], out / held["name"]
    missing = [p["name"] for p in pieces if not (about.parent / p["name"]).is_file()]
    if missing:
        raise InputError(f"{len(missing)} of {len(pieces)} pieces are not here, {missing[0]} first: carry them too")
    for piece in pieces:  # before anything is written
        _checked(about.parent / piece["name"], piece)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists: move it away, or choose another --out")
    part = out / f".{held['name']}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with tarfile.open(fileobj=io.BufferedReader(_Joined(about.parent, pieces)), mode="r|") as archive:
            archive.extractall(part, filter="data")
        if sum(p.is_file() for p in part.rglob("*")) != held["files"]:  # an archive's end may be lost unnoticed
            raise tarfile.ReadError
        os.replace(part, target)
    except tarfile.TarError as error:
        raise InputError(f"{about} does not name all of its pieces: carry it again") from error
    except OSError as error:
        raise InputError(f"cannot write to {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return int(held["files"])


def _listed(about: Path) -> dict[str, Any]:
    """What `pack` wrote of its pieces; names in it are names, not ways to elsewhere."""
    try:
        held = json.loads(about.read_text("utf8"))
    except OSError as error:
        raise InputError(f"cannot read {about}: {error.strerror}") from error
    except ValueError:
        held = None
    if fits(held, {"kind": str, "name": str, "files": int, "pieces": list}) and held["kind"] == KIND:
        pieces = [p for p in held["pieces"] if fits(p, {"name": str, "sha256": str})]
        name, wanted = held["name"], [f"{held['name']}.tar.{i:03d}" for i in range(len(held["pieces"]))]
        if [p["name"] for p in pieces] == wanted and name == Path(name).name and name not in ("", ".."):
            return dict(held)
    raise InputError(f"{about} is no list of pieces: give the .json file that `reproduce pack` wrote")
