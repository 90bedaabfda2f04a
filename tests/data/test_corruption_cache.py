"""The cache of corrupted copies: what is kept is whole, or made again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perada.data.corruptions import SEVERITIES, corrupt, corrupted

from .pictures import crops


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    return crops(48, 32)


def copies(images: np.ndarray, cache: Path, **more: object) -> list[np.ndarray]:
    return [x for _, _, x in corrupted(images, ["fog", "contrast"], [1, 5], cache=cache, **more)]  # type: ignore[arg-type]


def test_what_is_kept_is_not_made_again(photos: np.ndarray, tmp_path: Path) -> None:
    first = copies(photos, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(folder.name) == 64
    names = ["contrast-1.npy", "contrast-5.npy", "fog-1.npy", "fog-5.npy"]
    assert sorted(p.name for p in folder.iterdir()) == names
    np.save(folder / "fog-5.npy", photos)  # whole, and plainly not fog: it can only come from the cache
    second = copies(photos, tmp_path)
    assert np.array_equal(second[1], photos)
    assert all(np.array_equal(a, b) for i, (a, b) in enumerate(zip(first, second, strict=True)) if i != 1)


def test_other_images_shapes_and_seeds_have_folders_of_their_own(photos: np.ndarray, tmp_path: Path) -> None:
    other = photos.copy()
    other[-1, -1, -1, -1] ^= 1
    for images, seed in ((photos, 0), (photos, 1), (other, 0), (photos.reshape(24, 3, 64, 32), 0)):
        found = copies(images, tmp_path, seed=seed)
        assert np.array_equal(found[0], corrupt(images, "fog", 1, seed=seed))
    assert len(list(tmp_path.iterdir())) == 4


def _zipped(path: Path, images: np.ndarray) -> None:
    with path.open("wb") as file:
        np.savez(file, images)


def _pickled(path: Path, images: np.ndarray) -> None:
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, images: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, images: path.write_bytes(path.read_bytes()[:40]),
        lambda path, images: path.write_bytes(b""),
        lambda path, images: path.write_bytes(b"no numbers"),
        lambda path, images: path.write_bytes(b"\x93NUMPY\x01\x00" + b"\xff" * 300),
        lambda path, images: np.save(path, images[:-1]),
        lambda path, images: np.save(path, images.astype(np.int8)),
        lambda path, images: path.write_bytes(path.read_bytes() + b"more"),
        _zipped,
        _pickled,
    ],
    ids=["short", "header", "empty", "text", "noise", "shape", "dtype", "long", "npz", "pickle"],
)
def test_a_damaged_file_is_made_again(damage: object, photos: np.ndarray, tmp_path: Path) -> None:
    images = photos[:6]
    first = copies(images, tmp_path)
    path = next(tmp_path.iterdir()) / "fog-5.npy"
    whole = path.read_bytes()
    damage(path, images)  # type: ignore[operator]
    assert path.read_bytes() != whole
    assert np.array_equal(copies(images, tmp_path)[1], first[1])
    assert path.read_bytes() == whole


def test_a_copy_is_there_whole_or_not_at_all(
    photos: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = copies(photos, tmp_path)
    assert np.array_equal(found[0], corrupt(photos, "fog", 1))  # the disk costs time, not the result
    assert list(next(tmp_path.iterdir()).iterdir()) == []


class Killed(BaseException):
    pass


def test_a_kill_while_writing_leaves_nothing_that_is_read(
    photos: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*names: object, **more: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(Path, "unlink", kill)  # a killed process does not tidy up
        with pytest.raises(Killed):
            copies(photos, tmp_path)
    left = [p.name for p in next(tmp_path.iterdir()).iterdir()]
    assert len(left) == 1  # as after a kill: the part is there, under a name nobody reads
    assert left[0].endswith(".part")
    assert np.array_equal(copies(photos, tmp_path)[0], corrupt(photos, "fog", 1))


PROCESS = """
import hashlib, sys
from pathlib import Path
import numpy as np
from perada.data.corruptions import corrupted
images = np.arange(40 * 3 * 256, dtype=np.uint32).astype(np.uint8).reshape(40, 3, 16, 16)
print("ready", flush=True)
sys.stdin.readline()
digest = hashlib.sha256()
for turn in range(4):  # they write at the same time, and read what the other replaces or takes away
    for _, _, copy in corrupted(images, ["snow", "frost", "fog"], [1, 2, 3, 4, 5], cache=Path(sys.argv[1])):
        digest.update(copy.data)
    if turn % 2:
        for path in Path(sys.argv[1]).glob("*/s*.npy"):
            path.unlink(missing_ok=True)
print(digest.hexdigest())
"""


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [p.stdout.readline() for p in both] == ["ready\n"] * 2  # so that they start together
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60) for process in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert said[0] == said[1]
    images = np.arange(40 * 3 * 256, dtype=np.uint32).astype(np.uint8).reshape(40, 3, 16, 16)
    (folder,) = tmp_path.iterdir()
    kept = sorted(p.name for p in folder.iterdir())
    assert kept == sorted(f"{n}-{s}.npy" for n in ("frost", "fog") for s in SEVERITIES)  # and no part
    assert np.array_equal(np.load(folder / "fog-3.npy"), corrupt(images, "fog", 3))
