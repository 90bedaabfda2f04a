"""Data sets, their split among clients, and batches: from `DataOptions` or your own arrays to a `Federation`."""

from .corruption_kinds import CORRUPTIONS
from .corruptions import SEVERITIES
from .federation import Federation, blank, build_federation
from .images import read_image
from .named import GIVEN, SOURCES, DataOptions, data_home, own, place_of
from .public import PUBLIC, VALIDATION, as_public, is_public_name, public_images
from .source import Client, Source
from .testsets import named_sets

__all__ = [
    "CORRUPTIONS",
    "GIVEN",
    "PUBLIC",
    "SEVERITIES",
    "SOURCES",
    "VALIDATION",
    "Client",
    "DataOptions",
    "Federation",
    "Source",
    "as_public",
    "blank",
    "build_federation",
    "data_home",
    "is_public_name",
    "named_sets",
    "own",
    "place_of",
    "public_images",
    "read_image",
]
