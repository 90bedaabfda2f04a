"""Small DICOM files, as a scanner might write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def write_dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: Any) -> Path:
    """Writes pixels `[rows, columns]`, or `[rows, columns, 3]` of colours, with further tags such as WindowWidth."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID, file.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    file.Rows, file.Columns = pixels.shape[:2]
    file.SamplesPerPixel = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim == 3:
        file.PlanarConfiguration = 0
    file.PhotometricInterpretation = kind
    file.BitsAllocated = 8 * pixels.itemsize
    file.BitsStored, file.HighBit = file.BitsAllocated, file.BitsAllocated - 1
    file.PixelRepresentation = int(pixels.dtype.kind == "i")
    file.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)
    return path
