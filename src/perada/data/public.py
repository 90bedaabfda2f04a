"""The server's public images: reads them, and gives them in chunks of equal size."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..inputs import user_path
from ..lanes import Front, LaneModel, Stem
from ..plugins import PATH, called, find
from .arrays import npz, pixels_of
from .cifar import stl10_public
from .digits import digits, glyphs
from .features import Table, keep
from .federation import Federation, writable
from .fit import Fit
from .folder import unlabelled
from .images import resized
from .named import GIVEN, GROUP, SOURCES, DataOptions, data_home, place_of
from .source import Pixels, Source

VALIDATION = "validation"  # the clients' own validation data, which only a simulation can ask for
PUBLIC = ("none", "glyphs", "digits", "cifar10", "cifar100", "stl10", VALIDATION, GIVEN)


def is_public_name(name: str) -> bool:
    """Returns whether `Distill.data` is a name, and not a path."""
    return name in PUBLIC or bool(PATH.fullmatch(name) or entry_points(group=GROUP, name=name))


def public_images(name: str, size: int, root: str = "", fit: Fit = "crop") -> Tensor | None:
    """Returns public images, uint8 `[n, C, size, size]`, without labels; None for "none".

    name: one of `PUBLIC`, a folder of images, an `.npz` file, or a function of another package. A known data set is
    looked for next to the clients' data (`root`), then at `data_home()`. fit: as in `DataOptions`, for a folder.
    """
    if name == "none":
        return None
    images = _read(name, size, root, fit)
    if images.shape[2:] != (size, size) and name != "glyphs":
        images = resized(images, size)
    return torch.from_numpy(writable(images))


def _read(name: str, size: int, root: str, fit: Fit) -> Pixels:
    if name == GIVEN:
        raise InputError("the public images were given from Python: give them again, as public=")
    if name == "glyphs":
        return glyphs()
    if name == "digits":
        return digits().images
    if name in PUBLIC:
        home = place_of(name, root)
        if home is None:
            raise InputError(
                f"Distill.data={name}: it is neither next to the clients' data nor in {data_home()}: run perada data "
                f"get {name}, or set Distill.steps=0"
            )
        return stl10_public(home, size) if name == "stl10" else _training(SOURCES[name](DataOptions(name, home)))
    if Path(name).suffix.lower() == ".npz":
        return _training(npz(name))
    if user_path(name).is_dir():
        return unlabelled(name, size, fit)
    if not is_public_name(name):
        raise InputError(f"Distill.data: {name!r} is not a folder with images, nor one of: {', '.join(PUBLIC)}")
    data = called("public data", name, find("public data", GROUP, name, {}), DataOptions(name, size=size))
    return _training(data) if isinstance(data, Source) else pixels_of(f"public data {name!r}", data)


def _training(source: Source) -> Pixels:
    """Returns the official training images, in the order of their files."""
    return source.images if source.test is None else source.images[~source.test]


def as_public(images: Any, federation: Federation) -> Tensor:
    """Returns public images as uint8 `[n, C, H, W]`, or refuses them in one line.

    images: an array or a tensor, as `Federation.from_arrays` takes it, as large as the clients' images.
    """
    ready = (
        isinstance(images, Tensor) and images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] in (1, 3)
    )
    public: Tensor = images if ready else torch.from_numpy(writable(pixels_of("public images", images)))
    size, clients = tuple(public.shape[2:]), tuple(federation.images.shape[2:])
    if size != clients:
        raise InputError(f"public images are {size} pixels and the clients' {clients}")
    if len(public) < 2:
        raise InputError("distillation needs at least two public images: batch norm cannot normalise one")
    return public


class Chunks(Sequence[Any]):
    """Holds public images as bytes, in chunks that are prepared like the clients' images when they are asked for."""

    def __init__(self, federation: Federation, images: Tensor, chunks: Tensor, dtype: torch.dtype) -> None:
        self.federation, self.images, self.dtype = federation, images, dtype
        self.chunks = chunks  # int64 [chunks, B]
        self.stems: Stem | None = None  # of all chunks
        self.features: Table | None = None  # of the chunks' images, one chunk after another

    def keep(self, model: LaneModel, room: int) -> None:
        """Keeps what the model's frozen front makes of the images: they are never augmented.

        room: bytes for what a first layer makes; the features of a prefix find their own place.
        """
        if model.prefix is not None:
            numbers = self.chunks.flatten()
            self.features = keep(model, self.images, numbers, self._normalised, self.federation.about_pixels)
            return
        first = model.front(self._prepared(self.chunks[0]))
        if isinstance(first, Stem) and first.bytes * len(self) <= room:
            self.stems = Stem.joined([first, *(model.front(self._prepared(c)) for c in self.chunks[1:])])  # type: ignore[list-item]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: Any) -> Any:
        return self.at(torch.tensor([at], device=self.chunks.device))

    def at(self, number: Tensor) -> Front:
        """Returns the chunk of this number, int64 `[1]`: prepared, `[B, 3, H, W]`, or what is kept of it."""
        if self.features is not None:
            size = self.chunks.shape[1]
            return self.features.take(number[:, None] * size + torch.arange(size, device=number.device))
        if self.stems is not None:
            return self.stems.seen(number)
        return self._prepared(self.chunks[number])

    def _normalised(self, images: Tensor) -> Tensor:
        return self.federation.prepare(images, self.dtype)

    def _prepared(self, index: Tensor) -> Tensor:
        return self.federation.plain_views(self.images, index.view(1, -1), self.dtype)
