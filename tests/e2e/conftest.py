"""A run that several modules here look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import flags

from perada.cli import main as cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    assert cli.main(["train", "digits", *flags(), "--out", str(out)]) == 0
    return out
