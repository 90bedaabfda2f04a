"""The server's public images in chunks of equal size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..lanes import fast_kernels
from .federation import Federation


class Chunks(Sequence[Tensor]):
    """Held as bytes, prepared when asked for, as the clients' images are."""

    def __init__(self, federation: Federation, images: Tensor, chunks: Tensor, dtype: torch.dtype) -> None:
        self.federation, self.images, self.dtype = federation, images, dtype
        self.chunks = chunks  # int64 [chunks, B]

        self.stems: Tensor | None = None  # [chunks, B, ...], channels last

    def keep_stems(self, stem: Callable[[Tensor], Tensor], room: int) -> None:
        """Images that are never augmented give the same behind a frozen first layer: kept, if `room` bytes will do."""
        first = stem(self[0]).permute(0, 2, 3, 1)
        if first.numel() * first.element_size() * len(self) > room:
            return
        kept = first.new_empty(len(self), *first.shape)
        for at in range(len(self)):
            kept[at] = stem(self[at]).permute(0, 2, 3, 1)
        self.stems = kept

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: Any) -> Any:
        return self.at(torch.tensor([at], device=self.chunks.device))

    def at(self, number: Tensor) -> Tensor:
        """The chunk of this number, int64 `[1]`, prepared, `[B, 3, H, W]`, or what the first layer makes of it."""
        if self.stems is not None:
            kernels = fast_kernels(self.stems.device)
            found = self.stems[number][0] if kernels is None else kernels.taken(self.stems, number)
            return found.permute(0, 3, 1, 2)
        return self.federation.plain_views(self.images, self.chunks[number], self.dtype)
