"""Image files of any kind, size and damage: little memory, and the same pixels as ever."""

from __future__ import annotations

import contextlib
import itertools
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perada.data import DataOptions, read_image
from perada.data import images as module
from perada.data.fit import LONGEST
from perada.data.images import decode, resized
from perada.errors import InputError

RNG = np.random.default_rng(0)


def png(width: int, height: int, bits: int = 1, kind: int = 0, rows: bytes | None = None) -> bytes:
    """A PNG of black pixels, in a few bytes. rows: the content instead."""
    line = (width * bits * (3 if kind == 2 else 1) + 7) // 8 + 1
    data = zlib.compress(bytes(line * height) if rows is None else rows)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    packed = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        read_image(path, 8)
    assert "\n" not in str(error.value)
    for word in (path.name, *words):
        assert word in str(error.value)


def scaled_then_cropped(path: Path, size: int) -> np.ndarray:
    """The definition: the shorter side is scaled to `size`, rows first, and the middle is kept."""
    rgb = Image.open(path).convert("RGB")
    scale = size / min(rgb.size)
    width, height = max(size, round(rgb.width * scale)), max(size, round(rgb.height * scale))
    rgb = rgb.resize((width, rgb.height)).resize((width, height))
    left, top = (rgb.width - size) // 2, (rgb.height - size) // 2
    return np.asarray(rgb.crop((left, top, left + size, top + size)), np.uint8).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [8, 13, 64])
def test_pixels_are_those_of_the_definition(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    sides = (1, 2, 7, 8, 31, 64)
    shapes = [(w, h) for w, h in itertools.product(sides, sides) if max(w, h) <= LONGEST * min(w, h)]
    for width, height in [*shapes, (640, 480), (479, 641), (800, 100), (33, 263)]:
        Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        assert np.array_equal(read_image(path, size), scaled_then_cropped(path, size)), (width, height)


def test_a_very_long_image_keeps_its_middle(tmp_path: Path) -> None:
    ramp = np.zeros((20, 1000, 3), np.uint8)
    ramp[:, :, 0] = np.linspace(0, 255, 1000)
    for name, pixels, across in (("wide.png", ramp, 1), ("tall.png", ramp.transpose(1, 0, 2), 0)):
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / name)
        found = read_image(tmp_path / name, 8).astype(int)
        wanted = scaled_then_cropped(tmp_path / name, 8).astype(int)
        assert np.abs(found - wanted).max() <= 1
        assert (np.diff(found[0].mean(1 - across)) >= 0).all()


MEMORY = """
import resource, sys
from pathlib import Path
from perada.data import read_image
read_image(Path(sys.argv[1]), 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    assert read_image(Path(path), 224).shape == (3, 224, 224)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_long_images_take_little_memory(tmp_path: Path) -> None:
    """A file of 118 bytes took gigabytes."""
    (tmp_path / "small.png").write_bytes(png(8, 8))
    (tmp_path / "tall.png").write_bytes(png(1, 20_000))
    (tmp_path / "wide.png").write_bytes(png(20_000, 1))
    files = [str(tmp_path / name) for name in ("small.png", "tall.png", "wide.png")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "MiB"


@pytest.mark.filterwarnings("default")  # Pillow's own
@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (60_000, 60_000), (1, 90_000_000)])
def test_too_many_pixels(width: int, height: int, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(width, height, rows=b""))
    refused(tmp_path / "x.png", "89,478,485")


def test_a_length_that_the_file_does_not_have(tmp_path: Path) -> None:
    """A PNG's chunk says it has 2 GB: a plain read would ask for them before it looks."""
    content = bytearray(png(8, 8))
    at = content.index(b"IDAT")
    content[at - 4 : at] = (2**31 - 1).to_bytes(4, "big")
    (tmp_path / "x.png").write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(InputError):
            read_image(tmp_path / "x.png", 8)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_no_pixels(width: int, height: int, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(width, height))
    refused(tmp_path / "x.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "x.bmp")
    data = bytearray((tmp_path / "x.bmp").read_bytes())
    data[18:26] = struct.pack("<ii", width, height)
    (tmp_path / "x.bmp").write_bytes(data)
    refused(tmp_path / "x.bmp")


def test_kinds_of_images(tmp_path: Path) -> None:
    base = Image.fromarray(RNG.integers(0, 256, (12, 9, 3), np.uint8))
    palette = base.convert("P")
    frames: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "cmyk.jpg": (base.convert("CMYK"), {}),
        "alpha.png": (base.convert("LA"), {}),
        "palette.png": (palette, {"transparency": bytes(range(256))}),  # Pillow warns when it makes this RGB
        "one.gif": (palette, {"transparency": 3}),
        "moving.gif": (palette, {"save_all": True, "append_images": [palette.rotate(90)] * 3}),
        "pages.tif": (base, {"save_all": True, "append_images": [base.rotate(90)] * 3}),
        "moving.webp": (base, {"save_all": True, "append_images": [base.rotate(90)], "lossless": True}),
        "deep.png": (Image.fromarray(RNG.integers(0, 65536, (12, 9), np.uint16)), {}),
        "floats.tif": (Image.fromarray(RNG.random((12, 9), np.float32) * 255), {}),
    }
    for name, (image, options) in frames.items():
        image.save(tmp_path / name, **options)
        assert read_image(tmp_path / name, 8).shape == (3, 8, 8), name
    for name in ("pages.tif", "moving.webp"):
        base.save(tmp_path / "first.png")
        assert np.array_equal(read_image(tmp_path / name, 8), read_image(tmp_path / "first.png", 8))
    for name in frames:  # and cut off
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:90])
        refused(tmp_path / name)


