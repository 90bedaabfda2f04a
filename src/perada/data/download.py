"""`perada data get NAME`: the official archives, checked and unpacked.

pooch checks a file's checksum before the file gets its name. It uses our own downloader, because pooch's starts again
after a cut: ours keeps `FILE.part` and asks the server for the rest.
"""

from __future__ import annotations

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
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError, RunError, unknown
from .cache import sweep

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (None: unknown)

TRIES = 5  # connections in a row that bring nothing new
PAUSE = 1.0  # seconds before the second try, doubled before each further one
TIMEOUT = 30.0
_CHUNK = 1 << 18
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
        how = entry.by_hand.format(home=entry.home, place=Path(root).expanduser() / entry.folder)
        raise InputError(f"{name} cannot be downloaded by a program: {how}")
    return entry


def unchecked(name: str, root: str | Path) -> list[Path]:
    """Returns the files of a data set whose publisher gives no checksum."""
    entry = CATALOGUE[name]
    return [Path(root).expanduser() / entry.folder / r.file for r in entry.remotes if r.checksum is None]


def get(name: str, root: str | Path, progress: Progress | None = None) -> Path:
    """Fetches, checks and unpacks a data set below `root`; returns its folder. One that is there is left as it is."""
    entry = check(name, root)
    base = Path(root).expanduser()
    place = base / entry.folder
    try:
        base.mkdir(parents=True, exist_ok=True)
        archives = [r for r in entry.remotes if ".tar" in r.file]
        if archives and place.is_dir():
            return place
        for remote in entry.remotes:
            if remote in archives:
                file = _fetch(remote, base, progress)
                _unpack(file, base, entry.folder)
                file.unlink()  # it is as large as what it contains
            elif not (place / remote.file).is_file():
                _fetch(remote, place, progress)
    except OSError as error:
        raise RunError(
            f"cannot write to {base}: {error.strerror or error}: make room, or give another --root"
        ) from error
    return place


def sha256(path: Path) -> str:
    """Returns a checksum for files without a published one, so that two people can compare what they got."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fetch(remote: Remote, folder: Path, progress: Progress | None) -> Path:
    """Returns the whole file, which is in place only when its checksum is right."""
    import pooch  # type: ignore[import-untyped]  # here: slow to import, and most commands do not need it

    pooch.get_logger().setLevel("WARNING")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{remote.file}.part"
    if remote.checksum is None:
        part.unlink(missing_ok=True)  # nothing would show that an old half and a new half do not match
    try:
        return Path(
            pooch.retrieve(
                url=remote.url,
                known_hash=remote.checksum,
                fname=remote.file,
                path=folder,
                downloader=_Resuming(part, progress),
            )
        )
    except ValueError as error:  # a wrong checksum; pooch has removed the file
        raise InputError(
            f"{remote.file} from {remote.url} is not the official file (wrong checksum, expected {remote.checksum}): "
            "it was removed; try again, or fetch it by hand"
        ) from error


@dataclass
class _Resuming:
    """A pooch downloader: called with the URL and where pooch wants the file."""

    part: Path
    progress: Progress | None

    def __call__(self, url: str, output_file: Any, pooch: Any) -> None:
        tries, pause = 0, PAUSE
        while True:
            before = self._length()
            try:
                if self._once(url):
                    break
                why = "the connection was cut"
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 416:  # there are no more bytes, so ours are of another file
                    self.part.unlink(missing_ok=True)
                elif error.code < 500 and error.code != 429:
                    raise InputError(
                        f"{url}: the server answers {error.code} {error.reason}: the file has moved; fetch it by hand"
                    ) from error
                why = f"the server answers {error.code} {error.reason}"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and (error.errno in _DISK or error.filename is not None):
                    raise  # the disk here, not the network
                why = str(getattr(error, "reason", "") or error) or type(error).__name__
            have = self._length()
            tries, pause = (1, PAUSE) if have > before else (tries + 1, pause)
            if tries >= TRIES:
                kept = f"{have} bytes are kept in {self.part}: the same command continues from there"
                raise RunError(
                    f"cannot download {url}: {why}; {kept if have else 'nothing was saved: try again later'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 30.0)
        os.replace(self.part, output_file)

    def _length(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _once(self, url: str) -> bool:
        """Fetches what one connection gives; returns whether the file is whole."""
        have = self._length()
        request = urllib.request.Request(url, headers={"User-Agent": "perada"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            start, total = _extent(answer, have)
            with self.part.open("ab" if start else "wb") as f:
                at = start
                while data := answer.read(_CHUNK):
                    f.write(data)
                    at += len(data)
                    if self.progress is not None:
                        self.progress(self.part.name.removesuffix(".part"), at, total)
        return total is None or at == total


def _extent(answer: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Returns where the bytes that come belong, and the length of the whole file, if the server says it."""
    if answer.status == 206:
        span, _, whole = str(answer.headers.get("Content-Range", "")).removeprefix("bytes ").partition("/")
        start = span.partition("-")[0]
        if start == str(have):
            return have, int(whole) if whole.isdecimal() else None
        raise http.client.HTTPException(f"asked for bytes from {have}, the server sends {span or 'others'}")
    length = str(answer.headers.get("Content-Length", ""))  # 200: the server sends everything
    return 0, int(length) if length.isdecimal() else None


def _unpack(file: Path, base: Path, folder: str) -> None:
    """Unpacks into a temporary folder, whose result is renamed: it is whole. `data` lets no file out of the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise InputError("unpacking needs Python 3.11.4 or newer, whose tarfile lets no file out of its folder")
    sweep(base, ".unpack-*")
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=base) as scratch:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(scratch, filter="data")
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
