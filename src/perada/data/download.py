"""`perada data get NAME`: fetches the official archives, checks and unpacks them.

A cut download leaves `FILE.part`. The next connection, or the next command, asks the server for the rest.
"""

import errno
import gzip
import hashlib
import http.client
import os
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ..errors import InputError, RunError, unknown
from ..inputs import user_path
from ..temporary import sweep

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (None: unknown)

TRIES = 5  # connections in a row that bring nothing new
PAUSE = 1.0  # seconds before the second try, doubled before each further one
TIMEOUT = 30.0
_CHUNK = 1 << 18
UNPACKED = 10  # times as many bytes as an archive may have, its files may have
MEMBERS = 10_000  # files of an archive
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass(frozen=True)
class Remote:
    """A file to fetch; `checksum` is `md5:…` or `sha256:…` as published, or None."""

    url: str
    file: str
    checksum: str | None


@dataclass(frozen=True)
class Entry:
    """One line of `perada data list`; `folder` is what a download leaves below the root."""

    name: str
    title: str
    folder: str
    megabytes: int
    home: str
    remotes: tuple[Remote, ...] = ()
    by_hand: str = ""  # why and how, if no program may fetch it

    @property
    def most(self) -> int:
        """Returns the most bytes that one of its files may have."""
        return 2_000_000 * self.megabytes

    @property
    def checksum(self) -> str:
        if self.by_hand:
            return "by hand"
        return ", ".join(dict.fromkeys(r.checksum or "no published checksum" for r in self.remotes))


def _entry(name: str, table: dict[str, Any]) -> Entry:
    files = table.pop("files", [])
    remotes = (Remote(f["url"], urlsplit(f["url"]).path.rpartition("/")[2], f.get("checksum")) for f in files)
    return Entry(name, remotes=tuple(remotes), **table)


_TABLES = tomllib.loads((resources.files(__package__) / "catalogue.toml").read_text("utf8"))
CATALOGUE = {name: _entry(name, table) for name, table in _TABLES.items()}


def check(name: str, root: str | Path) -> Entry:
    """Returns the data set, if it is known and may be fetched by a program."""
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    entry = CATALOGUE[name]
    if entry.by_hand:
        how = entry.by_hand.format(home=entry.home, place=user_path(root) / entry.folder)
        raise InputError(f"{name} cannot be downloaded by a program: {how}")
    return entry


def unchecked(name: str, root: str | Path) -> list[Path]:
    """Returns the files of a data set whose publisher gives no checksum."""
    entry = CATALOGUE[name]
    return [user_path(root) / entry.folder / r.file for r in entry.remotes if r.checksum is None]


def get(name: str, root: str | Path, progress: Progress | None = None) -> Path:
    """Fetches, checks and unpacks a data set below `root`, unless it is there; returns its folder."""
    entry = check(name, root)
    base = user_path(root)
    place = base / entry.folder
    try:
        for remote in entry.remotes:
            if ".tar" not in remote.file:
                _fetch(remote, place, progress, entry.most)
            elif not place.is_dir():
                file = _fetch(remote, base, progress, entry.most)
                _unpack(file, base, entry.folder, UNPACKED * entry.most)
                file.unlink()  # it is as large as what it contains
    except OSError as error:
        raise RunError(
            f"cannot write to {base}: {error.strerror or error}: make room, or choose another folder"
        ) from error
    return place


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Returns a file's checksum as hexadecimal text."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, algorithm).hexdigest()


def _fetch(remote: Remote, folder: Path, progress: Progress | None, most: int) -> Path:
    """Returns the whole file, which gets its name only when its checksum is right."""
    folder.mkdir(parents=True, exist_ok=True)
    file, part = folder / remote.file, folder / f"{remote.file}.part"
    if file.is_file() and _is_official(file, remote):
        return file
    if remote.checksum is None or part.is_symlink():
        part.unlink(missing_ok=True)  # nothing would show that an old half and a new half do not match
    _download(remote.url, part, progress, most)
    if not _is_official(part, remote):
        part.unlink()
        raise InputError(
            f"{remote.file} from {remote.url} is not the official file (wrong checksum, expected {remote.checksum}): "
            "it was removed; try again, or fetch it by hand"
        )
    return part.replace(file)


