"""DICOM files are read as a viewer shows them, and refused in one line where they are not pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from dicom import write_dicom
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_windowing
from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless

from perada.data import Federation, read_image
from perada.data import dicom as module
from perada.data.manifest import manifest
from perada.errors import InputError

RNG = np.random.default_rng(5)
STEPS = np.arange(64, dtype=np.uint16).reshape(8, 8)


def shown(path: Path) -> list[list[int]]:
    """The grey values of an 8×8 picture: at its own size nothing is interpolated."""
    pixels = read_image(path, 8)
    assert (pixels == pixels[:1]).all()
    return pixels[0].astype(int).tolist()


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        read_image(path, 8)
    assert "\n" not in str(error.value)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_without_a_window_the_whole_range_is_shown(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "x.dcm", STEPS * 100 + 1000)
    assert shown(path) == np.rint(np.arange(64).reshape(8, 8) / 63 * 255).astype(int).tolist()
    flat = write_dicom(tmp_path / "flat.dcm", np.full((8, 8), 700, np.uint16))
    assert np.unique(shown(flat)).tolist() == [0]


def test_a_window_of_rescaled_values(tmp_path: Path) -> None:
    """Stored 0, 1, ... 63 are -1024, -1004, ... 236; a window of 40 ± 200 shows -160 as black and 240 as white."""
    path = write_dicom(
        tmp_path / "ct.dcm", STEPS, RescaleSlope=20, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=400
    )
    values = np.arange(64) * 20.0 - 1024
    wanted = [0 if v <= -160 else round(255 * ((v - 39.5) / 399 + 0.5)) for v in values]
    assert np.ravel(shown(path)).tolist() == wanted
    assert wanted[43] == 0
    assert wanted[44] == 10  # -144: 15.5 of 399 above the lower end
    assert wanted[63] > 250


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("kind", ["i2", "u2", "u1"])
def test_the_window_is_pydicoms(function: str, kind: str, tmp_path: Path) -> None:
    """Its own function is the reference; it gives values from the lowest to the highest that the file can store."""
    limits = np.iinfo(kind)
    pixels = RNG.integers(limits.min, limits.max, (8, 8), kind, endpoint=True)
    centre, width = (float(limits.max) + limits.min) / 2 + 7, (float(limits.max) - limits.min) / 2
    path = write_dicom(
        tmp_path / "x.dcm", pixels, WindowCenter=[centre, 1], WindowWidth=[width, 2], VOILUTFunction=function
    )
    file = pydicom.dcmread(path)
    windowed = apply_windowing(apply_modality_lut(file.pixel_array, file), file)
    wanted = (windowed - limits.min) / (float(limits.max) - limits.min) * 255
    assert np.abs(np.array(shown(path)) - wanted).max() <= 0.5 + 1e-6
    assert len(np.unique(shown(path))) > 10


def test_a_window_of_one_value_is_a_threshold(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "x.dcm", STEPS, WindowCenter=32, WindowWidth=1)
    assert np.ravel(shown(path)).tolist() == [0] * 32 + [255] * 32


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    tags: dict[str, Any] = {"WindowCenter": 30, "WindowWidth": 41}
    light = shown(write_dicom(tmp_path / "2.dcm", STEPS, **tags))
    dark = shown(write_dicom(tmp_path / "1.dcm", STEPS, "MONOCHROME1", **tags))
    assert np.abs(np.add(light, dark) - 255).max() <= 1  # both halves of an odd 255 may be rounded the same way
    assert np.ravel(dark)[0] == 255


def test_colour(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (8, 8, 3), np.uint8)
    path = write_dicom(tmp_path / "x.dcm", pixels, "RGB")
    assert np.array_equal(read_image(path, 8), pixels.transpose(2, 0, 1))
    grey = np.repeat(RNG.integers(0, 256, (8, 8, 1), np.uint8), 3, -1)
    grey[..., 1:] = 128  # no colour: Cb and Cr are in the middle
    path = write_dicom(tmp_path / "y.dcm", grey, "YBR_FULL")
    assert np.abs(read_image(path, 8).astype(int) - grey[..., 0].astype(int)).max() <= 1


def test_a_compressed_file(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "x.dcm", STEPS * 50)
    wanted, file = shown(path), pydicom.dcmread(path)
    file.compress(RLELossless)
    file.save_as(path)
    assert shown(path) == wanted


def test_a_file_without_an_ending_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "IM0001", STEPS)
    assert shown(path) == shown(write_dicom(tmp_path / "x.dcm", STEPS))


def test_the_size_is_that_of_other_images(tmp_path: Path) -> None:
    """A portrait in 16 bits is scaled like a picture of the grey values it shows."""
    pixels = RNG.integers(0, 4096, (40, 23), np.uint16)
    dicom = write_dicom(tmp_path / "x.dcm", pixels, WindowCenter=2048, WindowWidth=3000)
    grey = np.rint(((pixels - 2047.5) / 2999 + 0.5).clip(0, 1) * 255).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "x.png")
    for fit in ("crop", "pad", "stretch"):
        assert np.array_equal(read_image(dicom, 8, fit), read_image(tmp_path / "x.png", 8, fit))  # type: ignore[arg-type]


def test_what_is_not_one_picture_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(write_dicom(tmp_path / "film.dcm", np.tile(STEPS, (3, 1)), Rows=8, NumberOfFrames=3), "3 frames")
    refused(write_dicom(tmp_path / "map.dcm", STEPS, "PALETTE COLOR"), "PALETTE COLOR")
    refused(write_dicom(tmp_path / "huge.dcm", STEPS, Rows=60000, Columns=60000), "60000×60000 pixels")
    refused(write_dicom(tmp_path / "none.dcm", STEPS, Rows=0), "8×0 pixels")
    refused(write_dicom(tmp_path / "short.dcm", STEPS, Rows=9), "damaged")
    colours = RNG.integers(0, 256, (8, 8, 3), np.uint16)
    refused(write_dicom(tmp_path / "deep.dcm", colours, "RGB"), "8 bits")
    (tmp_path / "text.dcm").write_text("no DICOM file")
    refused(tmp_path / "text.dcm", "damaged")
    (tmp_path / "empty.dcm").touch()
    refused(tmp_path / "empty.dcm", "damaged")
    refused(tmp_path / "gone.dcm")
    path = write_dicom(tmp_path / "deflated.dcm", STEPS)
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    file.save_as(path)
    refused(path, "deflated")
    path = write_dicom(tmp_path / "strange.dcm", STEPS)
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = pydicom.uid.UID("1.2.840.10008.1.2.4.90")
    file.PixelData = encapsulate([b"no JPEG 2000"])
    file["PixelData"].VR = "OB"
    file["PixelData"].is_undefined_length = True
    file.save_as(path)
    refused(path, "damaged, or a kind of DICOM")
    monkeypatch.setattr(module, "FILE", 100)
    refused(write_dicom(tmp_path / "long.dcm", STEPS), "bytes, and the most is 100")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two sites of two classes, where every second image is a DICOM file, and a text beside them."""
    for site in ("north", "south"):
        for i in range(16):
            pixels = RNG.integers(0, 256, (10, 10), np.uint8)
            folder = tmp_path / "sites" / site / f"class{i % 2}"
            if i % 4 < 2:
                write_dicom(folder / f"{i}.dcm", pixels, WindowCenter=128, WindowWidth=256)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    (tmp_path / "sites" / "notes.txt").write_text("not an image")
    return tmp_path / "sites"


def test_folders_and_manifests_read_them(mixed: Path) -> None:
    federation = Federation.from_folder(mixed, size=10)
    assert len(federation.images) == 32
    (remark,) = federation.remarks
    assert remark == "1 file skipped, by the ending not images: 1 .txt"
    rows = "".join(f"{p.relative_to(mixed)},a\n" for p in sorted(mixed.rglob("*.*")) if p.suffix != ".txt")
    (mixed / "list.csv").write_text("path,label\n" + rows)
    images = manifest(str(mixed / "list.csv"), 10).images
    assert sorted(i.tobytes() for i in images) == sorted(i.numpy().tobytes() for i in federation.images)


def test_without_pydicom_they_are_counted_and_refused(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perada.data import images

    for place in (module, images):
        monkeypatch.setattr(place, "has_pydicom", lambda: False)
    with pytest.raises(InputError, match=r"16 of 32 images below .* are DICOM files: pip install 'perada\[dicom\]'"):
        Federation.from_folder(mixed, skip_bad=True)
    refused(next(mixed.rglob("*.dcm")), "pip install 'perada[dicom]'")
