"""Small valid inputs with a few bytes changed: each is read or refused in one line, in little time and memory.

`PERADA_EXAMPLES` is the number of mutations per kind of file; `make torture` sets 1000.
"""

from __future__ import annotations

import io
import os
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dicom import write_dicom
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from perada.config import resolve
from perada.data import DataOptions, build_federation, own, read_image
from perada.errors import InputError, RunError
from perada.models import read_weights

EXAMPLES = int(os.environ.get("PERADA_EXAMPLES", "25"))
X = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)


def written(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def picture(kind: str) -> bytes:
    return written(lambda f: Image.fromarray(X[0]).convert("P" if kind == "GIF" else "RGB").save(f, kind))


def dicom_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pixels = X[0].astype(np.uint16) * 200
        return write_dicom(Path(folder) / "x.dcm", pixels, WindowCenter=9000, WindowWidth=20000).read_bytes()


def arrays(compress: bool) -> bytes:
    """Stored without compression, so that a changed byte is in a header or a value."""
    site, split = np.repeat(["a", "b"], 6), ["train", "train", "train", "val", "test", "train"] * 2
    save_arrays = np.savez_compressed if compress else np.savez
    return written(lambda f: save_arrays(f, x=X, y=np.arange(12) % 3, site=site, split=split))


def unchecked(data: bytes) -> bytes:
    """Returns a zip file with the checksums that its content has, so that a mutation is not found by them alone."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = {}
            for info in archive.infolist():
                start = info.header_offset + 30 + len(info.filename.encode()) + len(info.extra)
                parts[info.filename] = data[start : start + info.compress_size]
        return written(lambda f: _zipped(f, parts))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError):
        return data


def _zipped(file: io.BytesIO, parts: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


TABLE = "path,site,split,label\n" + "".join(f"{i}.png,{'ab'[i % 2]},,c{i % 3}\n" for i in range(12))
TENSORS = {"conv1.weight": torch.ones(2, 3), "fc.bias": torch.zeros(4)}


def data(path: Path) -> Any:
    options = DataOptions(name="folder", root=str(path), size=8, partition="site", val=0.1, test=0.1)
    return build_federation(options, source=own(options))


KINDS: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "png": ("x.png", picture("PNG"), lambda path: read_image(path, 8)),
    "jpeg": ("x.jpg", picture("JPEG"), lambda path: read_image(path, 8)),
    "gif": ("x.gif", picture("GIF"), lambda path: read_image(path, 8)),
    "tiff": ("x.tif", picture("TIFF"), lambda path: read_image(path, 8)),
    "bmp": ("x.bmp", picture("BMP"), lambda path: read_image(path, 8)),
    "webp": ("x.webp", picture("WEBP"), lambda path: read_image(path, 8)),
    "dicom": ("x.dcm", dicom_file(), lambda path: read_image(path, 8)),
    "npz": ("x.npz", arrays(False), data),
    "npz, compressed": ("x.npz", arrays(True), data),
    "npz, right checksums": ("x.npz", arrays(False), data),
    "csv": ("x.csv", TABLE.encode(), data),
    "toml": ("x.toml", resolve("digits").toml().encode(), lambda path: resolve(str(path))),
    "safetensors": ("x.safetensors", save(TENSORS), lambda path: read_weights(str(path), "resnet8")),
    "pth": ("x.pth", written(lambda f: torch.save(TENSORS, f)), lambda path: read_weights(str(path), "resnet8")),
}
ODD = [b"\x00", b"\xff" * 4, b"\xff" * 8, b"-1", b"9" * 30, b"[" * 2000, b"nan", b"\x1b[2J", b"\n", b'"', b",", b"\xc3"]


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """A few bytes changed, inserted, removed or repeated."""
    out = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out)))
        how = draw(st.sampled_from(["change", "insert", "remove", "repeat", "cut"]))
        if how == "change":
            new = draw(st.binary(min_size=1, max_size=4))
            out[at : at + len(new)] = new
        elif how == "insert":
            out[at:at] = draw(st.sampled_from(ODD))
        elif how == "remove":
            del out[at : at + draw(st.integers(1, 20))]
        elif how == "repeat":
            out[at:at] = out[at : at + draw(st.integers(1, 40))]
        else:
            del out[at:]
    return bytes(out)


def quietly(read: Callable[[Path], Any], path: Path) -> None:
    """Reads a file, or is refused in one line; takes little memory."""
    said = ""
    tracemalloc.start()
    try:
        read(path)
    except (InputError, RunError) as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in said
    assert peak < 50_000_000


SETTINGS: dict[str, Any] = {
    "max_examples": 4 * EXAMPLES,
    "deadline": 5000,  # ms
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.filterwarnings("ignore")  # of Pillow and torch, about what a changed byte invented
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_input_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    name, whole, read = KINDS[kind]
    path = tmp_path / name
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(KINDS["png"][1])
    path.write_bytes(whole)
    read(path)  # the original is fine

    @settings(**{**SETTINGS, "max_examples": EXAMPLES})
    @given(mutated(whole))
    def check(content: bytes) -> None:
        path.write_bytes(unchecked(content) if kind == "npz, right checksums" else content)
        quietly(read, path)

    check()


# Files that are whole and say odd things.


def changed(values: list[Any], *odd: Any) -> st.SearchStrategy[np.ndarray]:
    """Returns arrays of twelve values, of which one to three are odd."""
    at = st.dictionaries(st.integers(0, 11), st.sampled_from(odd), min_size=1, max_size=3)
    return at.map(lambda new: np.array([new.get(i, value) for i, value in enumerate(values)]))


NUMBERS = st.one_of(
    changed([0, 1, 2] * 4, -1, 11, 999, 1000, 2**28, 2**63 - 1, -(2**63)),
    changed([0, 1, 2] * 4, 2**64 - 1),
    changed([0.0, 1.0] * 6, np.nan, np.inf, 0.5),
    changed([b"a", b"b"] * 6, b"\xff", b""),
    changed(["train", "test"] * 6, "", "\x1b", "x" * 300, "1"),
    st.sampled_from(
        [np.zeros((12, 2)), np.array(3), np.zeros(0), np.zeros(12, "M8[s]"), np.ones(12, bool), np.eye(12)]
    ),
)
IMAGES = st.sampled_from(
    [X, X[:, :0], X / 255, X[..., None], X[:0], X * 1j, X.astype(str), np.full((12, 1, 1), np.nan)]
)
KEYS = ["y", "site", "sites", "split", "test", "val", "classes", "client", "clients"]


@pytest.mark.filterwarnings("ignore")
def test_an_array_file_that_says_odd_things(tmp_path: Path) -> None:
    @settings(**SETTINGS)
    @given(IMAGES, st.dictionaries(st.sampled_from(KEYS), NUMBERS, max_size=2))
    def check(images: np.ndarray, more: dict[str, np.ndarray]) -> None:
        np.savez(tmp_path / "x.npz", x=images, **{"y": np.arange(12) % 3, **more})
        quietly(data, tmp_path / "x.npz")

    check()


CELLS = [
    "0.png",
    "1.png",
    "a",
    "1",
    "",
    "\0.png",
    "a" * 5000,
    "9" * 5000,
    "\x1b[2J",
    "..",
    "/dev/zero",
    "~x",
    '"\n"',
    "1e9",
]


def test_a_table_that_says_odd_things(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(KINDS["png"][1])

    @settings(**SETTINGS)
    @given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.sampled_from(CELLS)), min_size=1, max_size=5))
    def check(changes: list[tuple[int, int, str]]) -> None:
        rows = [line.split(",") for line in TABLE.splitlines()]
        for row, column, cell in changes:
            rows[row][column] = cell
        (tmp_path / "x.csv").write_text("\n".join(map(",".join, rows)))
        quietly(data, tmp_path / "x.csv")

    check()


WRITTEN = [
    "1",
    "-1",
    "nan",
    "1e400",
    "9" * 30,
    "9" * 5000,
    "[" * 2000,
    "true",
    '"x"',
    '"\\u0000"',
    "[]",
    "{}",
    "1979-01-01",
]


def test_settings_that_say_odd_things(tmp_path: Path) -> None:
    @settings(**{**SETTINGS, "max_examples": EXAMPLES})
    @given(st.dictionaries(st.sampled_from(sorted(resolve("digits").flat())), st.sampled_from(WRITTEN), max_size=3))
    def check(chosen: dict[str, str]) -> None:
        (tmp_path / "x.toml").write_text("".join(f"{key} = {value}\n" for key, value in chosen.items()))
        quietly(lambda path: resolve(str(path)), tmp_path / "x.toml")

    check()