def _is_official(file: Path, remote: Remote) -> bool:
    if remote.checksum is None:
        return True
    algorithm, _, published = remote.checksum.partition(":")
    return digest(file, algorithm) == published


def _download(url: str, part: Path, progress: Progress | None, most: int) -> None:
    """Completes the file `part`; gives up after `TRIES` connections in a row that bring nothing new."""
    tries, pause = 0, PAUSE
    while True:
        before = _length(part)
        try:
            if _receive(url, part, before, progress, most):
                return
            why = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            why = f"the server answers {error.code} {error.reason}"
            if error.code == 416:  # there are no more bytes, so ours are of another file
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code != 429:
                raise InputError(f"{url}: {why}: the file has moved; fetch it by hand") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and (error.errno in _DISK or error.filename is not None):
                raise  # the disk here, not the network
            why = str(getattr(error, "reason", "") or error) or type(error).__name__
        size = _length(part)
        tries, pause = (1, PAUSE) if size > before else (tries + 1, pause)
        if tries >= TRIES:
            saved = f"{size} bytes are kept in {part}: the same command continues from there"
            raise RunError(f"cannot download {url}: {why}; {saved if size else 'nothing was saved: try again later'}")
        time.sleep(pause)
        pause = min(2 * pause, 30.0)


def _length(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _receive(url: str, part: Path, offset: int, progress: Progress | None, most: int) -> bool:
    """Asks for the bytes from `offset`, writes what one connection gives; returns whether the file is whole."""
    headers = {"User-Agent": "perada"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
        total = str(answer.headers.get("Content-Length", ""))
        if answer.status == 206:
            span, _, total = str(answer.headers.get("Content-Range", "")).removeprefix("bytes ").partition("/")
            if span.partition("-")[0] != str(offset):
                raise http.client.HTTPException(f"asked for bytes from {offset}, the server sends {span or 'others'}")
        else:  # the server sends everything
            offset = 0
        whole = int(total) if total.isdecimal() else None
        with part.open("ab" if offset else "wb") as f:
            while data := answer.read(_CHUNK):
                offset += f.write(data)
                if offset > most:
                    part.unlink()
                    raise InputError(f"{url}: the server sends more than {most:,} bytes: removed; fetch it by hand")
                if progress is not None:
                    progress(part.name.removesuffix(".part"), offset, whole)
    return whole is None or offset == whole


class _Bounded:
    """A stream that refuses to give more than `most` bytes: a few kilobytes may unpack to terabytes."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most: int) -> None:
        self.stream, self.most, self.tell = stream, most, stream.tell

    def _check(self, end: int) -> None:
        if end > self.most:
            raise tarfile.ReadError(f"it unpacks to more than {self.most:,} bytes")

    def read(self, size: int) -> bytes:
        self._check(self.tell() + size)
        return self.stream.read(size)

    def seek(self, offset: int) -> int:
        self._check(offset)
        return self.stream.seek(offset)


def _stream(file: Path) -> BinaryIO | gzip.GzipFile:
    """Opens a .tar or .tar.gz file, unpacked."""
    with file.open("rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
    return gzip.open(file) if packed else file.open("rb")


def _unpack(file: Path, base: Path, folder: str, most: int) -> None:
    """Unpacks into a temporary folder, whose result is renamed: it is whole. `data` lets no file out of the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise InputError("unpacking needs Python 3.11.4 or newer, whose tarfile lets no file out of its folder")
    sweep(base, lambda name: name.startswith(".unpack-"))
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=base) as scratch:
        try:
            bounded: Any = _Bounded
            with _stream(file) as stream, tarfile.open(fileobj=bounded(stream, most), mode="r:") as tar:
                for number, member in enumerate(tar):
                    if number == MEMBERS:
                        raise tarfile.ReadError(f"it has more than {MEMBERS:,} files")
                    tar.extract(member, scratch, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            file.unlink()
            raise InputError(
                f"{file.name}: cannot be unpacked ({type(error).__name__}): it was removed; try again"
            ) from error
        inner = Path(scratch) / folder
        if not inner.is_dir():
            file.unlink()
            raise InputError(f"{file.name}: no folder {folder} in it: it was removed; fetch the data set by hand")
        try:
            os.replace(inner, base / folder)
        except OSError:
            if not (base / folder).is_dir():  # else another process was faster
                raise
