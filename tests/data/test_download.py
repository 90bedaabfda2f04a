"""`perada data get`: against a server on this machine that can cut, corrupt and refuse."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perada.data import download
from perada.data.download import CATALOGUE, Entry, Remote, get
from perada.errors import InputError, RunError

FOLDER = "cifar-10-batches-py"


def archive(**more: bytes) -> bytes:
    held = io.BytesIO()
    noise = np.random.default_rng(0).bytes(1 << 19)  # does not compress: the file is longer than one read
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name, data in {f"{FOLDER}/data_batch_1": noise, f"{FOLDER}/readme.html": b"hello", **more}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return held.getvalue()


GOOD = archive()


class Server(ThreadingHTTPServer):
    """Serves `body`; each request takes the next way to behave, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = GOOD
        self.ways: list[str] = ["good"]
        self.ranges: list[str | None] = []  # the Range header of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/cifar.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        self.server.ranges.append(span)
        way = self.server.ways.pop(0) if len(self.server.ways) > 1 else self.server.ways[0]
        if way.isdecimal():
            self.send_error(int(way))
            return
        body, start = self.server.body, 0
        if span and way != "no ranges":
            start = int(span.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
            shift = 7 if way == "another range" else 0
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start + shift}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest[: len(rest) // 2] if way == "cut" else rest if way != "nothing" else b"")
        self.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Server()
    remote = Remote(made.url, "cifar.tar.gz", f"md5:{hashlib.md5(GOOD).hexdigest()}")
    small = Remote(made.url, "small.npy", None)
    monkeypatch.setitem(download.CATALOGUE, "tiny", Entry("tiny", "a test", FOLDER, 1, made.url, (remote,)))
    monkeypatch.setitem(download.CATALOGUE, "loose", Entry("loose", "a test", "Loose", 1, made.url, (small,)))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def unpacked(root: Path) -> None:
    assert [p.name for p in root.iterdir()] == [FOLDER], "nothing else is left"
    assert sorted(p.name for p in (root / FOLDER).iterdir()) == ["data_batch_1", "readme.html"]
    assert (root / FOLDER / "data_batch_1").stat().st_size == 1 << 19


def failed(error: type[Exception], name: str, root: Path, *words: str) -> None:
    with pytest.raises(error) as found:
        get(name, root)
    assert "\n" not in str(found.value)
    for word in words:
        assert word in str(found.value)


def test_a_good_download(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    root = tmp_path / "deep" / "data"
    assert get("tiny", root, lambda *now: told.append(now)) == root / FOLDER
    unpacked(root)
    assert len(told) > 1
    assert told[-1] == ("cifar.tar.gz", len(GOOD), len(GOOD))
    assert [at for _, at, _ in told] == sorted({at for _, at, _ in told})
    get("tiny", root)
    assert server.ranges == [None], "what is there is not fetched again"


def test_a_cut_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.ways = ["cut", "nothing", "cut", "good"]
    told: list[int] = []
    get("tiny", tmp_path, lambda name, at, total: told.append(at))
    unpacked(tmp_path)
    half = len(GOOD) // 2
    more = half + (len(GOOD) - half) // 2
    assert server.ranges == [None, f"bytes={half}-", f"bytes={half}-", f"bytes={more}-"]
    assert told[-1] == len(GOOD)


def test_the_next_command_goes_on_from_the_part(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ways = ["cut", "nothing"]
    failed(RunError, "tiny", tmp_path, server.url, "cifar.tar.gz.part", "the same command")
    assert len(server.ranges) == 1 + download.TRIES - 1, "tries that bring nothing are counted"
    part = tmp_path / "cifar.tar.gz.part"
    assert part.read_bytes() == GOOD[: len(GOOD) // 2]
    assert list(tmp_path.iterdir()) == [part]
    server.ways, server.ranges = ["good"], []
    get("tiny", tmp_path)
    assert server.ranges == [f"bytes={len(GOOD) // 2}-"]
    unpacked(tmp_path)


def test_a_server_without_ranges_sends_everything_again(server: Server, tmp_path: Path) -> None:
    server.ways = ["cut", "no ranges"]
    get("tiny", tmp_path)
    unpacked(tmp_path)
    assert server.ranges == [None, f"bytes={len(GOOD) // 2}-"]


def test_a_server_that_sends_another_range_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.ways = ["cut", "another range", "good"]
    get("tiny", tmp_path)
    unpacked(tmp_path)
    assert len(server.ranges) == 3


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar.tar.gz.part").write_bytes(GOOD + b"x")
    get("tiny", tmp_path)
    unpacked(tmp_path)
    assert server.ranges == [f"bytes={len(GOOD) + 1}-", None]


def test_a_corrupt_file_is_refused_and_removed(server: Server, tmp_path: Path) -> None:
    server.body = GOOD[:1000] + b"x" + GOOD[1001:]
    failed(InputError, "tiny", tmp_path, "cifar.tar.gz", server.url, "checksum", "removed")
    assert list(tmp_path.iterdir()) == []
    server.body = GOOD
    (tmp_path / "cifar.tar.gz.part").write_bytes(b"of another file")
    failed(InputError, "tiny", tmp_path, "checksum")
    assert list(tmp_path.iterdir()) == []
    get("tiny", tmp_path)
    unpacked(tmp_path)


def test_refusals_of_the_server(server: Server, tmp_path: Path) -> None:
    server.ways = ["404"]
    failed(InputError, "tiny", tmp_path, server.url, "404", "by hand")
    assert len(server.ranges) == 1, "a file that is gone is not asked for again"
    assert list(tmp_path.iterdir()) == []
    server.ways = ["503", "503", "good"]
    get("tiny", tmp_path)
    unpacked(tmp_path)


def test_no_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote("http://127.0.0.1:1/x.tar.gz", "x.tar.gz", "md5:0")
    monkeypatch.setitem(download.CATALOGUE, "tiny", Entry("tiny", "", FOLDER, 1, "", (remote,)))
    failed(RunError, "tiny", tmp_path, "127.0.0.1:1", "refused", "nothing was saved")


def test_a_file_without_a_checksum_never_joins_old_and_new(server: Server, tmp_path: Path) -> None:
    (tmp_path / "Loose").mkdir()
    (tmp_path / "Loose" / "small.npy.part").write_bytes(b"of an old version")
    place = get("loose", tmp_path)
    assert (place / "small.npy").read_bytes() == GOOD
    assert [p.name for p in place.iterdir()] == ["small.npy"]
    assert download.digest(place / "small.npy") == hashlib.sha256(GOOD).hexdigest()
    get("loose", tmp_path)
    assert server.ranges == [None]
    assert download.CATALOGUE["loose"].checksum == "no published checksum"


def offer(server: Server, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    server.body = body
    remote = Remote(server.url, "cifar.tar.gz", f"sha256:{hashlib.sha256(body).hexdigest()}")
    monkeypatch.setitem(download.CATALOGUE, "tiny", Entry("tiny", "", FOLDER, 1, "", (remote,)))


def test_an_archive_cannot_write_outside(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(server, archive(**{"../../evil": b"x"}), monkeypatch)
    failed(InputError, "tiny", tmp_path / "a" / "b", "cifar.tar.gz", "cannot be unpacked")
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "b"]


@pytest.mark.parametrize("body", [GOOD[:-5000], b"hello", b"\x1f\x8b" + bytes(100)])
def test_an_archive_that_cannot_be_unpacked_leaves_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    offer(server, body, monkeypatch)
    failed(InputError, "tiny", tmp_path, "cifar.tar.gz", "cannot be unpacked")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_something_else_and_a_root_that_cannot_be(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    failed(RunError, "tiny", tmp_path / "file" / "data", "another folder")
    remote = download.CATALOGUE["tiny"].remotes
    monkeypatch.setitem(download.CATALOGUE, "tiny", Entry("tiny", "", "other-folder", 1, "", remote))
    failed(InputError, "tiny", tmp_path / "data", "no folder other-folder")
    assert list((tmp_path / "data").iterdir()) == []


def unpack(server: Server, body: bytes, root: Path) -> None:
    """What the server sends is the official file, and does not unpack."""
    server.body = body
    remote = Remote(server.url, "cifar.tar.gz", f"md5:{hashlib.md5(body).hexdigest()}")
    CATALOGUE["tiny"] = Entry("tiny", "a test", FOLDER, 1, server.url, (remote,))
    failed(InputError, "tiny", root, "cifar.tar.gz", "cannot be unpacked")
    assert list(root.iterdir()) == []


def test_an_archive_that_unpacks_to_far_more(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 kB become 50 MB; a header alone may say that its file has a terabyte, or be as long itself."""
    unpack(server, archive(**{f"{FOLDER}/zeros": bytes(50_000_000)}), tmp_path)
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        info = tarfile.TarInfo(f"{FOLDER}/zeros")
        info.size, info.type = 1 << 40, kind
        unpack(server, info.tobuf() + bytes(1024), tmp_path)
    monkeypatch.setattr(download, "MEMBERS", 100)
    unpack(server, archive(**{f"{FOLDER}/{i}": b"" for i in range(100)}), tmp_path)


def test_a_server_that_never_stops(server: Server, tmp_path: Path) -> None:
    server.body = bytes(3_000_000)
    failed(InputError, "loose", tmp_path, "sends more than 2,000,000 bytes")
    assert list((tmp_path / "Loose").iterdir()) == []


def test_a_part_that_is_a_link_is_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "cifar.tar.gz.part").symlink_to(tmp_path / "precious")
    get("tiny", tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("name", ["office-home", "chexpert"])
def test_what_must_be_fetched_by_hand(name: str, tmp_path: Path) -> None:
    entry = download.CATALOGUE[name]
    why = {"office-home": "form", "chexpert": "licence"}[name]
    failed(InputError, name, tmp_path, entry.home, why, str(tmp_path / entry.folder), ".zip")
    assert list(tmp_path.iterdir()) == []


def test_the_catalogue() -> None:
    names = [entry.name for entry in CATALOGUE.values()]
    assert names[0] == "cifar10"
    assert {"cifar100", "cifar10.1", "cifar10-c", "stl10", "office-home", "chexpert"} < set(names)
    for entry in CATALOGUE.values():
        assert entry.title
        assert entry.home.startswith("https://")
        assert bool(entry.by_hand) != bool(entry.remotes)
        for remote in entry.remotes:
            assert remote.url.startswith("http")
            assert remote.file in remote.url
            if remote.checksum is not None:
                assert len(bytes.fromhex(remote.checksum.removeprefix("md5:"))) == 16
    assert [e.name for e in CATALOGUE.values() if "no published" in e.checksum] == ["cifar10.1"]
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        get("cifar1", ".")
