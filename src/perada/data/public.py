"""The server's public images in chunks of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..lanes import LaneModel, Stem
from .federation import Federation


class Chunks(Sequence[Any]):
    """Held as bytes, prepared when asked for, as the clients' images are."""

    def __init__(self, federation: Federation, images: Tensor, chunks: Tensor, dtype: torch.dtype) -> None:
        self.federation, self.images, self.dtype = federation, images, dtype
        self.chunks = chunks  # int64 [chunks, B]
        self.stems: Stem | None = None  # of all chunks

    def keep_stems(self, model: LaneModel, room: int) -> None:
        """Images that are never augmented give the same behind a frozen first layer: kept, if `room` bytes will do."""
        first = model.stem(self._prepared(self.chunks[0]))
        if isinstance(first, Stem) and first.bytes * len(self) <= room:
            self.stems = Stem.joined([first, *(model.stem(self._prepared(c)) for c in self.chunks[1:])])  # type: ignore[list-item]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: Any) -> Any:
        return self.at(torch.tensor([at], device=self.chunks.device))

    def at(self, number: Tensor) -> Tensor | Stem:
        """The chunk of this number, int64 `[1]`, prepared, `[B, 3, H, W]`, or what the first layer makes of it."""
        if self.stems is not None:
            return self.stems.seen(number)
        return self._prepared(self.chunks[number])

    def _prepared(self, index: Tensor) -> Tensor:
        return self.federation.plain_views(self.images, index.view(1, -1), self.dtype)
