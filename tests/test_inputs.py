"""Where input enters: only plain files are read, nesting and numbers are bounded, and names are printed escaped."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perada.cli import main as cli
from perada.config import parse_setting, read_toml, resolve
from perada.data import cifar, read_image
from perada.data.arrays import npz
from perada.data.manifest import manifest
from perada.errors import InputError
from perada.inputs import plain_file, printable
from perada.models import read_weights


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails instead of waiting for ever."""

    def late(*about: Any) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(read: Callable[[], Any], *words: str) -> None:
    with within(5), pytest.raises(InputError) as error:
        read()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# Plain files.

READERS: dict[str, Callable[[Path], Any]] = {
    "x.png": lambda path: read_image(path, 8),
    "x.dcm": lambda path: read_image(path, 8),
    "x.npz": lambda path: npz(str(path)),
    "x.csv": lambda path: manifest(str(path)),
    "x.toml": lambda path: resolve(str(path)),
    "x.npy": cifar._npy,
    "x.bin": cifar._bytes,
    "x.txt": cifar._lines,
    "x.pickle": cifar._read_pickle,
    "x.safetensors": lambda path: read_weights(str(path), "resnet8"),
    "x.pth": lambda path: read_weights(str(path), "resnet8"),
}


@pytest.mark.parametrize("name", READERS)
def test_only_plain_files_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    refused(lambda: READERS[name](path), name)
    path.unlink()
    path.mkdir()
    refused(lambda: READERS[name](path), name)
    path.rmdir()
    path.symlink_to("/dev/null")  # and /dev/zero would never end
    refused(lambda: READERS[name](path), name)


def test_a_refusal_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    Path("file").write_bytes(bytes(10))
    for name, kind in {"pipe": "a pipe", "socket": "a socket", "/dev/zero": "a device", ".": "a folder"}.items():
        refused(lambda name=name: plain_file(Path(name)), f"cannot read {name}: it is {kind}, not a file")
    refused(lambda: plain_file(Path("file"), 9), "it has 10 bytes, and the most is 9")
    refused(lambda: plain_file(Path("a\0b")), "'a\\x00b' is not the name of a file")
    assert plain_file(Path("file"), 10) == Path("file")
    assert plain_file(Path("missing")) == Path("missing")


# Settings.


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    for text in ("x = " + "[" * 5000, "x = " + "{a = " * 5000):
        file.write_text(text)
        refused(lambda: read_toml(file), "deep.toml", "nested too deeply")
        refused(lambda text=text: parse_setting("train.lr" + text[1:]), "--set train.lr", "nested too deeply")
    file.write_text("# " + "x" * (1 << 20))
    refused(lambda: read_toml(file), "deep.toml", "the most is 1,048,576")


@pytest.mark.parametrize("value", ["1" * 5000, "1" + "0" * 400, "1e400", "nan", "-inf", "true", "١٢", "²", "\x1b[2J"])
@pytest.mark.parametrize("key", ["train.lr", "train.rounds", "run.seed"])
def test_no_number(key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--set", f"{key}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {key} must be ")
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said


def test_numbers_from_python() -> None:
    """Python prints no number of more than 4,300 digits, so the message does not have it."""
    for key in ("train.lr", "train.rounds", "run.seed", "distill.candidates"):
        refused(lambda key=key: resolve("digits", {key: 10**5000}), key)
    refused(lambda: resolve("digits", {"distill.candidates": [10**5000]}), "distill.candidates")


@pytest.mark.parametrize("text", ["=3", ".=3", "train.=3", ".lr=3", "train..lr=3", "\x1b.lr=3", "a\nb.lr=3", "é=1"])
def test_odd_keys(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--set", text]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said


def test_lanes_in_superscript(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--lanes", "²"]) == 2
    assert capsys.readouterr().err == "error: --lanes ²: auto, or a number from 1\n"


# Names.


def test_printable() -> None:
    assert printable("Zürich 北京 9×9 ±") == "Zürich 北京 9×9 ±"
    assert printable("a\x1b[2J\nb\u202ec\udc80\x9b") == "a\\x1b[2J\\nb\\u202ec\\udc80\\x9b"
