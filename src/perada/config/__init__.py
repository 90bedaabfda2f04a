"""Configuration: TOML files and `section.key` settings, and the objects that they describe."""

from .keys import (
    SECTIONS,
    Config,
    ModelOptions,
    from_tables,
    in_keys,
    parse_grid,
    parse_setting,
    presets,
    read_toml,
    resolve,
    section,
    toml_value,
    tune_grid,
)
from .objects import build, describe, federation_of

__all__ = [
    "SECTIONS",
    "Config",
    "ModelOptions",
    "build",
    "describe",
    "federation_of",
    "from_tables",
    "in_keys",
    "parse_grid",
    "parse_setting",
    "presets",
    "read_toml",
    "resolve",
    "section",
    "toml_value",
    "tune_grid",
]
