"""Configuration: TOML files and `section.key` settings, and the objects that they describe."""

from .build import build, describe
from .keys import (
    SECTIONS,
    Config,
    ModelOptions,
    from_tables,
    in_keys,
    parse_grid,
    parse_setting,
    presets,
    resolve,
    section,
    toml_value,
    tune_grid,
)

__all__ = [
    "SECTIONS",
    "Config",
    "ModelOptions",
    "build",
    "describe",
    "from_tables",
    "in_keys",
    "parse_grid",
    "parse_setting",
    "presets",
    "resolve",
    "section",
    "toml_value",
    "tune_grid",
]
