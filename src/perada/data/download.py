"""`perada data get NAME`: the official archives, checked and unpacked.

pooch checks a file's sum before it gets its name. Our own downloader stands in for pooch's, which starts anew
after a cut: it keeps `FILE.part` and asks the server for the rest.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import InputError, RunError, unknown

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (None: not said)

TRIES = 5  # connections that bring nothing new, one after the other
PAUSE = 1.0  # seconds before the second try, doubled before each further one
TIMEOUT = 30.0
STALE = 24 * 3600.0  # seconds after which a half-unpacked folder must be a killed process's
_CHUNK = 1 << 18
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@dataclass(frozen=True)
class Remote:
    """A file to fetch. `checksum` is `md5:…` or `sha256:…`, as its publisher gives it; None: none is published."""

    url: str
    file: str
    checksum: str | None


@dataclass(frozen=True)
class Entry:
    """One line of `perada data list`. `folder` is what there is below the root afterwards."""

    name: str
    title: str
    folder: str
    megabytes: int
    home: str
    remotes: tuple[Remote, ...] = ()
    by_hand: str = ""  # why and how, where no program may fetch it

    @property
    def checksum(self) -> str:
        if self.by_hand:
            return "by hand"
        return ", ".join(dict.fromkeys(r.checksum or "no published checksum" for r in self.remotes))


_TORONTO, _KRIZ = "https://www.cs.toronto.edu/~kriz/", "https://www.cs.toronto.edu/~kriz/cifar.html"
_NEW = "https://github.com/modestyachts/CIFAR-10.1/raw/master/datasets/"


def _cifar(name: str, title: str, folder: str, file: str, md5: str, megabytes: int) -> Entry:
    return Entry(name, title, folder, megabytes, _KRIZ, (Remote(_TORONTO + file, file, f"md5:{md5}"),))


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _cifar(
            *("cifar10", "CIFAR-10: 60,000 images of 32×32, 10 classes", "cifar-10-batches-py"),
            *("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 163),
        ),
        _cifar(
            *("cifar10-binary", "CIFAR-10, the same in binary files", "cifar-10-batches-bin"),
            *("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 162),
        ),
        _cifar(
            *("cifar100", "CIFAR-100: 60,000 images of 32×32, 100 classes", "cifar-100-python"),
            *("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 161),
        ),
        _cifar(
            *("cifar100-binary", "CIFAR-100, the same in binary files", "cifar-100-binary"),
            *("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 161),
        ),
        Entry(
            *("cifar10.1", "CIFAR-10.1 v6: 2,000 new test images for CIFAR-10", "CIFAR-10.1", 6),
            "https://github.com/modestyachts/CIFAR-10.1",
            tuple(Remote(_NEW + f, f, None) for f in ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy")),
        ),
        Entry(
            *("cifar10-c", "CIFAR-10-C: CIFAR-10's test images under 19 corruptions, 5 severities", "CIFAR-10-C", 2784),
            "https://zenodo.org/records/2535967",
            (
                Remote(
                    "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",
                    *("CIFAR-10-C.tar", "md5:56bf5dcef84df0e2308c6dcbcbbd8499"),
                ),
            ),
        ),
        Entry(
            *("stl10", "STL-10: 100,000 unlabelled and 13,000 labelled images of 96×96", "stl10_binary", 2518),
            "https://cs.stanford.edu/~acoates/stl10/",
            (
                Remote(
                    "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                    *("stl10_binary.tar.gz", "md5:91f7769df0f17e558f3565bffb0c7dfb"),
                ),
            ),
        ),
        Entry(
            *("office-home", "Office-Home: 15,588 images, 4 domains, 65 classes", "OfficeHomeDataset_10072016", 1100),
            "https://www.hemanthdv.org/officeHomeDataset.html",
            by_hand="its authors give it out through Google Drive behind a form: open {home}, fetch "
            "OfficeHomeDataset_10072016.zip and unpack it, so that there is {place}/Art (and Clipart, Product, "
            "Real World)",
        ),
        Entry(
            *("chexpert", "CheXpert-v1.0-small: 223,414 chest X-rays", "CheXpert-v1.0-small", 11000),
            "https://stanfordmlgroup.github.io/competitions/chexpert/",
            by_hand="Stanford's licence asks everybody to register: open {home}, register, fetch "
            "CheXpert-v1.0-small.zip and unpack it, so that there is {place}/train.csv (and train, valid.csv, valid)",
        ),
    )
}


def catalogue() -> tuple[Entry, ...]:
    """What there is to get, in the order to list it."""
    return tuple(CATALOGUE.values())


def check(name: str, root: str | Path) -> Entry:
    """The data set, if it is known and may be fetched by a program."""
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    entry = CATALOGUE[name]
    if entry.by_hand:
        how = entry.by_hand.format(home=entry.home, place=Path(root).expanduser() / entry.folder)
        raise InputError(f"{name} cannot be downloaded by a program: {how}")
    return entry


def unchecked(name: str, root: str | Path) -> list[Path]:
    """The files of a data set whose publisher gives no checksum."""
    entry = CATALOGUE[name]
    return [Path(root).expanduser() / entry.folder / r.file for r in entry.remotes if r.checksum is None]


def get(name: str, root: str | Path, progress: Progress | None = None) -> Path:
    """Fetch, check and unpack a data set below `root`; returns its folder. One that is there is left as it is."""
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
                file.unlink()  # it is as large as what came out of it
            elif not (place / remote.file).is_file():
                _fetch(remote, place, progress)
    except OSError as error:
        raise RunError(
            f"cannot write to {base}: {error.strerror or error}: make room, or give another --root"
        ) from error
    return place


def sha256(path: Path) -> str:
    """For files without a published checksum: print it, so that two people can compare what they got."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fetch(remote: Remote, folder: Path, progress: Progress | None) -> Path:
    """The whole file, in place only when its sum is right."""
    import pooch  # type: ignore[import-untyped]  # here: it takes a moment that most commands need not wait

    pooch.get_logger().setLevel("WARNING")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{remote.file}.part"
    if remote.checksum is None:
        part.unlink(missing_ok=True)  # nothing would show that an old half and a new one do not belong together
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
    except ValueError as error:  # pooch's word for a wrong sum; it has removed the file
        raise InputError(
            f"{remote.file} from {remote.url} is not the official file (wrong checksum, expected {remote.checksum}): "
            "it was removed; try again, or fetch it by hand"
        ) from error


