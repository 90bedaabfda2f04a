from pathlib import Path
from typing import Any


def write_report(runs: list[Any], out: Path) -> None:
    pass
