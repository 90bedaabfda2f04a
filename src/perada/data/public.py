"""The server's public images in chunks of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .federation import Federation


class Chunks(Sequence[Tensor]):
    """Held as bytes, prepared when asked for, as the clients' images are."""

    def __init__(self, federation: Federation, images: Tensor, chunks: Tensor, dtype: torch.dtype) -> None:
        self.federation, self.images, self.dtype = federation, images, dtype
        self.chunks = chunks  # int64 [chunks, B]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: Any) -> Any:
        return self.at(torch.tensor([at], device=self.chunks.device))

    def at(self, number: Tensor) -> Tensor:
        """The chunk of this number, int64 `[1]`, prepared, `[B, 3, H, W]`."""
        return self.federation.plain_views(self.images, self.chunks[number], self.dtype)
