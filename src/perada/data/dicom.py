"""DICOM files as pictures: what a viewer shows of them. Needs pydicom (extra `dicom`)."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import InputError
from ..inputs import opened, plain_file

if TYPE_CHECKING:
    from pydicom import Dataset

DICOM = {".dcm", ".dicom"}
FILE = 1 << 30  # bytes of a DICOM file
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
DEFLATED = (b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.8.1")  # small files of these kinds may unpack to any size
EXTRA = "pip install 'perada[dicom]'"


def is_dicom(path: Path) -> bool:
    """Returns whether a file is a DICOM file, by its ending or by its first bytes."""
    if path.suffix.lower() in DICOM:
        return True
    try:
        with opened(path) as file:
            return file.read(132)[128:] == b"DICM"
    except (OSError, ValueError):
        return False


def has_pydicom() -> bool:
    """Returns whether the package that reads DICOM files is installed."""
    return find_spec("pydicom") is not None


def dicom_image(path: Path, most: int) -> Image.Image:
    """Returns the picture in a DICOM file as RGB; refuses one of more than `most` pixels.

    Grey values are rescaled (slope and intercept, or the table), and the first window becomes 0 to 255; without a
    window the smallest and the largest value do. MONOCHROME1 is inverted. Further tables, overlays and presentation
    states are not applied.
    """
    if not has_pydicom():
        raise InputError(f"cannot read image {path}: it is a DICOM file: {EXTRA}")
    try:
        with opened(plain_file(path, FILE), FILE) as file:
            content = file.read()  # at once: a damaged length would make pydicom ask for gigabytes
        if any(kind in content for kind in DEFLATED):
            raise InputError("a deflated DICOM file is not read: save it uncompressed")
        return Image.fromarray(_picture(BytesIO(content), most))
    except FileNotFoundError:
        raise
    except InputError as error:
        raise InputError(f"cannot read image {path}: {error}") from error
    except Exception as error:  # a damaged file can break a reader in any way
        first = next(iter(str(error).splitlines()), "")
        why = f" ({first})" if isinstance(error, RuntimeError) else ""  # which decoder is missing
        raise InputError(f"cannot read image {path}: it is damaged, or a kind of DICOM file{why}") from error


def _picture(file: BytesIO, most: int) -> NDArray[np.uint8]:
    """Returns the pixels of a file, uint8 `[height, width, 3]`."""
    from pydicom import dcmread
    from pydicom.pixels.utils import pixel_array

    _check(dcmread(file, stop_before_pixels=True), most)
    file.seek(0)
    dataset = dcmread(file)
    stored = pixel_array(dataset)
    if dataset.PhotometricInterpretation not in GREY:
        if stored.dtype != np.uint8:
            raise InputError("colour DICOM files must have 8 bits per channel")
        return np.ascontiguousarray(stored)
    shown = np.rint(255 * _shown(dataset, stored)).astype(np.uint8)
    return np.repeat(shown[..., None], 3, -1)


def _check(header: Dataset, most: int) -> None:
    """Refuses what is not one picture of a kind that is read, before its pixels are."""
    frames = int(header.get("NumberOfFrames") or 1)
    if frames > 1:
        raise InputError(f"a DICOM file of {frames} frames: save each frame as a file of its own")
    height, width = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    if not 0 < height * width <= most:
        raise InputError(f"{width}×{height} pixels, not 1 to {most:,}: scale it")
    kind = str(header.get("PhotometricInterpretation"))
    if kind not in (*GREY, *COLOUR):
        raise InputError(f"DICOM files of kind {kind} are not read, only {', '.join((*GREY, *COLOUR))}")


def _shown(dataset: Dataset, stored: NDArray[Any]) -> NDArray[np.float64]:
    """Returns how bright each grey pixel is shown, from 0 to 1 (DICOM PS3.3, C.11.2.1)."""
    from pydicom.pixels.processing import apply_modality_lut

    values = apply_modality_lut(stored, dataset).astype(np.float64)
    if not np.isfinite(values).all():
        raise InputError("its pixels are not numbers")
    centre, width = _first(dataset.get("WindowCenter")), _first(dataset.get("WindowWidth"))
    how = str(dataset.get("VOILUTFunction") or "LINEAR")
    if centre is None or width is None or width <= 0:
        low, high = values.min(), values.max()
        shown = (values - low) / (high - low) if high > low else np.zeros_like(values)
    elif how == "SIGMOID":
        shown = 1 / (1 + np.exp((-4 * (values - centre) / width).clip(-700, 700)))
    elif how == "LINEAR_EXACT":
        shown = (values - centre) / width + 0.5
    elif width <= 1:
        shown = (values > centre - 0.5).astype(np.float64)
    else:
        shown = (values - (centre - 0.5)) / (width - 1) + 0.5
    shown = shown.clip(0, 1)
    return 1 - shown if dataset.PhotometricInterpretation == "MONOCHROME1" else shown


def _first(value: Any) -> float | None:
    """Returns a number, or the first of several; None without one."""
    if value is None or value == "":
        return None
    return float(value if isinstance(value, str | int | float) else next(iter(value)))