def test_sixteen_bits_are_scaled_alike_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = RNG.integers(0, 65536, (40, 30), np.uint16)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    wanted = np.rint(pixels.astype(np.float64) / 65535.0 * 255).astype(np.uint8)
    found = np.asarray(module.opened_image(tmp_path / "x.png", "x"))
    assert np.array_equal(found[..., 0], wanted)


def test_pixels_that_are_not_numbers(tmp_path: Path) -> None:
    Image.fromarray(np.full((9, 9), np.nan, np.float32)).save(tmp_path / "x.tif")
    refused(tmp_path / "x.tif", "damaged")


def test_postscript_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript for it, under whatever name the file has."""
    from PIL import EpsImagePlugin

    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *words, **more: started.append(words))
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    refused(tmp_path / "x.png")
    assert started == []


# The size that images are scaled to.


def test_a_size_that_no_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="at most 4096 pixels, not 1000000: one image would take 3,000,000,000,000 by"):
        DataOptions.of(name="folder", size=10**6)
    (tmp_path / "x.png").write_bytes(png(8, 8))
    monkeypatch.setattr(module, "free_memory", lambda device: 1000)
    for count, what in ((300, "cached"), (2, "in memory")):
        wanted = f"{count} images of 64×64 pixels take {count * 3 * 64 * 64:,} bytes, and 1,000 are free"
        files = [tmp_path / "x.png"] * count
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
        with pytest.raises(InputError, match=wanted):
            decode(files, tmp_path, 64, False)
        with pytest.raises(InputError, match=wanted):
            resized(np.zeros((count, 1, 8, 8), np.uint8), 64, (what,))
    monkeypatch.undo()
    images, *_ = decode([tmp_path / "x.png"], tmp_path, 64, False)
    assert images.shape == (1, 3, 64, 64)


def test_images_without_pixels_in_an_array(tmp_path: Path) -> None:
    from perada.data.arrays import npz

    for shape in ((4, 0, 0), (4, 0, 8, 3), (4, 3, 8, 0)):
        np.savez(tmp_path / "x.npz", x=np.zeros(shape, np.uint8), y=np.arange(4))
        with pytest.raises(InputError, match="have no pixels"):
            npz(str(tmp_path / "x.npz"))


def test_image_files_in_an_array(tmp_path: Path) -> None:
    from perada.data.arrays import npz

    for data in (png(10_000, 10_000, rows=b""), png(0, 3), b"not an image", png(8, 8)[:45]):
        np.savez(
            tmp_path / "x.npz", png=np.frombuffer(data * 2, np.uint8), offset=[0, len(data), 2 * len(data)], y=[0, 1]
        )
        with pytest.raises(InputError, match=r"cannot read image 0 in .*x\.npz") as error:
            npz(str(tmp_path / "x.npz"))
        assert "\n" not in str(error.value)