class _Answer(Protocol):
    """The part of `http.client.HTTPResponse` used here."""

    status: int
    headers: Any

    def read(self, amount: int) -> bytes: ...


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
                if error.code == 416:  # we hold as much as there is, or more: of another file
                    self.part.unlink(missing_ok=True)
                elif error.code < 500 and error.code != 429:
                    raise InputError(
                        f"{url}: the server answers {error.code} {error.reason}: the file has moved; fetch it by hand"
                    ) from error
                why = f"the server answers {error.code} {error.reason}"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and (error.errno in _DISK or error.filename is not None):
                    raise  # our own disk, not the network
                why = str(getattr(error, "reason", "") or error) or type(error).__name__
            have = self._length()
            tries, pause = (1, PAUSE) if have > before else (tries + 1, pause)
            if tries >= TRIES:
                kept = f"{have} bytes are kept in {self.part}: the same command goes on from there"
                raise RunError(
                    f"cannot download {url}: {why}; {kept if have else 'nothing was saved: try again later'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 30.0)
        os.replace(self.part, output_file)

    def _length(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _once(self, url: str) -> bool:
        """One connection; True when the file is whole."""
        have = self._length()
        request = urllib.request.Request(url, headers={"User-Agent": "perada"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            start, total = _extent(answer, have)
            with self.part.open("r+b" if start else "wb") as f:
                f.seek(start)
                f.truncate()
                at = start
                while data := answer.read(_CHUNK):
                    f.write(data)
                    at += len(data)
                    if self.progress is not None:
                        self.progress(self.part.name.removesuffix(".part"), at, total)
        return total is None or at == total


def _extent(answer: _Answer, have: int) -> tuple[int, int | None]:
    """Where the bytes that come belong, and the length of the whole file where the server says it."""
    if answer.status == 206:
        span, _, whole = str(answer.headers.get("Content-Range", "")).removeprefix("bytes ").partition("/")
        start = span.partition("-")[0]
        if start == str(have):
            return have, int(whole) if whole.isdecimal() else None
        raise http.client.HTTPException(f"asked for bytes from {have}, the server sends {span or 'others'}")
    length = str(answer.headers.get("Content-Length", ""))  # 200: the server knows no ranges and sends everything
    return 0, int(length) if length.isdecimal() else None


def _unpack(file: Path, base: Path, folder: str) -> None:
    """Into a folder of our own, then renamed: what has its name is whole. `data` lets nothing out of the folder."""
    if not hasattr(tarfile, "data_filter"):
        raise InputError("unpacking needs Python 3.11.4 or newer, whose tarfile lets no file out of its folder")
    for old in base.glob(".unpack-*"):
        if old.is_dir() and time.time() - old.stat().st_mtime > STALE:
            shutil.rmtree(old, ignore_errors=True)
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
            raise InputError(f"{file.name}: holds no folder {folder}: it was removed; fetch the data set by hand")
        try:
            os.replace(inner, base / folder)
        except OSError:
            if not (base / folder).is_dir():  # else another process was faster
                raise
